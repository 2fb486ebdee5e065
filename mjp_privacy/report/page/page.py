"""index.html: one file with everything inside; it opens offline and asks no server for anything.

The templates ask the report's `Contents` themselves; here is what they ask it with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.clients import images_of
from mjp_privacy.report.contents import Contents
from mjp_privacy.report.figures import TITLES
from mjp_privacy.report.flags import figure_flags
from mjp_privacy.report.pictures import OF_LINES, picture_score
from mjp_privacy.report.runs import commands, provenance
from mjp_privacy.report.tables.text import (
    DASH,
    DECIMALS,
    HEADING,
    TextTable,
    capped,
    number,
    percent,
)

if TYPE_CHECKING:
    from jinja2 import Environment

CITATION = (
    "Bin Ren, Yahui Liu, Yue Song, Wei Bi, Rita Cucchiara, Nicu Sebe and Wei Wang. Masked Jigsaw "
    "Puzzle: A Versatile Position Embedding for Vision Transformers. CVPR 2023. Table 5."
)

COUNTED = frozenset(("#", "n", "not scored", "pictures"))
"""Columns of numbers that are no scores."""

SECTIONS = {
    **{"table5": "Table 5", "clients": "Clients", "ladder": "Every line"},
    **{"distributions": "Distributions", "uploads": "Uploads", "batches": "Batches"},
    **{"tradeoff": "Accuracy", "tables": "Tests", "pictures": "Pictures", "details": "Notes"},
    **{"glossary": "Glossary", "downloads": "Downloads", "provenance": "Provenance"},
}
"""What the page's head links to: names of sections and their labels."""


POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'sha256-{}'; base-uri 'none'; form-action 'none'"
)
"""No request may leave the page, and no script runs but the one that is its own, by its digest."""

