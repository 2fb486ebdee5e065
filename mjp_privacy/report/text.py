"""Tables as text, shared by Markdown, LaTeX and HTML and not yet escaped for any of them."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from mjp_privacy.core.text import formula_free
from mjp_privacy.metrics.statistics import DASH, PSNR_CAP, decimals_apart
from mjp_privacy.report.figures import ARROWS, METRICS, RULES, TITLES, Table
from mjp_privacy.report.lines import (
    CLIENT_FACTS,
    MARKS,
    Line,
    options_text,
    scalar_text,
    scores_of,
)
from mjp_privacy.report.notes import Section

DECIMALS = {"acc": 1, "acc_altered": 1, "mse": 4, "fft2d": 4, "psnr": 2, "ssim": 4, "lpips": 4}

FULL = 100
"""Images from which a percentage has a decimal."""

COLUMN_TITLES = {
    "position_embedding": "PE",
    "label_source": "labels",
    "attack_options": "options",
    "attack_name": "attack's name",
}

Record = Mapping[str, Any]


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text; `align` has one letter for each column: l or r."""

    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    muted: frozenset[int] = frozenset()  # places of rows that are shown in grey


class Column(NamedTuple):
    """A column of a table: its title, what stands in it for a row, and its side."""

    title: str
    cell: Callable[[Any], object]
    align: str = "r"


def table_of(
    title: str, caption: str, columns: Sequence[Column | None], rows: Iterable[Any]
) -> TextTable:
    """The table of these columns, without those that are None."""
    shown = [column for column in columns if column]
    return TextTable(
        title,
        caption,
        tuple(column.title for column in shown),
        tuple(tuple(str(column.cell(row)) for column in shown) for row in rows),
        "".join(column.align for column in shown),
    )


def number(value: float | None, decimals: int, *, sign: bool = False) -> str:
    """A number as text: `number(1.234, 2)` is `1.23`, and NaN is a dash.

    Small numbers that these decimals would show as zero are written as in `1.0e-05`.
    """
    if value is None or math.isnan(value):
        return DASH
    plus = "+" if sign else ""
    if math.isinf(value):
        return f"{value:{plus}}"
    if value != 0 and abs(value) < 0.5 * 10**-decimals:
        return f"{value:{plus}.1e}"
    return f"{value:{plus}.{decimals}f}"


def percent(value: float | None, n: int) -> str:
    """A share of n images in percent: `62.9`, without the decimal that fewer than 100 cannot
    have."""
    return number(value, DECIMALS["acc"] if n >= FULL else 0)


def capped(value: float | None, decimals: int) -> str:
    """A PSNR as tables show it: `≥ 100` from the cap on, above which nothing is told apart; below
    it with as many decimals as keep it there: `99.98`, not `100.0`."""
    if value is not None and value >= PSNR_CAP:
        return f"≥ {PSNR_CAP:.0f}"
    return DASH if value is None else number(value, decimals_apart(value, decimals, PSNR_CAP))


def score(record: Record, name: str) -> str:
    """`71.74 [66.91, 76.26]`, with its n where that differs from the line's; `≥ 100` from PSNR's
    cap on, and a dash for what is not known."""
    decimals, n = DECIMALS[name], record[f"{name}_n"]
    if name.startswith("acc") and n < FULL:
        decimals = 0
    mean, low, high = (record[f"{name}_{part}"] for part in ("mean", "lo", "hi"))
    if math.isnan(mean) or (name == "psnr" and mean >= PSNR_CAP):
        return capped(mean, decimals)
    shown = capped if name == "psnr" else number
    interval = DASH if math.isnan(low) else f"{shown(low, decimals)}, {shown(high, decimals)}"
    of = "" if n == record["n"] else f" (n={n})"
    return f"{shown(mean, decimals)} [{interval}]{of}"


def _varying_cell(key: str, record: Record) -> str:
    if key == "attack_options":
        return options_text(record[key])
    most = "≤ " if key == "uploads" and record["role"] in RULES and record[key] > 1 else ""
    return most + scalar_text(record[key])


