"""Checked dataclasses: strict, finite fields, bounded by what no machine exceeds.

    @schema
    class Server:
        lr: Positive = 0.1          # true, "0.1", nan and 1e300 are refused with the field's name
        warmup: Whole = 0

A bound says that a value is absurd, not that it is unwise: 16,384 pixels a side are allowed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError
from typing_extensions import dataclass_transform, is_typeddict

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.text import INVISIBLE, plain, shown

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""For dataclasses that are read from a file: an unknown field is an error, and so is NaN."""
MOST_COUNT = 10**9  # of anything that is counted
MOST_NUMBER = 1e9  # of a rate, a weight, a noise
MISTAKES_SHOWN = 10
A_KIND = re.compile(r"constrained-(?:float|int|str)|tuple\[(?:constrained-)?(?:float|int)\b.*\]")
"""Pydantic's word, in the place of a mistake, for one of the kinds that a value may have."""

# types of fields ---------------------------------------------------------------------------------

Switch = Annotated[bool, Strict()]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
NotNegative = Annotated[float, Field(strict=True, ge=0, le=MOST_NUMBER, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=MOST_NUMBER, allow_inf_nan=False)]
Mean = Annotated[float, Field(strict=True, ge=-1e6, le=1e6, allow_inf_nan=False)]
"""Of a channel, in units of the full range of pixels."""
Spread = Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
"""A channel's standard deviation, in the same units."""
Count = Annotated[int, Field(strict=True, ge=1, le=MOST_COUNT)]
Whole = Annotated[int, Field(strict=True, ge=0, le=MOST_COUNT)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""Stored with the rows in 64 bits."""
Side = Annotated[int, Field(strict=True, ge=1, le=16_384)]
"""Of an image or a patch, in pixels."""
Size = int | tuple[int, int]
"""Of pictures, in pixels: a square's side, or height and width."""


def height_width(size: Size) -> tuple[int, int]:
    """height_width(224) is (224, 224), height_width((96, 64)) is (96, 64)"""
    return (size, size) if isinstance(size, int) else size


def size_text(size: Size) -> str:
    """size_text(224) is "224", size_text((96, 64)) is "96×64", size_text((96, 96)) is "96" """
    return "×".join(map(str, dict.fromkeys(height_width(size))))


def size_of(text: str | None) -> Size | None:
    """size_of("224") is 224, size_of("96x64") is (96, 64): as a command line has it."""
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,5}(x\d{1,5})?", text):
        raise UserError(
            "--img-size: expected a side such as 192, or height and width such as 96x64, got "
            f"{shown(repr(text), 60)}."
        )
    height, _, width = text.partition("x")
    return (int(height), int(width)) if width and width != height else int(height)


def _image_size(value: Any) -> Any:
    sides = value if isinstance(value, list | tuple) else (value, value)
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    if len(sides) != 2 or not whole or not all(1 <= side <= 16_384 for side in sides):
        raise PydanticCustomError(
            "size",
            "Input should be pixels from 1 to 16384: a side, or height and width as [96, 64]",
        )
    return sides[0] if sides[0] == sides[1] else tuple(sides)


ImageSize = Annotated[Side | tuple[Side, Side], BeforeValidator(_image_size)]
"""A `Size` that a user gives; [96, 96] becomes 96."""
Width = Annotated[int, Field(strict=True, ge=1, le=16_384)]
"""Numbers in a token, and as many heads at most."""
Depth = Annotated[int, Field(strict=True, ge=1, le=512)]
Classes = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Many = Field(max_length=1000)
"""For lists and mappings: Annotated[tuple[Share, ...], Many]."""


