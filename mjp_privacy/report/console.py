"""What `mjp report` prints: the card, what was not scored, and on request every line."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from mjp_privacy.report.card.content import Card
from mjp_privacy.report.card.text import console_card
from mjp_privacy.report.pictures.pixels import one_line
from mjp_privacy.report.tables.figures import Table
from mjp_privacy.report.tables.text import (
    DASH,
    REDUCTIONS,
    Record,
    attack,
    capped,
    gamma,
    number,
    records,
    remark,
    title_of,
)

WIDTH = 120

REASONS_SHOWN = 4
"""Reasons of missing scores that are printed without `--all`."""

LINES_SHOWN = 30
"""Letters of the numbers of lines that a reason which is cut keeps."""

COLUMNS = (
    *("#", "Model", "Set", "γ", "Attack", "dtype", "n", "fail", "PSNR", "exact", "≥20", "grey"),
    *("SSIM", "LPIPS", "Acc"),
)
_LEFT = ("Model", "Set", "Attack", "dtype")
_MAY_WRAP = ("Model", "Attack")


def console_text(card: Card, reasons: Sequence[str], table: Table | None = None) -> str:
    """The card, the commonest reasons of missing scores, and the lines of `table` if it is given.

    reasons  sentences as `notes.not_scored` makes them
    """
    shown = reasons if table is not None else reasons[:REASONS_SHOWN]
    parts = [console_card(card)]
    if shown:
        more = len(reasons) - len(shown)
        tail = [f"and {more} further reasons: see the page"] if more else []
        said = [_cut(one_line(reason)) for reason in (*shown, *tail)]
        parts.append("\n".join(said) + "\n")
    if table is not None:
        parts.append(console_table(table, many_runs=table.frame["run"].nunique() > 1))
    return "\n".join(parts)


def _cut(reason: str) -> str:
    """A reason on one line, cut between words; the lines it holds for stay at its end."""
    if len(reason) <= WIDTH:
        return reason
    text, bracket, lines = reason.rpartition(" (lines ")
    end = f"{bracket}{lines}" if len(lines) < LINES_SHOWN else ""
    return textwrap.shorten(text if end else reason, WIDTH - len(end), placeholder=" …") + end


def console_table(table: Table, *, many_runs: bool) -> str:
    """The main columns of `table`; below it, why lines have no score."""
    rich_table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in (*(["Run"] if many_runs else []), *COLUMNS):
        left = title in _LEFT or title == "Run"
        wraps = title in _MAY_WRAP or title == "Run"
        rich_table.add_column(
            title, justify="left" if left else "right", no_wrap=not wraps, overflow="fold"
        )
    rows = records(table)
    first_reduction = next((row for row in rows if row["role"] in REDUCTIONS), None)
    for row in rows:
        if row is first_reduction:
            rich_table.add_section()
        run = [str(row["run"])] if many_runs else []
        rich_table.add_row(*(Text(one_line(cell)) for cell in (*run, *_cells(row))))
    text = _render(rich_table) + _legend(table.varying)
    reasons = [f"line {row['line']}: {remark(row)}" for row in rows if remark(row)]
    said = (_render(Text(one_line(reason))).rstrip() for reason in reasons)
    return "\n".join([text, *said]) + "\n"


def _render(content: Any) -> str:
    out = io.StringIO()
    # no colours and a fixed width, so that the same rows print the same text everywhere
    Console(file=out, width=WIDTH, color_system=None, legacy_windows=False).print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _legend(varying: Sequence[str]) -> str:
    further = (
        f" The lines also differ in {', '.join(map(title_of, varying))}; see table.md."
        if varying
        else ""
    )
    legend = (
        "PSNR: standard variant, mean ± half its 95 % interval, in dB, capped at 100; exact: equal "
        "in every 8-bit value; ≥20: pictures at 20 dB or more; grey: PSNR of a uniform grey; fail: "
        f"number of images that failed or were not run.{further}"
    )
    return _render(Text(legend)).rstrip()


def _short(value: float) -> str:
    return "<.001" if 0 < value < 0.0005 else number(value, 3)


def _cells(record: Record) -> list[str]:
    half = (record["psnr_hi"] - record["psnr_lo"]) / 2
    psnr = capped(record["psnr_mean"], 2)
    missing = record["n_failed"] + record["n_unsupported"] + record["n_unscored"]
    failed = record["n_failed"] + record["n_not_run"]
    cell_failed = record["status"] != "ok" and not missing
    return [
        *(str(record["line"]), str(record["model"]), str(record["setting"])),
        *(gamma(record["gamma"]), attack(record)),
        str(record["dtype"]).replace("float", "f"),
        *(
            str(record["n"]),
            record["status"][:6] if cell_failed else str(failed),
        ),
        psnr if psnr == DASH or math.isnan(half) or half == 0 else f"{psnr} ±{half:.2f}",
        *((str(record["psnr_exact"]), str(record["psnr_at_20"])) if record["n"] else "––"),
        number(record["grey_mean"], 1),
        *(_short(record["ssim_mean"]), _short(record["lpips_mean"])),
        number(record["acc_mean"], 1),
    ]
