"""Types for fields that come from outside: strict, finite, and bounded by what no machine exceeds.

    @schema
    class Server:
        lr: Positive = 0.1          # true, "0.1", nan and 1e300 are refused with the field's name
        warmup: Whole = 0

A bound says that a value is absurd, not that it is unwise: 16,384 pixels a side are allowed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, Strict
from pydantic_core import PydanticCustomError

from mjp_privacy.core.shown import INVISIBLE, plain

__all__ = [
    "Classes",
    "Count",
    "Depth",
    "Label",
    "Many",
    "Mean",
    "Name",
    "NotNegative",
    "PathText",
    "Positive",
    "Seed",
    "Share",
    "Side",
    "Spread",
    "Switch",
    "Text",
    "Whole",
    "Width",
]

MOST = 10**9  # of anything that is counted
MOST_NUMBER = 1e9  # of a rate, a weight, a noise

Switch = Annotated[bool, Strict()]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
NotNegative = Annotated[float, Field(strict=True, ge=0, le=MOST_NUMBER, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=MOST_NUMBER, allow_inf_nan=False)]
Mean = Annotated[float, Field(strict=True, ge=-1e6, le=1e6, allow_inf_nan=False)]
"""Of a channel, in units of the full range of pixels."""
Spread = Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
"""A channel's standard deviation, in the same units."""

Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Whole = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""Stored with the rows in 64 bits."""

Side = Annotated[int, Field(strict=True, ge=1, le=16_384)]
"""Of an image or a patch, in pixels."""
Width = Annotated[int, Field(strict=True, ge=1, le=16_384)]
"""Numbers in a token, and as many heads at most."""
Depth = Annotated[int, Field(strict=True, ge=1, le=512)]
Classes = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]

Many = Field(max_length=1000)
"""For lists and mappings: Annotated[tuple[Share, ...], Many]."""


def _printable(text: str) -> str:
    """Refuse what a terminal would not draw, and blank texts."""
    if not text.strip():
        raise PydanticCustomError("text", "Text should hold more than spaces")
    if plain(text) != text:
        raise PydanticCustomError(
            "text", f"Text should hold no invisible characters ({', '.join(INVISIBLE)})"
        )
    return text


def _part_of_a_path(name: str) -> str:
    """Refuse a name that would not be one file's or folder's own."""
    if name.startswith(".") or "/" in name or "\\" in name:
        raise PydanticCustomError(
            "name", "A name should begin with no dot and hold no / or \\, for folders are named so"
        )
    return name


def _without_zero_bytes(path: str) -> str:
    if "\0" in path:
        raise PydanticCustomError("path", "A path should hold no zero byte")
    return path


Label = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_printable)]
"""What tables call something."""
Name = Annotated[Label, AfterValidator(_part_of_a_path)]
"""What a folder or file is called after."""
Text = Annotated[str, Field(strict=True, max_length=2000)]
"""A sentence or two."""
PathText = Annotated[
    str, Field(strict=True, min_length=1, max_length=4096), AfterValidator(_without_zero_bytes)
]
"""A file, or another word that says where something is."""
