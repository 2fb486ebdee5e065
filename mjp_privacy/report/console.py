"""The table for a terminal of 120 columns."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from mjp_privacy.report.tables import Table
from mjp_privacy.report.views import (
    DASH,
    REDUCTIONS,
    Record,
    attack,
    gamma,
    number,
    records,
    remark,
    title_of,
)

WIDTH = 120

COLUMNS = (
    *("#", "Model", "Set", "γ", "Attack", "dtype", "n", "fail", "Acc", "PSNR", "grey", "ceil"),
    *("SSIM", "LPIPS", "paper", "Δ"),
)
_LEFT = ("Model", "Set", "Attack", "dtype")
_MAY_WRAP = ("Model", "Attack")


def console_table(table: Table, *, many_runs: bool) -> str:
    """The main columns of `table`; below it, why lines have no score.

    `table` is that of the paper variant, which the legend describes.
    """
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
        rich_table.add_row(*(Text(cell) for cell in (*run, *_cells(row))))
    text = _render(rich_table) + _legend(table.varying)
    reasons = [f"line {row['line']}: {remark(row)}" for row in rows if remark(row)]
    return "\n".join([text, *(_render(Text(reason)).rstrip() for reason in reasons)]) + "\n"


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
        "PSNR: paper variant (8 bits, exact = 100), mean ± half its 95 % interval, in dB; ceil: "
        "the ceiling of the PSNR; paper, Δ: the paper's PSNR, and ours minus the paper's; grey: "
        f"PSNR of a uniform grey; fail: number of images that failed or were not run.{further}"
    )
    return _render(Text(legend)).rstrip()


def _short(value: float) -> str:
    return "<.001" if 0 < value < 0.0005 else number(value, 3)


def _cells(record: Record) -> list[str]:
    half = (record["psnr_hi"] - record["psnr_lo"]) / 2
    psnr = number(record["psnr_mean"], 2)
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
        number(record["acc_mean"], 1),
        psnr if psnr == DASH or math.isnan(half) else f"{psnr} ±{half:.2f}",
        number(record["grey_mean"], 1),
        number(record["ceiling_mean"], 1),
        *(_short(record["ssim_mean"]), _short(record["lpips_mean"])),
        *(number(record["psnr_paper"], 2), number(record["psnr_difference"], 2, sign=True)),
    ]
