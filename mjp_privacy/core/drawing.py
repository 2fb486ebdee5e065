"""What all pictures share: the house's colours and axes, strangers' words as texts, whole files.

    with picture(out / "curves.png", 9, 3.4) as figure:
        axes = figure.subplots()
        axes.plot(epochs, losses, color=colour(0), label=drawn(name))

matplotlib is imported when something is drawn, and never through pyplot, which keeps figures alive.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import cut, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#1f2933", "#6b7780", "#c9d0d6", "#ffffff"
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
    few_colours: bool = False,
) -> Iterator[Figure]:
    """A figure of so many inches to draw on; the file, a PNG, is whole or absent.

    few_colours: a third of the bytes, for what holds no photographs
    """
    import numpy as np
    from PIL import Image

    with house_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), dpi=72, layout=layout)
        yield figure

        if few_colours:
            figure.set_dpi(dpi)
            canvas: Any = FigureCanvasAgg(figure)
            canvas.draw()
            full = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
            few = full.quantize(256, dither=Image.Dither.NONE)
            write_atomically(path, lambda place: few.save(place, format="PNG", optimize=True))
        else:
            write_atomically(path, lambda place: figure.savefig(place, format="png", dpi=dpi))


def band(axes: Axes, x: Any, low: Any, high: Any, shade: str, **look: Any) -> None:
    """An interval around a curve of this colour."""
    axes.fill_between(x, low, high, color=shade, alpha=0.14, linewidth=0, **look)
