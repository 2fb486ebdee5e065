"""`mjp report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mjp_privacy.core.command import DONE, SOME_FAILED, Usage
from mjp_privacy.core.text import shown


@dataclass(frozen=True)
class ReportArguments:
    """Make a page, tables and pictures from finished or unfinished runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders: each is the --out of an attack."""
    out: Path
    """Folder for index.html, table.md, table.tex, table.csv, the pictures, and samples.csv, which
    is samples.txt for a large run: where its rows are."""
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False
    """Print every line and write every note and diagnostic, not the answer alone."""
    pictures: Literal["shown", "all", "none"] = "shown"
    """Which reconstructions to write as PNG files: those on the page, all, or none."""


def report(argv: list[str], usage: Usage) -> int:
    """Write the report of the runs named in `argv` and print its answer."""
    arguments = usage.parse(ReportArguments, argv)
    from mjp_privacy.report.write import write_report

    summary = write_report(
        arguments.runs,
        arguments.out,
        everything=arguments.everything,
        pictures=arguments.pictures,
    )
    print(summary.console)
    print(f"The page: {shown(summary.files[0])}")
    if summary.not_run:
        print(
            f"UNFINISHED: {summary.not_run} images were not run, counted over all lines",
            file=sys.stderr,
        )
    if summary.damaged:
        print(
            f"DAMAGED: {summary.damaged} file(s) of rows are in no figure: run the attack again",
            file=sys.stderr,
        )
        return SOME_FAILED
    return DONE
