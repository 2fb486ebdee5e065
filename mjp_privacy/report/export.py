"""The report as files for other programs: Markdown, CSV and LaTeX."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import pandas as pd

from mjp_privacy.report.data_files import csv_text
from mjp_privacy.report.notes import Section
from mjp_privacy.report.tables.figures import Table
from mjp_privacy.report.tables.text import TextTable, one_line

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


# Markdown -----------------------------------------------------------------------------------------


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


def latex(tables: Sequence[TextTable], notes: Sequence[Section]) -> str:
    """The report as LaTeX, to be included in a document; its first line names the packages.

    Every table is scaled to the width of the text.
    """
    parts = [r"% \usepackage{booktabs,graphicx,textcomp,xcolor}  \usepackage[T1]{fontenc}"]
    parts += [latex_table(table) for table in tables]
    for section in notes:
        items = "\n".join(rf"  \item {latex_text(item)}" for item in section.items)
        title = latex_text(section.title)
        parts.append(f"\\paragraph{{{title}}}\n\\begin{{itemize}}\n{items}\n\\end{{itemize}}")
    return "\n\n".join(parts) + "\n"


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
