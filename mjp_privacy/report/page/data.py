"""What the page's script reads: the lines, their scores image by image, and the pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.contents import Contents
from mjp_privacy.report.lines import Line
from mjp_privacy.report.published import TITLES
from mjp_privacy.report.tables.identification import evenly_spaced
from mjp_privacy.report.tables.text import DECIMALS, TextTable, capped

SCORES = {"psnr": "standard", "ssim": "standard", "lpips": "standard", "mse": "standard"}
SCORES |= {"fft2d": "standard", "gradient_residual": "diagnostic"}
"""The scores that pictures have, in the page's order, and the variant of each."""

MOST_COMPARED = 100_000
"""Images times lines whose scores the page holds; they take 6 MB of it."""

DIGITS = 6  # significant ones of a per-image score


def page_images(contents: Contents) -> list[str]:
    """The images whose scores are in the page, where two lines are compared image by image: all,
    or as many as there is room for, evenly spaced among them, and those shown."""
    every, lines = contents.image_ids, [*contents.lines, *contents.derived]
    most = max(MOST_COMPARED // max(1, len(lines)), 2)
    if len(every) <= most:
        return every
    return sorted(
        {*evenly_spaced(every, most), *(shown.image_id for shown in contents.gallery.shown)}
    )


def folded_lines(contents: Contents) -> set[int]:
    """The lines that the page shows on demand: controls, and float64 beside other precisions."""
    lines = [*contents.lines, *contents.derived]
    single = any(line.cell.dtype != "float64" for line in contents.lines)
    double = {line.number for line in lines if line.cell.dtype == "float64"} if single else set()
    return double | {line.number for line in lines if line.role in ("floor", "ceiling")}


def lines_table(contents: Contents) -> TextTable:
    """Every line, with what must not be taken at face value in words."""
    table, flags = contents.main(folded=True), contents.line_flags
    rows = [
        (*row, "; ".join(flag.name for flag in flags.get(int(row[0]), ()))) for row in table.rows
    ]
    header = (*table.header, "beware")
    return TextTable(table.title, table.caption, header, tuple(rows), table.align + "l")


def page_data(contents: Contents, images: Sequence[str]) -> str:
    """The text of `<script type="application/json">`; pictures of the strip stand in the page."""
    lines = [*contents.lines, *contents.derived]
    scores = {line.number: _scores(line, images) for line in lines}
    found = [name for name in SCORES if any(name in of_line for of_line in scores.values())]
    folded, several = folded_lines(contents), contents.loaded.many_runs
    strip = {
        key for shown in contents.gallery.shown if shown.strip for key in shown.keys(contents.strip)
    }
    data = {
        "cap": PSNR_CAP,
        "at_cap": capped(PSNR_CAP, 1),
        "metrics": [
            {"name": name, "title": TITLES.get(name, name.replace("_", " "))}
            | {"decimals": DECIMALS.get(name, 4)}
            for name in found
        ],
        "lines": [
            {
                "number": line.number,
                "attack": line.title,
                "client": contents.client_names[line.number],
            }
            | {"name": _name(line, contents.client_names[line.number], several=several)}
            | {"cell": line.run_id, "setting": line.cell.setting, "folded": line.number in folded}
            | {"scores": scores[line.number], "exact": _exact(line, images)}
            for line in lines
        ],
        "image_ids": images,
        "shown": [shown.as_json() for shown in contents.gallery.shown],
        "pictures": [item for item in contents.gallery.pictures.items() if item[0] not in strip],
    }
    return script_json(data)


def _name(line: Line, client: str, *, several: bool) -> str:
    run = f"{line.run} · " if several else ""
    return f"{line.number} · {run}{client} · {line.title}"


def _scores(line: Line, images: Sequence[str]) -> dict[str, list[float | str | None]]:
    """By metric, in the order of `images`; JSON knows neither NaN nor infinity."""
    of_line = {}
    for metric, variant in SCORES.items():
        if line.count(metric, variant):
            of_line[metric] = [_plain(value) for value in _values(line, metric, variant, images)]
    return of_line


def _exact(line: Line, images: Sequence[str]) -> list[int]:
    """Which pictures are equal to the original in every 8-bit value."""
    return [int(value == math.inf) for value in _values(line, "psnr", "paper", images)]


def _values(line: Line, metric: str, variant: str, images: Sequence[str]) -> list[float]:
    column = line.column(metric, variant)
    values = np.full(len(line.images) + 1, np.nan)  # the last one for images it does not have
    values[column.at[column.scored]] = column.values[column.scored]
    known: list[float] = values[line.images.places(images)].tolist()
    return known


def _plain(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"  # as JavaScript reads it
    return float(f"{value:.{DIGITS}g}")


def script_json(data: Any) -> str:
    """JSON that may stand inside a script element: it holds no `<`, `>`, `&` and only ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
