"""Tables of README.md and results/, rendered from published rows between two markers.

    <!-- table: NAME begin -->
    | Client | Attack | ...
    <!-- table: NAME end -->

A table of claims.yaml is one of these kinds:

    lines: [[plain_april, "plain, (a)", april], ...]   chosen lines with the words before them
    every: {rows: ladder/rows.parquet, setting: c}     all lines that fit, told apart by `facts`;
           `against: april` sets a paired difference beside each (`differences.py`)
    grid:  {rows: ..., down: gamma, across: uploads}   one figure of each line, in two directions
    files: [ladder/rows.parquet, ...]                  the runs behind rows: config, commit, date
    card:  ladder/rows.parquet                         the privacy card; notes: true adds its text
    trained: {paper: 4, evaluation: ..., rows: ...}    the paper's Table 3 or 4 as trained here
    spread: {csv: ..., paper: 4, against: A}           its rows minus one of them, by training seed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import short_commits
from mjp_privacy.report.answer import build_card
from mjp_privacy.report.card import card_notes, card_table
from mjp_privacy.report.export import markdown_table, markdown_text
from mjp_privacy.report.results.differences import difference_from, difference_title
from mjp_privacy.report.results.figures import CsvFigures, Figures, LineFigures, text_of
from mjp_privacy.report.results.lines import published_at, select_all
from mjp_privacy.report.results.spread_table import spread_table
from mjp_privacy.report.results.trained_rows import trained_table
from mjp_privacy.report.worst_case import reduced_groups

TITLES = {
    "share_exact": "exact in 8 bits",
    "quartiles": "25–75 %",
    "share20": "≥ 20 dB",
    "share30": "≥ 30 dB",
    "share100": "≥ 100 dB",
    "mean": "mean [95 %]",
    "median": "median",
    "setting": "Set.",
    "gamma": "γ",
    "paper_mse": "MSE ↑",
    "paper_fft2d": "FFT2D ↑",
    "paper_psnr": "PSNR ↓",
    "paper_ssim": "SSIM ↓",
    "paper_lpips": "LPIPS ↑",
    "always_masked": "patches masked every time",
    "top1_interval": "top-1 [95 %]",
    "label": "client",
}
FIGURES = ("share_exact", "median", "quartiles", "share20", "share30", "mean")
FACTS = ("model", "setting", "gamma", "client", "attack", "uploads")


def render(table: Mapping[str, Any], named: Mapping[str, Figures], folder: Path) -> str:
    """The Markdown of one table of claims.yaml."""
    if "lines" in table:
        return _lines(table, named)
    if "files" in table:
        return _files(table, folder)
    if "card" in table:
        return _card(table, folder)
    if "trained" in table:
        heads, *rows = trained_table(table["trained"], folder)
        return _markdown(heads, rows, 2)
    if "spread" in table:
        heads, *rows = spread_table(table["spread"], folder)
        return _markdown(heads, rows, 1)
    return _every(table, folder) if "every" in table else _grid(table, folder)


def block_of(text: str, name: str) -> str | None:
    """What stands between the markers of a table; None without them."""
    begin, end = markers(name)
    if begin not in text or end not in text:
        return None
    return text.split(begin, 1)[1].split(end, 1)[0].strip("\n")


def with_block(text: str, name: str, block: str) -> str:
    """The text with another table between the markers."""
    begin, end = markers(name)
    if block_of(text, name) is None:
        raise UserError(f"Expected the markers {begin} and {end} in the file; put them there once.")
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end, 1)[1]}"


def markers(name: str) -> tuple[str, str]:
    """The comments between which a table stands."""
    return f"<!-- table: {name} begin -->", f"<!-- table: {name} end -->"


def _lines(table: Mapping[str, Any], named: Mapping[str, Figures]) -> str:
    figures = table.get("figures", FIGURES)
    heads = [*table["titles"], *(TITLES.get(figure, figure) for figure in figures)]
    rows = []
    for name, *words in table["lines"]:
        cells = [text_of(named[name].figure(figure)) for figure in figures]
        rows.append([*words, *cells])
    return _markdown(heads, rows, len(table["titles"]))


def _every(table: Mapping[str, Any], folder: Path) -> str:
    facts, figures = table.get("facts", FACTS), table.get("figures", FIGURES)
    selected = select_all(table["every"], folder)
    lines = [line for line in selected if isinstance(line, CsvFigures) or line.of]
    rows = [
        [*(_fact(line, key) for key in facts), *(text_of(line.figure(f)) for f in figures)]
        for line in lines
    ]
    heads = [TITLES.get(key, key) for key in (*facts, *figures)]
    if (attack := table.get("against")) is not None:
        heads.append(difference_title(attack))
        for row, line in zip(rows, lines, strict=True):
            row.append(difference_from(line, attack, lines))
    return _markdown(heads, rows, len(facts))


def _grid(table: Mapping[str, Any], folder: Path) -> str:
    grid = dict(table["grid"])
    down, across = str(grid.pop("down")), str(grid.pop("across"))
    figure, best = str(grid.pop("figure", "mean")), grid.pop("best", None)
    cells: dict[str, dict[str, Figures]] = {}
    columns: dict[str, None] = {}
    for line in select_all(grid, folder):
        row, column = _fact(line, down), _fact(line, across)
        of_row = cells.setdefault(row, {})
        if column in of_row and best is None:
            raise UserError(f"Two lines of table {table['name']} fall on {row}, {column}.")
        of_row[column] = _better(of_row.get(column), line, best)
        columns[column] = None
    if best is not None:
        _carry_on(cells, columns, best)
    texts = {
        row: {column: text_of(line.figure(figure)) for column, line in of_row.items()}
        for row, of_row in cells.items()
    }
    heads = [TITLES.get(down, down), *(f"{table.get('head', '')}{column}" for column in columns)]
    rows = [[row, *(of_row.get(c, "–") for c in columns)] for row, of_row in texts.items()]
    return _markdown(heads, rows, 1)


def _better(one: Figures | None, other: Figures, figure: str | None) -> Figures:
    """Of two lines that with more of a figure; the second where they are equal or stands alone."""
    if one is None or figure is None:
        return other
    return max(other, one, key=lambda line: float(line.figure(figure)))


def _carry_on(cells: Mapping[str, dict[str, Figures]], columns: Iterable[str], figure: str) -> None:
    """Where a column has less of a figure than one before it, put the line of the one before: who
    keeps two uploads can attack one."""
    for of_row in cells.values():
        best: Figures | None = None
        for column in columns:
            if column in of_row:
                best = of_row[column] = _better(best, of_row[column], figure)


def _files(table: Mapping[str, Any], folder: Path) -> str:
    heads = (
        "rows",
        "config",
        "images",
        "commit",
        "torch",
        "threads",
        "date",
        "sha256 of the config",
    )
    rows = []
    for name in table["files"]:
        published = published_at(folder / name)
        for run in published.runs:
            images = published.rows.loc[published.rows["run"] == run.name, "image_id"].nunique()
            commits = run.commits or published.commit
            facts = (images, short_commits(commits), run.torch, run.threads, run.date)
            link = f"[{name}]({name})"
            rows.append([link, run.config, *map(str, facts), run.config_sha256[:12]])
    return _markdown(heads, rows, 2)


def _card(table: Mapping[str, Any], folder: Path) -> str:
    card = build_card(reduced_groups(published_at(folder / table["card"]).lines))
    answer = " ".join(filter(None, (card.verdict, card.assumptions, card.beside)))
    shown = card_table(card)
    parts = [markdown_text(answer), markdown_table(shown)]
    if table.get("notes"):
        items = card_notes(card)
        parts += [markdown_text(shown.caption), "\n".join(f"- {markdown_text(i)}" for i in items)]
    else:
        legend = "; ".join(f"{place} {flag.name}" for place, flag in enumerate(card.flags, 1))
        parts.append(markdown_text(f"{shown.caption} Footnotes: {legend}."))
    return "\n\n".join(parts)


def _fact(figures: LineFigures | CsvFigures, key: str) -> str:
    value = figures.fact(key)
    return f"{value:g}" if isinstance(value, float) else markdown_text(str(value))


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    rule = ["---" if place < left else "---:" for place in range(len(heads))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rule, *rows])
