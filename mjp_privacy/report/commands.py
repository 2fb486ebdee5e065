"""`mjp report`, and `mjp attack`, which ends with the same answer; `mjp demo` is both."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mjp_privacy.core.command import DONE, SOME_FAILED, Usage, print_json
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_each_once
from mjp_privacy.core.text import first_of, shown

NAMED = 5
"""Damaged files that are called by their names."""


@dataclass(frozen=True)
class ReportArguments:
    """Make a page, tables and pictures from finished or unfinished runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders: each is the --out of an attack."""
    out: Path | None = None
    """Folder for index.html, table.md, table.tex, table.csv, samples.csv and the pictures.
    RUN/report if not given; any other has to be new or empty, or an earlier report's."""
    pictures: Literal["shown", "all", "none"] = "shown"
    """Which reconstructions to write as PNG files: those on the page, all, or none."""
    json: bool = False
    """Print the answer as JSON for programs (docs/json.md)."""


def report(argv: list[str], usage: Usage) -> int:
    """Write the report of the runs named in `argv` and print its answer."""
    arguments = usage.parse(ReportArguments, argv)
    out = arguments.out
    check_each_once(arguments.runs, "run folders")
    if out is None:
        if len(arguments.runs) > 1:
            raise UserError("expected --out for a report of several runs, got none. Add --out DIR")
        out = arguments.runs[0] / "report"
    from mjp_privacy.report.card import as_fields
    from mjp_privacy.report.write import write_report

    summary = write_report(arguments.runs, out, pictures=arguments.pictures)
    if arguments.json:
        contents = summary.contents
        more = {"reasons": contents.reasons, "files": summary.files, "not_run": summary.not_run}
        more["damaged_files"] = len(summary.damaged)
        print_json("report", {**as_fields(contents.card), **more})
    else:
        print(summary.console)
        print(f"The page: {shown(summary.files[0])}")
    if summary.not_run:
        print(
            f"UNFINISHED: {summary.not_run} images were not run, counted over all lines",
            file=sys.stderr,
        )
    if summary.damaged:
        print(
            f"DAMAGED: {len(summary.damaged)} file(s) are damaged or missing: run the attack again "
            f"({first_of(summary.damaged, NAMED)})",
            file=sys.stderr,
        )
    if summary.made_nothing:
        print("NOTHING MADE: no attack gave a picture; the page has the reasons", file=sys.stderr)
    return SOME_FAILED if summary.damaged or summary.made_nothing else DONE


@dataclass(frozen=True)
class DemoArguments:
    """Attack clients with and without MJP on photographs that every installation has, and make the
    page: `mjp attack demo` and `mjp report` in one. Nothing is downloaded."""

    out: Path = Path("results/demo")
    """The run folder; the page is in its folder `report`."""
    limit: int | None = None
    """Attack only this many of the 20 photographs."""


def demo(argv: list[str], usage: Usage) -> int:
    """`mjp demo`: the stock config's attack, its report, and where the page is."""
    arguments = usage.parse(DemoArguments, argv)
    from mjp_privacy.core.read import STOCK
    from mjp_privacy.experiment.run import run_experiment
    from mjp_privacy.report.write import write_report

    done = run_experiment(
        STOCK / "demo.yaml",
        out=arguments.out,
        limit=arguments.limit,
        stale="fresh",
        engine="auto",
    )
    summary = write_report([done.out], done.out / "report")
    print(summary.console)
    print(f"The page, for a browser: {summary.files[0].resolve().as_uri()}")
    return DONE if done.exit_code == 0 and not summary.damaged else SOME_FAILED


def attack(argv: list[str], usage: Usage) -> int:
    """`mjp attack`: run the experiment, then print the answer of its folder."""
    from mjp_privacy.experiment import commands

    def answer(run: Path) -> str:
        from mjp_privacy.report.card import console_card
        from mjp_privacy.report.contents import read_contents

        return console_card(read_contents([run]).card)

    return commands.attack(argv, usage, answer)
