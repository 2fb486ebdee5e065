"""Pictures by matplotlib whose words come from strangers: a text is a text, never a formula.

@plain_texts()
def draw(...): ...      # labels go through drawn(label)

By itself matplotlib sets `$\\frac{1}` as mathematics, which ends in an error after hours of work.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mjp_privacy.core.shown import cut, plain

LONGEST = 80
"""Letters of a label in a picture."""


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
