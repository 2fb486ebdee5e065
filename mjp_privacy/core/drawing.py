"""What all pictures share: the house's colours and axes, strangers' words as texts, whole files,
and charts of the page.

    with picture(out / "curves.png", 9, 3.4) as figure:
        axes = figure.subplots()
        axes.plot(epochs, losses, color=colour(0), label=drawn(name))

matplotlib is imported when something is drawn, and never through pyplot, which keeps figures alive.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import cut, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE = "#1f2933", "#6b7780", "#c9d0d6"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK, "#882255")
"""Most colour-blind readers can tell them apart (Okabe and Ito)."""
MARKERS = "os^DvPX*"
LONGEST = 80
"""Letters of a label in a picture."""


def colour(number: int) -> str:
    """The colour of line `number`, counted from 0; after the last colour they start over."""
    return COLOURS[number % len(COLOURS)]


def dashes(number: int) -> str:
    """How line `number` is dashed: solid until the colours start over."""
    return ("-", "--", ":", "-.")[number // len(COLOURS) % 4]


def drawn(label: object, longest: int = LONGEST) -> str:
    """A stranger's word as the text of a picture: one line, and no name that legends leave out."""
    text = readable(cut(plain(str(label)), longest))
    return f" {text}" if text.startswith("_") else text


def readable(text: str) -> str:
    """The text without what XML has no place for: invisible characters are escaped."""
    return plain(text).translate({0xFFFE: "\ufffd", 0xFFFF: "\ufffd"})


@contextmanager
def house_style() -> Iterator[None]:
    """What is drawn meanwhile looks alike, and no text of it is set as mathematics: `$\\frac{1}`
    would end hours of work with an error. Letters that the font lacks are boxes."""
    import matplotlib
    from cycler import cycler

    look: dict[Any, Any] = {
        **{"text.parse_math": False, "text.usetex": False, "svg.fonttype": "none"},
        **{"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
        **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.6},
        **{"legend.frameon": False, "legend.fontsize": 7.5},
        **{"axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED},
        **{"text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK},
        **{"axes.prop_cycle": cycler("color", COLOURS)},
    }
    with matplotlib.rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


@contextmanager
def picture(
    path: Path,
    width: float,
    height: float,
    *,
    dpi: float = 150,
    layout: Any = "constrained",
) -> Iterator[Figure]:
    """A figure of so many inches to draw on; the file, a PNG, is whole or absent."""
    with house_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), dpi=72, layout=layout)
        yield figure
        write_atomically(path, lambda place: figure.savefig(place, format="png", dpi=dpi))


def band(axes: Axes, x: Any, low: Any, high: Any, shade: str, **look: Any) -> None:
    axes.fill_between(x, low, high, color=shade, alpha=0.14, linewidth=0, **look)


# charts of a page ---------------------------------------------------------------------------------

SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
WIDTH = 440.0
"""Pixels: a phone shows it at nine tenths of its size, a wide screen two beside each other."""
HOVER = "hover: "
"""Begins the id of what has a hover text; the text follows."""

FONT = 12.0
STYLE = "svg.drawing *{stroke-linejoin:round}"
NUMBER = re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class Chart:
    """A drawing as inline SVG, made by us; its text is escaped already.

    Texts stay texts (`svg.fonttype` none): they are searched, copied and read aloud, and take a
    tenth of the bytes of outlines. Browsers set them in fonts that are narrower than DejaVu Sans,
    by which matplotlib measures, so what is apart here is apart there. Equal figures are equal
    bytes.
    """

    name: str  # id on the page and file name of its download: "success"
    title: str
    caption: str
    svg: str


def hover(artist: Any, words: str) -> None:
    """Let the words show where a pointer rests on an artist."""
    artist.set_gid(HOVER + " ".join(readable(words).split()))


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """A figure in pixels, of which an inch has 72."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72)


def axes_at(figure: Figure, left: float, top: float, right: float, bottom: float) -> Axes:
    """Axes in a rectangle of pixels, counted from the upper left."""
    wide, tall = 72 * figure.get_size_inches()
    box = (left / wide, 1 - bottom / tall, (right - left) / wide, (bottom - top) / tall)
    return figure.add_axes(box)


def stretch(axes: Axes, knots: Sequence[float], places: Sequence[float]) -> None:
    """Give some stretches of the axis across more room: straight between knots."""
    to_place = partial(np.interp, xp=knots, fp=places)
    to_knot = partial(np.interp, xp=places, fp=knots)
    axes.set_xscale("function", functions=(to_place, to_knot))
    axes.minorticks_off()


def chart(figure: Figure, name: str, title: str, caption: str) -> Chart:
    """The chart of a figure, to be called while the house's style is on.

    Of what matplotlib writes, names of parts become hover texts or go, and coordinates have one
    decimal. The drawing is the same in a file of its own; its ground is white on a dark page, too.
    """
    import matplotlib

    written = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # else ids are drawn at random
        figure.savefig(written, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    for element in list(root.iter(f"{{{SVG}}}g")):
        known = element.attrib.pop("id", "")
        if known.startswith(HOVER):
            told = ElementTree.Element(f"{{{SVG}}}title")
            told.text = known.removeprefix(HOVER)
            element.insert(0, told)
    for element in root.iter():
        for place in ("d", "x", "y", "transform", "width", "height"):
            if place in element.attrib:
                words = " ".join(element.get(place, "").split())
                element.set(place, NUMBER.sub(_rounded, words))
        if style := element.get("style"):
            element.set("style", style.replace("'DejaVu Sans'", "system-ui, sans-serif"))
    wide = 72 * figure.get_figwidth()
    look = {
        "class": "drawing",
        "role": "img",
        "viewBox": NUMBER.sub(_rounded, root.get("viewBox", "")),
        "style": f"width:100%;min-width:{0.75 * wide:.0f}px;max-width:{1.25 * wide:.0f}px",
    }
    head = ElementTree.Element(f"{{{SVG}}}svg", look)
    for tag, text in (("title", readable(title)), ("desc", readable(caption)), ("style", STYLE)):
        ElementTree.SubElement(head, f"{{{SVG}}}{tag}").text = text
    head.extend(child for child in root if not child.tag.endswith(("metadata", "}defs")))
    head.extend(root.findall(f"{{{SVG}}}defs")[1:])  # the first is a style for a whole page
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK)
    return Chart(name, title, caption, ElementTree.tostring(head, encoding="unicode"))


def _rounded(found: re.Match[str]) -> str:
    return f"{round(float(found.group()), 1) + 0:g}"
