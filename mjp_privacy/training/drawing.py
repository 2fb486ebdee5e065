"""What all pictures by matplotlib share: colours, and words of strangers as texts, never formulas.

@plain_texts()
def draw(...): ...      # labels go through drawn(label)

By itself matplotlib sets `$\\frac{1}` as mathematics, which ends in an error after hours of work.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mjp_privacy.core.text import cut, plain

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#882255")
"""Most colour-blind readers can tell them apart (Okabe and Ito)."""
LONGEST = 80
"""Letters of a label in a picture."""


def colour(number: int) -> str:
    """The colour of line `number`, counted from 0; after the last colour they start over."""
    return COLOURS[number % len(COLOURS)]


@contextmanager
def plain_texts() -> Iterator[None]:
    """What is drawn meanwhile has no mathematics in it; letters that a font lacks are boxes."""
    import matplotlib

    with (
        matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def drawn(label: object) -> str:
    """A stranger's word as the text of a picture: one line, and no name that legends leave out."""
    text = cut(plain(str(label)), LONGEST)
    return f" {text}" if text.startswith("_") else text
