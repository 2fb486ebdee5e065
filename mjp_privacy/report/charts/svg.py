"""A small writer of SVG: whatever is shown is escaped, and colours follow the page's light or dark.

Colours are CSS variables of the page with fallbacks (--ink, --muted, --rule, --paper); black of
the house's colours becomes currentColor, so that it shows on a dark page too.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mjp_privacy.core.drawing import COLOURS

WIDTH = 720.0
"""Every chart is this wide in its own pixels and as wide as its column on the page."""

SIZE = 12.0
"""Font size of all text: 11.7 px where a chart is 700 px wide."""

INK = "var(--ink, currentColor)"
MUTED = "var(--muted, #6b7780)"
RULE = "var(--rule, #c9d0d6)"
PAPER = "var(--paper, Canvas)"

DASHES = ("", "6 3", "2 2", "8 3 2 3")
SHAPES = ("circle", "square", "triangle", "diamond", "wedge", "plus", "cross", "ring")

DARK_ON_DARK = {"#0072b2": "#5c7cff", "#882255": "#a970e0", "#1f2933": "currentColor"}
"""Colours of the house that are too dark for a dark page, and what stands there instead."""

_DARK = "".join(
    f"--{name[1:]}:{light};" for name, light in DARK_ON_DARK.items() if light != "currentColor"
)
STYLE = (
    "svg.drawing{width:100%;height:auto;max-width:1100px;font-family:system-ui,sans-serif}"
    "@media screen and (prefers-color-scheme:dark)"
    f"{{:root:not([data-theme=light]) svg.drawing{{{_DARK}}}}}"
    f"@media screen{{:root[data-theme=dark] svg.drawing{{{_DARK}}}}}"
)

# what XML 1.0 has no place for, and marks that turn the direction of the text around them
_UNWELCOME = re.compile(
    "[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]"
)


def escape(text: object) -> str:
    """Text as it may stand in SVG, on one line: escape("<b>") is "&lt;b&gt;"."""
    return html.escape(" ".join(_UNWELCOME.sub("\ufffd", str(text)).split()))


def number(value: float) -> str:
    """A coordinate with one decimal at most; it must be finite."""
    if not math.isfinite(value):
        raise ValueError(f"a coordinate must be finite, got {value}")
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def shade(index: int) -> str:
    """The paint of line `index`, counted from 0."""
    colour = COLOURS[index % len(COLOURS)]
    light = DARK_ON_DARK.get(colour)
    if light == "currentColor":
        return light
    return f"var(--{colour[1:]}, {colour})" if light else colour


def dash(index: int) -> str:
    """The dashes of line `index`: after the last colour they tell equal colours apart."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def standalone(svg: str) -> str:
    """The same drawing as a file of its own, for programs that know no CSS variables."""
    return resolved(svg).replace("<svg ", '<svg color="#1f2933" ', 1)


def resolved(paints: str) -> str:
    """The text with the fallback in place of every CSS variable: those of a light page."""
    paints = paints.replace(PAPER, "#ffffff")
    return re.sub(r"var\(--[\w-]+, ([^()<>]+)\)", r"\1", paints)


@dataclass(frozen=True)
class Scale:
    """From values to pixels, straight between knots; values outside stand at the ends.

    A scale with more than two knots gives some stretches more room than others.

        Scale((0.0, 10.0), (50.0, 150.0)).at(5.0)  # 100.0
    """

    values: tuple[float, ...]
    pixels: tuple[float, ...]

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return float(np.interp(value, self.values, self.pixels))


def stretched(
    low: float, high: float, start: float, end: float, room: Sequence[tuple[float, float]]
) -> Scale:
    """A scale from [low, high] to [start, end] on which each dB up to a knot has the given room.

    room: (knot, room for one unit below it), knots ascending; the last also holds beyond it.
    """
    knots = [low, *(knot for knot, _ in room if low < knot < high), high]
    shares = [0.0]
    for left, right in itertools.pairwise(knots):
        unit = next((unit for knot, unit in room if right <= knot), room[-1][1])
        shares.append(shares[-1] + unit * (right - left))
    pixels = tuple(start + (end - start) * share / shares[-1] for share in shares)
    return Scale(tuple(knots), pixels)