def _printable(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("text", "Text should hold more than spaces")
    if plain(text) != text:
        raise PydanticCustomError(
            "text", f"Text should hold no invisible characters ({', '.join(INVISIBLE)})"
        )
    return text


def _part_of_a_path(name: str) -> str:
    if name.startswith(".") or "/" in name or "\\" in name:
        raise PydanticCustomError(
            "name", "A name should begin with no dot and hold no / or \\, for folders are named so"
        )
    return name


Label = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_printable)]
"""What tables call something."""
Name = Annotated[Label, AfterValidator(_part_of_a_path)]
"""What a folder or file is called after."""
Text = Annotated[str, Field(strict=True, max_length=2000)]
"""A sentence or two."""
PathText = Annotated[str, Field(strict=True, min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
"""A file, or another word that says where something is."""

# checked dataclasses -----------------------------------------------------------------------------


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def schema(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked, as STRICT says.

    A wrong value is a UserError also where the class is called, as the command line and
    `dataclasses.replace` do.
    """
    made: Any = dataclass(frozen=True, config=STRICT)(cls)
    checked = made.__init__

    @wraps(checked)
    def initialised(self: Any, *values: Any, **fields: Any) -> None:
        try:
            checked(self, *values, **fields)
        except ValidationError as error:
            mistakes = listed_mistakes(error, made).removeprefix("1 mistake(s): ")
            raise UserError(mistakes) from error

    made.__init__ = initialised
    whole: type[T] = made
    return whole


def parse(kind: type[T], content: Mapping[str, Any], where: str) -> T:
    """The dataclass `kind` made from these fields; every mistake in them is listed in one error.
    `where` names the file in it."""
    try:
        return TypeAdapter(kind).validate_python(dict(content))
    except ValidationError as error:
        raise UserError(f"{where} has {listed_mistakes(error, kind)}") from error


def listed_mistakes(error: ValidationError, kind: Any) -> str:
    """What pydantic found, as the end of a sentence and a line for each mistake.

    Of a field that may be a number or a list pydantic tells what is wrong with either: that of the
    kind that was given counts. What a refused list holds is told, not that it is then too short.
    """
    by_place: dict[tuple[Any, ...], Any] = {}
    for problem in error.errors(include_url=False):
        kinds = [part for part in problem["loc"] if A_KIND.fullmatch(str(part))]
        place = tuple(part for part in problem["loc"] if part not in kinds)
        if not (kinds and problem["type"].endswith("_type")) or place not in by_place:
            by_place[place] = problem
    inside = {place[:-1] for place in by_place if place}
    lines = [
        _explain(shown(".".join(map(str, place)), 100), problem, kind)
        for place, problem in by_place.items()
        if place not in inside or not problem["type"].endswith(("too_short", "_type"))
    ]
    count = len(lines)
    if count > MISTAKES_SHOWN:
        lines = [*lines[:MISTAKES_SHOWN], f"... and {count - MISTAKES_SHOWN} more"]
    before = " " if count == 1 else "\n  "
    return f"{count} mistake(s):" + "".join(before + line for line in lines)


def _explain(place: str, problem: Any, kind: Any) -> str:
    location = problem["loc"]
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        for part in location[:-1]:  # what is behind a nested field
            kind = _with_fields(get_type_hints(kind).get(part)) or kind
        fields = sorted(get_type_hints(kind))
        hint = did_you_mean(str(location[-1]), fields, f" Known: {', '.join(fields)}.")
        if "options" in fields:
            hint += f" One of what `name` names stands under options: {{{location[-1]}: …}}."
        return f"{place}: unknown field.{hint}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{place}: this field is needed and was not given."
    message, hint = problem["msg"].removeprefix("Value error, "), ""
    if problem["type"] in ("too_short", "too_long"):
        message = re.sub(r"^\w+ should", "Input should", message.partition(" after")[0])
    if problem["type"] == "dataclass_type":
        message = "Input should be named fields"
    if problem["type"] == "literal_error":
        hint = did_you_mean(str(problem["input"]), re.findall(r"'([^']+)'", problem["msg"]))
    said = shown(" ".join(message.split())).replace("Input should", "must").removesuffix(".")
    got = "" if re.search(r"\bgot\b", said) else f"; got {shown(repr(problem['input']), 100)}"
    return f"{place}: {said}{got}.{hint}"


def _with_fields(annotation: Any) -> Any:
    """The dataclass or TypedDict in a field's type, such as dict[str, ModelConfig]; or None."""
    if dataclasses.is_dataclass(annotation) or is_typeddict(annotation):
        return annotation
    return next(filter(None, map(_with_fields, get_args(annotation))), None)
