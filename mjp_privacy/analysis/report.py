"""What `mjp analyse` prints and writes: sentences, a short table, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mjp_privacy.analysis.analysed import Analysed, Noise
from mjp_privacy.analysis.published import CAVEATS
from mjp_privacy.analysis.regression import REPEATS
from mjp_privacy.analysis.rows import NOISE, PAPER, Row, rows
from mjp_privacy.analysis.sentences import sentences
from mjp_privacy.analysis.spectrum import DIMENSIONS
from mjp_privacy.core.files import write_atomically, write_json
from mjp_privacy.metrics.spreadsheet import formula_free

DASH = "–"
COLUMNS: Mapping[str, tuple[str, int]] = {  # of a row: heading, decimals
    **{f"variance_{k}": (f"{k} dim. %" if k == DIMENSIONS[0] else f"{k}", 2) for k in DIMENSIONS},
    "dimensions_for_90": ("90 % in", 0),
    "mae_1d": ("1D MAE", 3),
    "mae_2d": ("2D MAE", 3),
    "start_share": ("start %", 1),
    "rest_variance_3": ("learned: 3 dim. %", 2),
    "rest_mae_2d": ("2D MAE", 3),
    "head_diversity": ("heads", 2),
    "image_diversity": ("images", 2),
}
RANGED = ("variance_3", "mae_2d")
"""Columns that show noise with its smallest and largest value over the seeds."""

LEGEND = (
    "3 dim. %, 4 … 7: variance that PCA keeps (Table 6). 90 % in: singular values that hold 90 % "
    "of the energy (Fig. 4). MAE: a linear map from embedding to place, in patches: its number "
    "(1D) or row and column (2D), five folds, mean ± standard deviation over "
    f"{REPEATS} draws of the folds (Table 8).",
    "start %: variance along the random start, drawn again from the recipe in the file; learned: "
    "the table without it. Noise: tables drawn from N(0, 1) and never trained, mean [smallest, "
    "largest].",
    "heads, images: how much the last block's class-token attention differs between heads and "
    "between images, 0 (alike) to 1 (Jensen-Shannon divergence over its largest value; ours, the "
    "paper has no number).",
    "Planes: PCA. UMAP's, which Figures 1 and 7 show, depends on a seed and two settings that the "
    "paper does not print (--umap draws it from two seeds); the regression measures what such a "
    "picture suggests.",
)


def console(results: Sequence[Analysed], noises: Sequence[Noise]) -> str:
    """The answer in sentences, then the table."""
    return "\n".join([*sentences(results, noises), "", *_table(list(rows(results, noises)))])


def write_tables(
    results: Sequence[Analysed], noises: Sequence[Noise], out: Path, *, has_umap: bool = False
) -> None:
    """analysis.md, analysis.csv and analysis.json into a folder."""
    lines = list(rows(results, noises))
    markdown = _markdown(results, noises, lines, has_umap)
    table = _csv(lines)
    write_atomically(out / "analysis.csv", lambda place: place.write_text(table, "utf-8"))
    write_json(out / "analysis.json", _json(results, lines))
    write_atomically(out / "analysis.md", lambda place: place.write_text(markdown, "utf-8"))


def _markdown(
    results: Sequence[Analysed], noises: Sequence[Noise], lines: Sequence[Row], has_umap: bool
) -> str:
    notes = [f"{result.label}: {note}" for result in results for note in result.notes]
    attention = [
        f"![attention of {_escaped(result.label)}](attention_{number}.png)"
        for number, result in enumerate(results, 1)
    ]
    parts = [
        "# What the position embeddings hold",
        "\n".join(f"- {_escaped(said)}" for said in sentences(results, noises)),
        "\n".join(_table(lines)),
        "\n".join(f"- {_escaped(said)}" for said in (*LEGEND, *CAVEATS, *notes)),
        "![tables](analysis.png)",
        *(["![planes by UMAP](umap.png)"] if has_umap else []),
        *attention,
    ]
    return "\n\n".join(parts) + "\n"


def _table(lines: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table with aligned columns: models, noise of each size, the paper."""
    cells = [["Model", *(heading for heading, _ in COLUMNS.values())]]
    cells += [_cells(_escaped(line["label"]), line) for line in lines if line["kind"] == "model"]
    drawn = [line for line in lines if line["kind"] == NOISE]
    for size in dict.fromkeys((line["grid"], line["width"]) for line in drawn):
        cells.append(_noise_cells([x for x in drawn if (x["grid"], x["width"]) == size]))
    paper = [line for line in lines if line["kind"] == PAPER]
    cells += [_cells(f"paper: {line['label']}", line) for line in paper]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in cells
    ]
    return [aligned[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *aligned[1:]]


def _cells(name: str, line: Row) -> list[str]:
    cells = [name]
    for column, (_, decimals) in COLUMNS.items():
        cell, around = _number(line.get(column), decimals), line.get(f"{column}_std")
        cells.append(cell if around is None else f"{cell}±{_number(around, decimals)}")
    return cells


def _noise_cells(lines: Sequence[Row]) -> list[str]:
    first = lines[0]
    cells = [f"noise {first['grid']}×{first['grid']}×{first['width']}, {len(lines)} seeds"]
    for column, (_, decimals) in COLUMNS.items():
        values = [float(line[column] or 0) for line in lines if column in line]
        mean = _number(sum(values) / len(values), decimals) if values else DASH
        ends = (
            f"[{_number(min(values), decimals)}, {_number(max(values), decimals)}]"
            if values
            else ""
        )
        cells.append(f"{mean} {ends}" if column in RANGED else mean)
    return cells


def _number(value: object, decimals: int) -> str:
    if not isinstance(value, int | float) or math.isnan(value):
        return DASH
    return f"{value:.{decimals}f}"


def _escaped(text: object) -> str:
    """A stranger's word in Markdown: it is no element, no link and no column."""
    word = html.escape(str(text), quote=False)
    return re.sub(r"([|`\[\]])", r"\\\1", word)


def _csv(lines: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for line in lines for column in line))
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({n: formula_free(v) if isinstance(v, str) else v for n, v in line.items()})
    return stream.getvalue()


def _json(results: Sequence[Analysed], lines: Sequence[Row]) -> dict[str, object]:
    """The rows, and whole curves by model."""
    curves = {
        result.label: {
            "variance": result.figures.variance.tolist(),
            "energy": result.figures.energy.tolist(),
        }
        for result in results
        if result.figures is not None
    }
    plain = [{name: _finite(value) for name, value in line.items()} for line in lines]
    return {"rows": plain, "curves": curves, "caveats": list(CAVEATS)}


def _finite(value: object) -> object:
    """JSON has no NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value