def unscored(record: Record) -> str:
    """How many images have no score, by kind: `2 failed, 1 not run`, or `0`."""
    kinds = ("failed", "unsupported", "unscored", "not_run")
    names = [(kind, kind.replace("_", " ")) for kind in kinds]
    counts = [f"{record[f'n_{kind}']} {name}" for kind, name in names if record[f"n_{kind}"]]
    return ", ".join(counts) or "0"


def remark(record: Record) -> str:
    """Why a line has no figures, or not all of them."""
    if record["status"] != "ok":
        return f"{record['status']}: {record['reason'] or 'no reason given'}"
    return str(record["reason"]) if not record["n"] else ""


def main_table(
    table: Table, caption: str, beware: Mapping[int, str], *, many_runs: bool
) -> TextTable:
    """Every line of `table` with its counts, its scores, what bounds them and warnings by line."""
    rows = [{str(k): v for k, v in row.items()} for row in table.frame.to_dict("records")]
    several_dtypes = len({row["dtype"] for row in rows}) > 1
    scores = [metric for metric in METRICS if metric != "psnr"]

    def tried(row: Record) -> int:
        return int(row["n"] + row["n_failed"] + row["n_unsupported"])

    columns = [
        Column("#", lambda r: r["line"]),
        Column("Run", lambda r: r["run"], "l") if many_runs else None,
        Column("Model", lambda r: r["model"], "l"),
        Column("Set.", lambda r: r["setting"], "l"),
        Column("γ", lambda r: scalar_text(r["gamma"]), "l"),
        Column("Attack", lambda r: r["attack"] + MARKS.get(r["role"], ""), "l"),
        Column("dtype", lambda r: r["dtype"], "l") if several_dtypes else None,
        *(
            Column(COLUMN_TITLES.get(key, key.replace("_", " ")), partial(_varying_cell, key), "l")
            for key in table.varying
        ),
        Column("n", lambda r: r["n"]),
        Column("not scored", unscored),
        Column(f"PSNR {ARROWS['psnr']}", partial(score, name="psnr")),
        Column("median", lambda r: capped(r["psnr_median"], 2)),
        Column("exact", lambda r: r["psnr_exact"] if r["n"] else DASH),
        Column("≥ 20 dB", lambda r: f"{r['psnr_at_20']} of {tried(r)}" if r["n"] else DASH),
        *(Column(f"{TITLES[name]} {ARROWS[name]}", partial(score, name=name)) for name in scores),
        Column(f"Acc. {ARROWS['acc']}", partial(score, name="acc")),
        Column("Acc. altered", partial(score, name="acc_altered")),
        Column("grey", lambda r: number(r["grey_mean"], 2)),
        Column("rank ceiling", lambda r: number(r["ceiling_mean"], 2)),
        Column("cond(A)", lambda r: f"{r['cond_a_median']:.1e}".replace("nan", DASH)),
        Column("beware", lambda r: remark(r) or beware.get(r["line"], ""), "l"),
    ]
    return table_of("Every line", caption, columns, rows)


def one_line(text: str) -> str:
    """The text on one line, without characters that steer a terminal: those become spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def correlation(value: float) -> str:
    """A number in [-1, 1] with two decimals, or as many as keep it apart from 1 and −1."""
    if math.isnan(value) or abs(value) > 1 - 1e-12:
        return DASH if math.isnan(value) else f"{round(value):d}"
    return f"{value:.{decimals_apart(value, 2, -1.0, 1.0)}f}"


# Markdown -----------------------------------------------------------------------------------------

HEADING = "What a Vision Transformer client leaks through its gradients"

_MARKDOWN = str.maketrans(
    {"\\": r"\\", "|": r"\|", "`": r"\`", "*": r"\*", "<": "&lt;", ">": "&gt;", "&": "&amp;"}
    | {"$": r"\$", "~": r"\~"}
)

_STEERING = (
    (re.compile(r"\]([(\[:])"), r"]\\\1"),  # links, and what defines them
    (re.compile(r"\[\^"), r"\\[^"),  # footnotes
    (re.compile(r"(?<![^\W_])_|_(?![^\W_])"), r"\\_"),  # not within a word, where it is a letter
    (re.compile(r":(?=//)"), r"\\:"),  # addresses that become links by themselves
    (re.compile(r"(?i)\b(www)\."), r"\1\\."),
    (re.compile(r"(?<=[\w.+-])@(?=[\w-]+\.\w)"), "@<!-- -->"),
)
"""What else means something in Markdown, or in GitHub's, and how it is written as a text."""

