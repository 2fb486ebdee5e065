"""Which layout a set of names has."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.layouts.known import LAYOUTS
from mjp_privacy.models.layouts.layout import Layout, unwrapped

SHOWN = 6  # names shown of a set that fits no layout


def fitting(names: Iterable[str]) -> Layout | None:
    """The first layout that has one of the names as its sign, or None."""
    names = list(names)
    for layout in LAYOUTS:
        sign = re.compile(layout.sign)
        if any(sign.fullmatch(n) or sign.fullmatch(unwrapped(n)) for n in names):
            return layout
    return None


def recognised(names: Iterable[str]) -> Layout:
    """The layout of a model, a checkpoint or a (partial) gradient, from its names alone.

    recognised(model.state_dict()).name == "torchvision"
    """
    names = list(names)
    layout = fitting(names)
    if layout is None:
        raise UserError(
            f"The names fit no Vision Transformer that is known here: expected those of "
            f"{'; '.join(layout.title for layout in LAYOUTS)}; got {shown(names)}. Give the "
            "parameters under the names of one of these (named_parameters() or state_dict())."
        )
    return layout


def shown(names: Iterable[str]) -> str:
    """A few of the names, for a message: `a, b, c, …`."""
    names = sorted(names)
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "") or "no names"
