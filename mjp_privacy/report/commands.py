"""`mjp report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from mjp_privacy.core.command import DONE, Usage


@dataclass(frozen=True)
class ReportArguments:
    """Tables, samples and pictures from finished or half-finished runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, each the --out of an attack."""
    out: Path
    """Where table.md, table.csv, table.tex, table.html, samples.csv and pictures go."""


def report(argv: list[str], usage: Usage) -> int:
    given = usage.parse(ReportArguments, argv)
    from mjp_privacy.report import write_report

    summary = write_report(given.runs, given.out)
    print(summary.console)
    if summary.not_run:
        print(f"UNFINISHED: {summary.not_run} images of all lines were not run", file=sys.stderr)
    return DONE
