"""What became of the planted faults: a table by file, and the faults that nobody noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.mutation.mutants import Mutant
from tools.mutation.trial import KILLED, TIMED_OUT

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")


@dataclass(frozen=True)
class Trial:
    """A fault, the line it stands in, and how the tests ended."""

    mutant: Mutant
    source: str  # the line without its indentation
    ended: str
    seconds: float

    @property
    def noticed(self) -> bool:
        """Whether a test failed, or never came to an end."""
        return self.ended in (KILLED, TIMED_OUT)


def reasons(path: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Why a fault changes nothing that anybody can see, by file, line of source and new text."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    return {(e["file"], e["source"], e["new"]): e["why"] for e in entries or []}


def reason(trial: Trial, known: dict[tuple[str, str, str], str]) -> str:
    """Why this fault is none; empty where nobody said so."""
    return known.get((trial.mutant.file, trial.source, trial.mutant.new), "")


def report(trials: Sequence[Trial], known: dict[tuple[str, str, str], str]) -> Iterator[str]:
    """Lines of Markdown: the share noticed by file, and each fault that was not."""
    files = sorted({trial.mutant.file for trial in trials})
    yield "| file | faults | noticed | of these by a time limit | equivalent | unnoticed | share |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name in [*files, "all"]:
        yield _row(name, [t for t in trials if name in (t.mutant.file, "all")], known)
    for trial in trials:
        if not trial.noticed and not reason(trial, known):
            mutant = trial.mutant
            yield f"\n{mutant.file}:{mutant.line} ({mutant.kind}, {trial.ended})"
            yield f"    {trial.source}"
            yield f"    {mutant.old}  ->  {mutant.new}"


def _row(name: str, trials: Sequence[Trial], known: dict[tuple[str, str, str], str]) -> str:
    tally = Counter(trial.ended for trial in trials)
    noticed = tally[KILLED] + tally[TIMED_OUT]
    equivalent = sum(not t.noticed and bool(reason(t, known)) for t in trials)
    counted = len(trials) - equivalent
    share = f"{100 * noticed / counted:.0f} %" if counted else ""
    unnoticed = counted - noticed
    figures = (len(trials), noticed, tally[TIMED_OUT], equivalent, unnoticed, share)
    return f"| {name} | " + " | ".join(map(str, figures)) + " |"
