"""All bad inputs, and what runs them.

with Table(scratch) as table:
    for case, outcome in table.run(all_cases()):
        case.faults(outcome)
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from tests.inputs import (
    cases_commands,
    cases_fields,
    cases_files,
    cases_pictures,
    cases_tensors,
)
from tests.inputs.base import write_base
from tests.inputs.case import Case, remove
from tests.inputs.forks import ForkServer, Job, Outcome


def all_cases() -> list[Case]:
    """Every case, each with a title of its own."""
    makers = (cases_fields, cases_files, cases_tensors, cases_pictures, cases_commands)
    cases = itertools.chain(*(maker.all_cases() for maker in makers))
    return list({case.title: case for case in cases}.values())


ALWAYS = (
    "config/attack/experiment.yaml is aliases",
    "config/attack/experiment.yaml is deep",
    "config/attack/experiment.yaml is python object",
    "config/attack/experiment.yaml seed = 2^63",
    "config/attack/experiment.yaml models.M.img_size = 10^9",
    "config/federate/federation.yaml attacks.0.name = a text",
    "core/attack/out inside the input",
    "core/sample/out inside the input",
    "core/attack/words --images = empty",
    "core/attack/words --out = empty",
    "core/attack/words --out = null device",
    "core/attack/words --seed = 10^30",
    "core/score/words --out = null device",
    "data/attack/images/labels.csv is labels: 5,000 digits",
    "data/attack/images/labels.csv is labels: a column twice",
    "data/attack/images/labels.csv is labels: a name twice",
    "data/attack/images/labels.csv is labels: empty id",
    "data/attack/images/9.png is png bomb",
    "data/attack/images/9.png is png of 2^62 pixels",
    "data/attack/images.zip is zip: bomb",
    "uploads/attack/header noise = entry -1",
    "uploads/check/header noise = entry -1",
    "uploads/check/header round = 10^30",
    "uploads/check/header weight_decay = nan",
    "uploads/check/header weights = a text of 5,000",
    "uploads/check/header model.mlp_ratio = -1",
    "uploads/check/header model.model = number",
    "uploads/attack/uploads/b1s1_r00000_000_at00000.json is a pipe",
    "uploads/attack/uploads/b1s1_r00000_000_at00000.safetensors is all float8_e4m3fn",
    "uploads/attack/uploads/truth/b1s1_r00000_000_at00000.safetensors is all bool",
    "uploads/attack/uploads/truth/b1s1_r00000_000_at00000.safetensors is images no rows",
    "checkpoints/check/model.safetensors is blocks.foo.weight",
    "checkpoints/attack/model.safetensors is pos_embed scalar",
    "checkpoints/attack/model.safetensors is patch_embed.proj.weight no rows",
    "checkpoints/attack/model.safetensors is patch_embed.proj.weight NaN",
    "checkpoints/attack/model.safetensors is all int8",
    "checkpoints/attack/model.safetensors is all complex64",
    "checkpoints/evaluate/metadata mean = deep",
    "checkpoints/attack/prior.safetensors is half",
    "store/report/run/rows/*/00000.*.parquet is half",
    "store/attack/run/rows/*/00000.*.parquet is one bit",
    "store/report/run/cells.*.parquet is half",
)
"""What was found broken once; these are always tried."""


def chosen(cases: Sequence[Case], number: int, seed: int) -> list[Case]:
    """About this many cases, spread over rooms, commands and kinds of input."""
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        if case.title in ALWAYS:
            continue
        groups[(case.room, *case.argv[:1], case.name.split(" ")[0].split(".")[0])].append(case)
    chance = random.Random(seed)
    queues = [chance.sample(group, len(group)) for group in groups.values()]
    picked = [case for case in cases if case.title in ALWAYS]
    while len(picked) < number and any(queues):
        for queue in queues:
            if queue and len(picked) < number:
                picked.append(queue.pop())
    return picked


class Table:
    """Runs cases in a scratch folder, many at once, each in a folder of its own."""

    def __init__(self, scratch: Path, jobs: int = 2, *, keep: bool = False) -> None:
        self.base, self.keep = scratch / "base", keep
        self._cases = scratch / "cases"
        self.server = ForkServer(scratch, jobs)

    def __enter__(self) -> Table:
        self.base.mkdir(parents=True)
        self.server.__enter__()
        write_base(self.base, self.server)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.__exit__(kind, error, trace)

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Each case and its outcome, in the order in which they end."""
        running: dict[Path, Case] = {}
        for outcome in self.server.run(self._jobs(cases, running)):
            case = running.pop(outcome.job.folder)
            yield case, outcome
            if not self.keep:
                remove(outcome.job.folder)

    def _jobs(self, cases: Iterable[Case], running: dict[Path, Case]) -> Iterator[Job]:
        shutil.rmtree(self._cases, ignore_errors=True)
        for number, case in enumerate(cases):
            if case.devices and not self.server.guarded:
                continue
            job = case.prepare(self.base, self._cases / str(number))
            running[job.folder] = case
            yield job
