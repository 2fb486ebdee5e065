"""`mjp report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from mjp_privacy.core.command import DONE, Usage


@dataclass(frozen=True)
class ReportArguments:
    """Make tables, samples and pictures from finished or unfinished runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders: each is the --out of an attack."""
    out: Path
    """Folder for table.md, table.csv, table.tex, table.html, samples.csv and the pictures."""


def report(argv: list[str], usage: Usage) -> int:
    """Write the report of the runs named in `argv` and print its table."""
    arguments = usage.parse(ReportArguments, argv)
    from mjp_privacy.report.write import write_report

    summary = write_report(arguments.runs, arguments.out)
    print(summary.console)
    if summary.not_run:
        print(
            f"UNFINISHED: {summary.not_run} images were not run, counted over all lines",
            file=sys.stderr,
        )
    return DONE
