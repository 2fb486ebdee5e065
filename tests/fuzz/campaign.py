"""tools/fuzz --seconds: every reader for so long, each in a process of its own."""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.readers import READERS
from tests.fuzz.trial import Tally, trial
from tests.inputs.base import write_base
from tests.inputs.forks import ForkServer, Job, Outcome

PIECE = 60.0  # seconds of a process: one that dies loses what it counted
STRIDE = 1_000_000  # seeds that a process may use


def fuzz_readers(match: str, seconds: float, seed: int, jobs: int, out: Path | None) -> int:
    """Try every reader of these names; 1 if a fault was found."""
    names = [name for name in READERS if re.search(match, name)]
    found = False
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        scratch = Path(folder)
        (scratch / "base").mkdir()
        with ForkServer(scratch, jobs) as server:
            write_base(scratch / "base", server)
            print(f"{'reader':28}{'inputs':>9}{'read':>9}{'refused':>9}{'slowest':>8}{'MiB':>6}")
            for tally in fuzzed(server, names, seconds, seed):
                _show(tally)
                found = found or bool(tally.faults)
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(asdict(tally)) + "\n")
    return 1 if found else 0


def fuzzed(
    server: ForkServer, names: Sequence[str], seconds: float, seed: int, most: int = STRIDE
) -> Iterator[Tally]:
    """What came of every reader, each after so many seconds of the processor or `most` inputs a
    process; the server's scratch folder holds the base inputs."""
    pieces = [min(PIECE, seconds - at * PIECE) for at in range(math.ceil(seconds / PIECE))]
    jobs = [
        _job(server, name, number, seed * 1000 * STRIDE + number * STRIDE, length, most)
        for name in names
        for number, length in enumerate(pieces)
    ]
    parts: dict[str, list[Tally]] = defaultdict(list)
    for outcome in server.run(jobs):
        name = outcome.job.argv[0]
        parts[name].append(_part(name, outcome))
        if len(parts[name]) == len(pieces):
            yield summed(parts.pop(name))


def _job(server: ForkServer, name: str, number: int, first: int, length: float, most: int) -> Job:
    folder = server.scratch / "readers" / f"{name} {number}".replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    words = [name, str(server.scratch / "base"), str(folder / "work"), str(first)]
    words += [str(length), str(most)]
    return Job(name, words, folder, 20 * length + 120, int(3 * length + 30), "tests.fuzz.campaign")


def _part(name: str, outcome: Outcome) -> Tally:
    """What one process counted; one that died is a fault."""
    lines = outcome.output.splitlines()
    if outcome.code or not lines:
        how = "hung" if outcome.hung else f"ended with {outcome.code}"
        return Tally(name, faults={f"the process {how}: {outcome.errors[-300:]}": "?"})
    return Tally(**json.loads(lines[-1]), memory=outcome.memory >> 20)


def summed(parts: Sequence[Tally]) -> Tally:
    """What several processes counted together."""
    whole = Tally(parts[0].reader)
    for part in parts:
        for count in ("tried", "read", "refused", "slow"):
            setattr(whole, count, getattr(whole, count) + getattr(part, count))
        whole.slowest = max(whole.slowest, part.slowest)
        whole.memory = max(whole.memory, part.memory)
        whole.faults = {**part.faults, **whole.faults}
    return whole


def _show(tally: Tally) -> None:
    counts = (
        f"{tally.tried:9,}{tally.read:9,}{tally.refused:9,}{tally.slowest:7.2f}s{tally.memory:6}"
    )
    print(f"{tally.reader:28}{counts}", flush=True)
    for fault, seed in tally.faults.items():
        print(f"    {fault} [seed {seed}]", flush=True)


def _one_process(words: list[str]) -> None:
    """Try one reader for so many seconds of the processor, and print what was counted."""
    name, base, scratch, first, seconds, most = words
    seeds = range(int(first), int(first) + int(most))
    until = time.process_time() + float(seconds)
    tally = trial(name, Path(base), Path(scratch), iter(seeds), until)
    counted = asdict(tally)
    counted.pop("memory")
    print("\n" + json.dumps(counted))


if __name__ == "__main__":
    _one_process(sys.argv[1:])