_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that turn what follows: "a\\u202egpj.png" would be read as agnp.jpg."""


def render_page(contents: Contents, downloads: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page as text, with everything that came from a run escaped.

    downloads   the files beside the page, and what they hold
    """
    script = _asset("page.js")
    charts = ("distributions", "uploads", "batches", "tradeoff")
    held: dict[str, object] = {name: name in contents.charts for name in charts}
    held |= {"table5": contents.table5, "clients": contents.comparisons, "tables": contents.tests}
    held |= {"pictures": contents.gallery.shown}
    template = _environment().get_template("page.html.j2")
    text = template.render(
        title=HEADING,
        contents=contents,
        card=contents.card,
        gallery=contents.gallery,
        lines=lines_table(contents),
        folded={str(number) for number in folded_lines(contents)},
        images=images_of(contents.lines),
        sections=[pair for pair in SECTIONS.items() if held.get(pair[0], True)],
        downloads=downloads,
        citation=CITATION,
        provenance=provenance(contents.configs, contents.lines),
        commands=commands(contents.configs, contents.lines),
        style=_asset("page.css"),
        script=script,
        policy=POLICY.format(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        data=page_data(contents),
    )
    text = _DIRECTIONS.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", text)
    return text.encode("utf-8", "replace").decode("utf-8")  # a file name may be no Unicode


def _asset(name: str) -> str:
    return (files("mjp_privacy.report.page") / "assets" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    """The templates, with what they write texts and numbers by."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("mjp_privacy.report.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"number": number, "link": link, "figure": figure, "anchor": anchor}
    found.filters |= {"without_score": without_score, "percent": percent}
    found.globals |= {"DASH": DASH, "CAP": PSNR_CAP, "share": share}
    found.globals["picture_score"] = picture_score
    glossary = found.get_template("glossary.html.j2").module.GLOSSARY  # type: ignore[attr-defined]
    terms = {name.casefold(): " ".join(text.split()) for name, text in glossary}
    found.filters["linked"] = lambda text: linked(text, terms)
    return found


# what templates write by --------------------------------------------------------------------------


def anchor(term: str) -> str:
    """Where the glossary explains a term: `term-setting-c`."""
    return "term-" + re.sub(r"[^\w]+", "-", term.casefold()).strip("-")


def linked(text: str, terms: Mapping[str, str]) -> Markup:
    """A text, escaped, with each term of the glossary linked where it is said first."""
    longest_first = "|".join(re.escape(name) for name in sorted(terms, key=len, reverse=True))
    parts, end, seen = [], 0, set()
    for match in re.finditer(rf"(?<![\w-])(?:{longest_first})(?![\w-])", text, re.I):
        name = match[0].casefold()
        if name not in seen:
            seen.add(name)
            link = Markup('<a class="term" href="#{}" title="{}">{}</a>')
            parts += [Markup.escape(text[end : match.start()])]
            parts += [link.format(anchor(name), terms[name], match[0])]
            end = match.end()
    return Markup("").join([*parts, Markup.escape(text[end:])])


def figure(cell: str) -> Markup:
    """A cell of a table, what stands in brackets beneath its figure: `71.7 [66.9, 76.3]`."""
    mean, bracket, interval = cell.partition(" [" if " [" in cell else " (")
    if not (bracket and mean[:1].isdigit()):
        return Markup.escape(cell)
    return Markup("{}<small>{}{}</small>").format(mean, bracket.strip(), interval)


def without_score(table: TextTable) -> list[int]:
    """The rows whose scores are all missing, where others have some."""
    columns = zip(table.header, table.align, strict=True)
    scores = [
        at for at, (title, align) in enumerate(columns) if align == "r" and title not in COUNTED
    ]
    empty = [
        place for place, row in enumerate(table.rows) if all(row[at] in (DASH, "") for at in scores)
    ]
    return empty if len(empty) < len(table.rows) else []


def share(count: int, of: int) -> str:
    """The length of a bar: `58.00%` for 116 of 200."""
    return f"{100 * count / of:.2f}%" if of else "0%"


def link(text: str, safe: str = "/") -> str:
    """A name as part of an address; it cannot name another protocol, as `:` is escaped."""
    return quote(text, safe=safe, errors="replace")


# what the page's script reads ---------------------------------------------------------------------

SCORES = {
    **dict.fromkeys(("psnr", "ssim", "lpips", "mse", "fft2d"), "standard"),
    "gradient_residual": "diagnostic",
}
"""The scores that pictures have, in the page's order, and the variant of each."""

DIGITS = 6  # significant ones of a per-image score


def folded_lines(contents: Contents) -> set[int]:
    """The lines that the page shows on demand: controls, and float64 beside other precisions."""
    lines = contents.every_line
    single = any(line.cell.dtype != "float64" for line in contents.lines)
    double = {line.number for line in lines if line.cell.dtype == "float64"} if single else set()
    return double | {line.number for line in lines if line.cell.role in ("floor", "ceiling")}


def lines_table(contents: Contents) -> TextTable:
    """Every line, with what must not be taken at face value in words."""
    table, flags = contents.main(folded=True), dict[str, str]()
    for client in contents.clients:
        for line in (*client.attacks, *client.derived):  # controls have none
            words = (flag.words for flag in figure_flags(client, line))
            flags[str(line.number)] = "; ".join(words)
    rows = [(*row, flags.get(row[0], "")) for row in table.rows]
    header = (*table.header, "beware")
    return TextTable(table.title, table.caption, header, tuple(rows), table.align + "l")


def page_data(contents: Contents) -> str:
    """The text of `<script type="application/json">`: the scores of the pictures that the page
    holds; pictures of the strip stand in the page."""
    gallery, folded = contents.gallery, folded_lines(contents)
    images = sorted(shown.image_id for shown in gallery.shown)
    lines: list[dict[str, Any]] = []
    for line in contents.every_line:
        client, exact = contents.client_names[line.number], line.exact_images
        scores = {
            metric: list(map(_plain, line.scored(metric, variant).reindex(images)))
            for metric, variant in SCORES.items()
            if line.count(metric, variant)
        }
        of_line: dict[str, Any] = {"number": line.number, "attack": line.title, "client": client}
        run = [line.run] if contents.loaded.many_runs else []
        of_line |= {"name": " · ".join([f"{line.number}", *run, client, line.title])}
        of_line |= {"setting": line.cell.setting, "folded": line.number in folded}
        of_line |= {"scores": scores, "exact": [int(image in exact) for image in images]}
        lines.append(of_line)
    strip = set[str | None]()
    for shown in gallery.shown:
        if shown.strip and contents.strip is not None:
            made = (shown.lines.get(line.number) for _, line in contents.strip)
            strip |= {shown.original(contents.chooser), shown.as_fed(contents.chooser), *made}
    shown_as = [
        {"image_id": shown.image_id}
        | {kind: list(getattr(shown, kind).items()) for kind in OF_LINES}  # lines are no JSON keys
        for shown in gallery.shown
    ]
    return script_json(
        {
            **{"cap": PSNR_CAP, "at_cap": capped(PSNR_CAP, 1)},
            "metrics": [
                {"name": name, "title": TITLES.get(name, name.replace("_", " "))}
                | {"decimals": DECIMALS.get(name, 4)}
                for name in SCORES
                if any(name in line["scores"] for line in lines)
            ],
            **{"lines": lines, "image_ids": images},
            "shown": shown_as,
            "pictures": [item for item in gallery.pictures.items() if item[0] not in strip],
        }
    )


def _plain(value: float) -> float | str | None:
    """JSON knows neither NaN nor infinity."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"  # as JavaScript reads it
    return float(f"{value:.{DIGITS}g}")


def script_json(data: Any) -> str:
    """JSON that may stand inside a script element: it holds no `<`, `>`, `&` and only ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
