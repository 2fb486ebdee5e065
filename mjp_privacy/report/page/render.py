"""index.html: one file with everything inside; it opens offline and asks no server for anything."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card import CardFigure, CardRow
from mjp_privacy.report.lines import MARKS
from mjp_privacy.report.notes import Flag
from mjp_privacy.report.page.content import PageContent, PagePicture
from mjp_privacy.report.page.data import (
    capped_median,
    metric_decimals,
    metric_title,
    metrics_of,
    page_data,
)
from mjp_privacy.report.page.terms import Terms
from mjp_privacy.report.tables.text import DASH, capped, gamma, number

if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPTS = ("data.js", "filters.js", "lines.js", "canvas.js", "pictures.js", "compare.js", "page.js")
"""One script in this order: each file uses only what stands in the files before it."""

LONG = 48  # a table cell with more characters wraps


def render_page(content: PageContent) -> str:
    """The whole page as text. Everything that came from a run is escaped.

    Example:
        `Path("index.html").write_text(render_page(content), encoding="utf-8")`
    """
    _only_pictures(content.pictures)
    script = _script()
    page = _environment(content).get_template("page.html.j2")
    text = page.render(
        page=content,
        style=_asset("page.css"),
        script=script,
        data=page_data(content, _embedded(content)),
        policy=_policy(script),
        metrics=metrics_of(content),
        flags=_flags(content),
        strip=[picture for picture in content.shown if picture.strip],
        many_runs=len({line.run for line in content.lines}) > 1,
    )
    text = undirected(text)  # names of images may turn the words behind them
    return text.encode("utf-8", "replace").decode("utf-8")  # a file name may be no Unicode


def _environment(content: PageContent) -> Environment:
    """Templates with the words they use: `term("γ")`, `text | linked`, `3.14159 | number(2)`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("mjp_privacy.report.page", "templates")
    found = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    terms = Terms(content.glossary)
    flags = {flag.key: (place, flag) for place, flag in enumerate(_flags(content), 1)}
    found.filters |= {"linked": terms.linked, "number": number, "score": _score, "gamma": gamma}
    found.filters |= {"link": _link, "interval": _interval, "metric": metric_title}
    found.filters |= {"capped_median": capped_median}
    found.globals |= {"term": terms.term, "definition": terms.definition, "glossary": terms.entries}
    found.globals |= {"DASH": DASH, "LONG": LONG, "CAP": PSNR_CAP, "ROLES": MARKS}
    found.globals |= {"flagged": flags, "standing": _standing, "share": _share}
    found.globals |= {"psnr_text": _psnr_reader(content), "is_exact": _exact_reader(content)}
    return found


def _flags(content: PageContent) -> tuple[Flag, ...]:
    """Flags of the card by their numbers, then those that only lines have; each once."""
    found = {flag.key: flag for flag in content.card.flags}
    for flag in content.flags:
        found.setdefault(flag.key, flag)
    return tuple(found.values())


def _policy(script: str) -> str:
    """No request may leave the page, and no script runs but the one that is its own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def _script() -> str:
    sources = "\n".join(_asset(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{sources}\n}})();\n'


def _asset(name: str) -> str:
    return (files("mjp_privacy.report.page") / "assets" / name).read_text(encoding="utf-8")


def _only_pictures(pictures: Mapping[str, str]) -> None:
    for key, uri in pictures.items():
        if not uri.startswith("data:image/"):
            raise ValueError(f"picture {key!r} is no data URI of an image: it starts {uri[:24]!r}")


def _embedded(content: PageContent) -> set[str]:
    """Keys of the pictures in the card's strip."""
    strip = [picture for picture in content.shown if picture.strip]
    return {key for picture in strip for key in _strip_keys(picture, content) if key}


def _strip_keys(picture: PagePicture, content: PageContent) -> list[str | None]:
    columns = [picture.lines.get(line) for _, line in content.strip_columns]
    return [picture.original, picture.fed, *columns]


def _interval(figure: CardFigure) -> str:
    """`67.4, 76.6`, or a dash for a single image."""
    if math.isnan(figure.low):
        return DASH
    return f"{number(figure.low, 1)}, {number(figure.high, 1)}"


def _score(scores: Mapping[str, tuple[float, float, float]], metric: str) -> tuple[str, str]:
    """Mean and interval of a line as text, the interval empty where there is none."""
    mean, low, high = scores.get(metric, (math.nan,) * 3)
    if math.isnan(mean):
        return DASH, ""
    places = metric_decimals(metric)
    if metric == "psnr" and mean >= PSNR_CAP:
        return capped(mean, places), ""
    return number(mean, places), (
        "" if math.isnan(low) else f"[{number(low, places)}, {number(high, places)}]"
    )


def _standing(figure: CardFigure, row: CardRow) -> str:
    """What a figure's colour says: pictures leaked exactly, or no more than the floor was got."""
    if figure.exact:
        return "leaked"
    floor = row.floor.mean if row.floor else math.nan
    return "at-floor" if figure is row.floor or figure.mean <= floor else "partly"


def _share(count: int, of: int) -> str:
    """The length of a bar: `58.00%` for 116 of 200."""
    return f"{100 * count / of:.2f}%" if of else "0%"


def _link(text: str, safe: str = "/") -> str:
    """A name as part of an address; it cannot name another protocol, as `:` is escaped."""
    return quote(text, safe=safe, errors="replace")


def _psnr_reader(content: PageContent) -> Any:
    """A function from line and image to PSNR as text: `24.1 dB`, `≥ 100 dB`, empty."""
    places = {image_id: place for place, image_id in enumerate(content.image_ids)}

    def psnr_text(line: int, image_id: str) -> str:
        values = content.scores.get(line, {}).get("psnr", ())
        place = places.get(image_id, len(values))
        value = values[place] if place < len(values) else None
        if value is None or math.isnan(value):
            return ""
        return f"{capped(value, 1)} dB"

    return psnr_text


def _exact_reader(content: PageContent) -> Any:
    """A function from line and image to whether the picture is known to be exact."""
    places = {image_id: place for place, image_id in enumerate(content.image_ids)}

    def is_exact(line: int, image_id: str) -> bool:
        values = content.exact.get(line, ())
        place = places.get(image_id, len(values))
        return place < len(values) and bool(values[place])

    return is_exact


def undirected(text: str) -> str:
    """The text with characters that turn the direction of what follows written out, for pages:
    "a\\u202egpj.png", which would be read as agnp.jpg, becomes "a⟨U+202E⟩gpj.png"."""
    return text.translate(_DIRECTIONS)


_DIRECTIONS = {
    code: f"⟨U+{code:04X}⟩"
    for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
