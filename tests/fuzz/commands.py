"""The command line of tools/fuzz."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.inputs.case import Case, shell
from tests.inputs.forks import Outcome
from tests.inputs.table import Table, all_cases, chosen


def main() -> int:
    """Run what the command line asks for; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="tools/fuzz")
    parser.add_argument("--match", default="", help="names that hold this regular expression")
    parser.add_argument("--number", type=int, help="how many bad inputs; all if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="commands at once")
    parser.add_argument("--keep", type=Path, help="a new folder in which all files stay")
    parser.add_argument("--json", type=Path, help="a file for a line of JSON about each")
    parser.add_argument("--without", type=Path, help="leave out what this file of --json has")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--seconds", type=float, help="try the readers instead, each so long")
    given = parser.parse_args()
    if given.seconds is not None:
        from tests.fuzz.campaign import fuzz_readers

        return fuzz_readers(given.match, given.seconds, given.seed, given.jobs, given.json)
    cases = [case for case in all_cases() if re.search(given.match, case.title)]
    if given.without and given.without.exists():
        tried = {json.loads(line)["title"] for line in given.without.read_text().splitlines()}
        cases = [case for case in cases if case.title not in tried]
    if given.number is not None:
        cases = chosen(cases, given.number, given.seed)
    if given.list:
        print("\n".join(case.title for case in cases))
        return 0
    if given.keep:
        given.keep.mkdir(parents=True)
        return _run(cases, given.keep, given)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        return _run(cases, Path(scratch), given)


def _run(cases: list[Case], scratch: Path, given: argparse.Namespace) -> int:
    began, found, slowest = time.monotonic(), 0, 0.0
    with Table(scratch, given.jobs, keep=bool(given.keep)) as table:
        for number, (case, outcome) in enumerate(table.run(cases), 1):
            faults = case.faults(outcome)
            slowest = max(slowest, outcome.seconds)
            if faults:
                found += 1
                print(f"{case.title}\n    {shell(case.argv)}\n    " + "\n    ".join(faults))
            if given.keep:
                print(f"{outcome.job.folder}: exit {outcome.code}\n{outcome.said}")
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(record(case, outcome, faults)) + "\n")
            if number % 100 == 0:
                print(f"{number} of {len(cases)}, {found} with faults", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{len(cases)} bad inputs in {seconds:.0f} s, the slowest {slowest:.1f} s: {found} faults"
    )
    return 1 if found else 0


def record(case: Case, outcome: Outcome, faults: list[str]) -> dict[str, Any]:
    """What is kept of one case."""
    return {
        "room": case.room,
        "title": case.title,
        "argv": shell(case.argv),
        "faults": faults,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 3),
        "cpu": round(outcome.cpu, 3),
        "memory": outcome.memory,
        "said": outcome.said[-1500:] if faults else "",
    }