@dataclass
class Drawing:
    """A drawing in the making; `render` gives its text."""

    height: float
    title: str
    description: str
    width: float = WIDTH
    parts: list[str] = field(default_factory=list)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], paint: str, **look: object
    ) -> None:
        """A straight line; `look` as in `path`."""
        self.path([start, end], paint, **look)

    def path(self, points: Sequence[tuple[float, float]], paint: str, **look: object) -> None:
        """A line through points. look: width, dash, opacity, title."""
        attributes = {
            "stroke-width": look.get("width", 1),
            "stroke-dasharray": look.get("dash", ""),
            "stroke-opacity": look.get("opacity", ""),
        }
        head = f'<path d="{_outline(points)}" fill="none" stroke="{paint}" stroke-linejoin="round"'
        self._add("path", head, attributes, str(look.get("title", "")))

    def area(
        self, points: Sequence[tuple[float, float]], paint: str, opacity: float, title: str = ""
    ) -> None:
        """A filled shape without an outline."""
        head = f'<path d="{_outline(points)}z" fill="{paint}"'
        self._add("path", head, {"fill-opacity": opacity}, title)

    def marker(
        self,
        at: tuple[float, float],
        shape: str,
        paint: str,
        *,
        radius: float = 5.0,
        hollow: bool = False,
        title: str = "",
    ) -> None:
        """One of SHAPES; a hollow one is only its outline."""
        fill = "none" if hollow else paint
        outline = _outline(marker_outline(at, shape, radius))
        head = f'<path d="{outline}z" fill="{fill}" stroke="{paint}"'
        self._add("path", head, {"stroke-width": 1.5}, title)

    def text(
        self,
        at: tuple[float, float],
        content: str,
        *,
        anchor: str = "start",
        paint: str = INK,
        size: float = SIZE,
        full: str = "",
        halo: bool = False,
    ) -> None:
        """Text whose baseline starts, has its middle or ends at a point; `full` shows on hover.

        halo: with a rim of the page's colour, to be read on top of lines.
        """
        rim = f' stroke="{PAPER}" stroke-width="3" paint-order="stroke"' if halo else ""
        hover = f"<title>{escape(full)}</title>" if full and full != content else ""
        self.parts.append(
            f'<text x="{number(at[0])}" y="{number(at[1])}" text-anchor="{anchor}" '
            f'font-size="{number(size)}" fill="{paint}"{rim}>{hover}{escape(content)}</text>'
        )

    def render(self) -> str:
        """The whole drawing as an element to stand in a page."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" '
            f'viewBox="0 0 {number(self.width)} {number(self.height)}" width="100%">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
        )
        return "\n".join([head, f"<style>{STYLE}</style>", *self.parts, "</svg>"])

    def _add(self, element: str, head: str, attributes: dict[str, object], title: str) -> None:
        told = "".join(f' {name}="{value}"' for name, value in attributes.items() if value != "")
        end = f"><title>{escape(title)}</title></{element}>" if title else "/>"
        self.parts.append(f"{head}{told}{end}")


def _outline(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def marker_outline(at: tuple[float, float], shape: str, radius: float) -> list[tuple[float, float]]:
    """The corners of a marker around a point."""
    return [(at[0] + radius * dx, at[1] + radius * dy) for dx, dy in _corners(shape)]


def _corners(shape: str) -> list[tuple[float, float]]:
    """The outline of a marker of radius 1."""
    if shape == "plus":
        a = 0.35
        quarter = [(a, -1.0), (a, -a), (1.0, -a)]
        return [_turned(x, y, turn) for turn in range(4) for x, y in quarter]
    if shape == "cross":
        half = math.sqrt(0.5)
        return [((x - y) * half, (x + y) * half) for x, y in _corners("plus")]
    corners = {"square": (4, 45), "diamond": (4, 0), "triangle": (3, -90), "wedge": (3, 90)}
    count, first = corners.get(shape, (20, 0))
    size = 1.15 if count < 5 else 1.0
    angles = [math.radians(first + 360 * i / count) for i in range(count)]
    return [(size * math.cos(angle), size * math.sin(angle)) for angle in angles]


def _turned(x: float, y: float, quarters: int) -> tuple[float, float]:
    for _ in range(quarters):
        x, y = -y, x
    return x, y