_BEGINNING = re.compile(r"^(\d{1,9}(?=[.)]\s)|(?=[-+](?:\s|$)|--|==|#|\[[ xX]\]\s))")
"""What makes a paragraph a list, a heading, a rule or a box to tick: a `\\` goes behind it."""


def markdown(answer: str, tables: Sequence[TextTable], notes: Sequence[Section]) -> str:
    """The whole report as Markdown; `answer` is the sentence that stands above all."""
    parts = [f"# {markdown_text(HEADING)}", f"**{markdown_text(answer)}**"]
    for table in tables:
        parts += [f"## {markdown_text(table.title)}", markdown_table(table)]
        parts += [_paragraph(table.caption)] if table.caption else []
    for section in notes:
        items = "\n".join(f"- {_paragraph(item)}" for item in section.items)
        parts += [f"## {markdown_text(section.title)}", items]
    return "\n\n".join(parts) + "\n"


def markdown_text(text: str) -> str:
    """The text with Markdown's special characters escaped: `a|b` becomes `a\\|b`.

    Links and pictures cannot be made by it, and characters that turn or hide text are dropped.
    """
    escaped = one_line(text).strip().translate(_MARKDOWN)
    for pattern, written in _STEERING:
        escaped = pattern.sub(written, escaped)
    return escaped


def _paragraph(text: str) -> str:
    """The same for a text that stands by itself, where its beginning could mean something too."""
    return _BEGINNING.sub(r"\1\\", markdown_text(text))


def markdown_table(table: TextTable) -> str:
    """One table in Markdown, without its title and caption."""
    rule = ["---:" if side == "r" else "---" for side in table.align]
    header, *rows = ([markdown_text(cell) for cell in row] for row in (table.header, *table.rows))
    for place in table.muted:
        rows[place] = [cell and f"*{cell}*" for cell in rows[place]]
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# LaTeX --------------------------------------------------------------------------------------------

_LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"}
    | {"γ": r"$\gamma$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "×": r"$\times$"}
    | {"−": "$-$", "–": "--", "†": r"\textdagger{}", "σ": r"$\sigma$", "“": "``", "”": "''"}
    | {"ρ": r"$\rho$", "τ": r"$\tau$", "Σ": r"$\Sigma$", "°": r"\textdegree{}"}
    | {"≥": r"$\geq$", "≤": r"$\leq$", "·": r"\textperiodcentered{}", "…": r"\dots{}"}
    | {"±": r"$\pm$", "∂": r"$\partial$", "‖": r"$\|$", "ε": r"$\varepsilon$", "δ": r"$\delta$"}
    | {"Δ": r"$\Delta$", "ᵀ": r"$^T$", "∞": r"$\infty$", "’": "'", "‘": "`", "√": r"$\surd$"}
    | {"\n": " ", "\r": " "}
    | {letter: f"$^{number}$" for number, letter in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
)


def latex(tables: Sequence[TextTable]) -> str:
    """The tables as LaTeX, to be included in a document, each scaled to the width of the text; the
    first line names the packages."""
    packages = r"% \usepackage{booktabs,graphicx,textcomp,xcolor}  \usepackage[T1]{fontenc}"
    return "\n\n".join([packages, *map(latex_table, tables)]) + "\n"


def latex_text(text: str) -> str:
    """The text with LaTeX's special characters escaped: `50 %` becomes `50 \\%`.

    The result is ASCII: other letters lose their accents, what has no counterpart becomes `?`.
    """
    known = "".join(map(_latex_letter, one_line(text)))
    # a command before it, such as the end of a row, would take these for its options
    return f"{{}}{known}" if known.lstrip().startswith(("[", "*")) else known


def _latex_letter(letter: str) -> str:
    """One letter, first brought to ASCII, then escaped: a wide `＼` is a backslash in disguise."""
    if ord(letter) in _LATEX:
        return str(_LATEX[ord(letter)])
    if letter.isascii():
        return letter
    plain = unicodedata.normalize("NFKD", letter)
    kept = "".join(part for part in plain if not unicodedata.combining(part))
    return kept.translate(_LATEX).encode("ascii", "replace").decode("ascii")


def latex_table(table: TextTable) -> str:
    """One table as a LaTeX float with its title and caption."""
    header, *cells = ([*map(latex_text, row)] for row in (table.header, *table.rows))
    for place in table.muted:
        cells[place] = [rf"\textcolor{{gray}}{{{cell}}}" for cell in cells[place]]
    rows = [" & ".join(row) + r" \\" for row in cells]
    caption = latex_text(f"{table.title}. {table.caption}".strip())
    return "\n".join(
        [
            *(r"\begin{table*}", r"  \centering", rf"  \caption{{{caption}}}"),
            r"  \resizebox{\textwidth}{!}{%",
            *(rf"  \begin{{tabular}}{{{table.align}}}", r"  \toprule"),
            *(f"  {' & '.join(header)}" + r" \\", r"  \midrule"),
            *(f"  {row}" for row in rows),
            *(r"  \bottomrule", r"  \end{tabular}}", r"\end{table*}"),
        ]
    )


# CSV ----------------------------------------------------------------------------------------------


def table_csv(tables: Sequence[Table], *, many_runs: bool) -> str:
    """All tables below one another at full precision; a missing value is an empty cell."""
    frames = [table.frame.assign(variant=table.variant) for table in tables]
    # through records: pd.concat would let an empty column change the type of the other table's
    merged = pd.DataFrame([row for frame in frames for row in frame.to_dict("records")])
    first = ["variant", "line", "run"] if many_runs else ["variant", "line"]
    merged = merged if many_runs else merged.drop(columns="run")  # names of folders are no results
    return csv_text(merged[[*first, *(name for name in merged if name not in first)]])


def csv_text(table: pd.DataFrame, *, header: bool = True) -> str:
    """A table as CSV for spreadsheets: no text in it begins like a formula."""
    texts = [name for name in table if any(isinstance(x, str) for x in table[name].unique())]
    changed = {str(name): table[name].astype(object).map(formula_free) for name in texts}
    return str(table.assign(**changed).to_csv(index=False, header=header, lineterminator="\n"))


SAMPLE_COLUMNS = (
    *("run_id", "model", "setting", "gamma", "attack", "dtype", "seed"),
    *("image_id", "status", "reason", "checkpoint_sha", "architecture", "trained_gamma"),
    *("position_embedding", "victim", "engine", "attack_name", "role", "uploads", *CLIENT_FACTS),
    *("round", "label_source", "code", "group"),
)
"""The columns of samples.csv before its scores: of the cell, and what is known of the image."""


def samples_csv(lines: Sequence[Line], *, many_runs: bool) -> str:
    """A row for each image of each line, as it is stored, with a column for each metric and
    variant; a line without rows has its status and reason."""
    parts, known = [], {*SAMPLE_COLUMNS, "run"}
    for line in lines:
        rows = line.stored.reset_index()
        if rows.empty:
            rows = pd.DataFrame([{"status": line.status, "reason": line.reason}])
        every = {**line.cell.columns, "run": line.run}
        parts.append(rows.assign(**{n: every[n] for n in every if n not in rows and n in known}))
    scores = sorted({name for part in parts for name in scores_of(part)})
    columns = [*SAMPLE_COLUMNS, *(["run"] if many_runs else []), *scores]
    whole = (part.reindex(columns=columns) for part in parts)
    return "".join(csv_text(part, header=not place) for place, part in enumerate(whole))
