"""index.html: one file with everything inside; it opens offline and asks no server for anything.

The templates ask the report's `Contents` themselves; here is what they ask it with.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING
from urllib.parse import quote

from markupsafe import Markup

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.contents import Contents
from mjp_privacy.report.export import HEADING
from mjp_privacy.report.page.data import folded_lines, lines_table, page_data, page_images
from mjp_privacy.report.page.reproduce import commands, provenance
from mjp_privacy.report.pictures.strip import picture_score
from mjp_privacy.report.published import CITATION
from mjp_privacy.report.tables.text import DASH, TextTable, number, percent

if TYPE_CHECKING:
    from jinja2 import Environment

COUNTED = frozenset(("#", "n", "not scored", "pictures"))
"""Columns of numbers that are no scores."""


def render_page(contents: Contents, downloads: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page as text, with everything that came from a run escaped.

    downloads   the files beside the page, and what they hold
    """
    script, images = _asset("page.js"), page_images(contents)
    text = (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=HEADING,
            contents=contents,
            card=contents.card,
            gallery=contents.gallery,
            lines=lines_table(contents),
            folded={str(number) for number in folded_lines(contents)},
            images=contents.image_ids,
            image_ids=images,
            sections=_sections(contents),
            downloads=downloads,
            citation=CITATION,
            provenance=provenance(contents.runs, contents.lines),
            commands=commands(contents.runs, contents.lines),
            style=_asset("page.css"),
            script=script,
            policy=_policy(script),
            data=page_data(contents, images),
        )
    )
    text = undirected(text)  # names of images may turn the words behind them
    return text.encode("utf-8", "replace").decode("utf-8")  # a file name may be no Unicode


def _sections(contents: Contents) -> tuple[tuple[str, str, bool], ...]:
    """What the page's head links to: name, label, and whether the page has it."""
    return (
        ("table5", "Table 5", contents.table5 is not None),
        ("clients", "Clients", bool(contents.comparisons)),
        ("ladder", "Every line", True),
        ("distributions", "Distributions", "distributions" in contents.charts),
        ("uploads", "Uploads", "uploads" in contents.charts),
        ("tradeoff", "Accuracy", "tradeoff" in contents.charts),
        ("tables", "Tables", bool(contents.evidence)),
        ("pictures", "Pictures", bool(contents.gallery.shown)),
        ("details", "Notes", True),
        ("glossary", "Glossary", True),
        ("downloads", "Downloads", True),
        ("provenance", "Provenance", True),
    )


def _asset(name: str) -> str:
    return (files("mjp_privacy.report.page") / "assets" / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """No request may leave the page, and no script runs but the one that is its own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


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
    beneath = Markup("{}<small>{}{}</small>").format(mean, bracket.strip(), interval)
    return beneath if bracket and mean[:1].isdigit() else Markup.escape(cell)


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


def undirected(text: str) -> str:
    """The text with characters that turn the direction of what follows written out, for pages:
    "a\\u202egpj.png", which would be read as agnp.jpg, becomes "a⟨U+202E⟩gpj.png"."""
    return text.translate(_DIRECTIONS)


_DIRECTIONS = {
    code: f"⟨U+{code:04X}⟩"
    for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
