"""What a file of weights states of its model beside the tensors, typed and bounded.

Our own exports state it in the metadata of the safetensors file, each entry as JSON; of anybody
else's metadata only these entries are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import json_value, typed
from mjp_privacy.core.schema import STRICT, Share, Side, Width
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, WeightFile
from mjp_privacy.models.localization import DalKind
from mjp_privacy.models.low_rank import AdaptersText
from mjp_privacy.models.mjp_vit import FirstBlock, PositionEmbedding
from mjp_privacy.models.variant import Activation

STATES = replace(CHECKPOINT, expected="metadata of weights that state their model")
CHANNELS = 3
LARGEST = 2.0  # a mean or std beyond it is not of pixels in [0, 1]
SMALLEST_STD = 1e-4


def three_numbers(key: str, value: Any, where: str = "") -> tuple[float, ...]:
    """Per-channel mean or std from one number or three; UserError for anything else.

    where: what the message begins with, such as a file's name
    """
    begin = f"{where}, {key}" if where else key
    numbers, got = _numbers(value), shown(repr(value), 100)
    least = SMALLEST_STD if key == "std" else -math.inf
    if len(numbers) != CHANNELS or not all(math.isfinite(n) and n >= least for n in numbers):
        kind = "positive number" if key == "std" else "number"
        raise UserError(f"{begin}: expected one {kind} or three, one per channel; got {got}.")
    if max(map(abs, numbers)) > LARGEST:
        raise UserError(
            f"{begin}: expected that of pixels from 0 to 1, got {got}, as of pixels from 0 to "
            f"255. Give {key}={[round(n / 255, 4) for n in numbers]}."
        )
    return tuple(numbers)


def _numbers(value: Any) -> list[float]:
    """One number three times, or the numbers of a list; empty where anything is no number."""
    if isinstance(value, str | bytes | Mapping | Set):
        return []
    try:
        values = list(value)
    except TypeError:
        values = [value] * CHANNELS
    try:
        return [] if any(isinstance(v, bool | str) for v in values) else [float(v) for v in values]
    except (TypeError, ValueError, OverflowError):
        return []


def _channels(key: str) -> BeforeValidator:
    def checked(value: Any) -> tuple[float, ...]:
        try:
            return three_numbers(key, value)
        except UserError as error:
            said = str(error).removeprefix(f"{key}: ").partition(" got ")[0].rstrip(";, ")
            raise PydanticCustomError("channels", said) from error

    return BeforeValidator(checked)


Epsilon = Annotated[float, Field(strict=True, gt=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class Stated:
    """The facts of a model that a file of weights may state; None: it states that there is none."""

    mean: Annotated[tuple[float, ...] | None, _channels("mean")] = None
    std: Annotated[tuple[float, ...] | None, _channels("std")] = None
    num_heads: Width | None = None
    img_size: Side | None = None
    resize: Side | None = None
    interpolation: Literal["bicubic", "bilinear"] | None = None
    position_embedding: PositionEmbedding | None = None
    first_block: FirstBlock | None = None
    dal: DalKind | None = None
    norm_eps: Epsilon | None = None
    activation: Activation | None = None
    trained_gamma: Share | None = None
    adapters: AdaptersText | None = None


METADATA = tuple(field.name for field in dataclasses.fields(Stated))
"""Keys of a file's metadata that describe its model; their values are JSON."""


def stated(file: WeightFile) -> dict[str, Any]:
    """The facts that the file's metadata states, by field of `ModelSpec`."""
    content = {}
    for key in METADATA:
        if key in file.metadata:
            content[key] = _value(file, key)
    facts = typed(content, file.path, STATES, Stated)
    values = {key: getattr(facts, key) for key in content}
    if values.get("position_embedding", "") is None:  # every model has one or the other
        del values["position_embedding"]
    return values


def _value(file: WeightFile, key: str) -> Any:
    text = file.metadata[key]
    try:
        return json_value(text, file.path, STATES)
    except UserError as error:
        raise STATES.refusal(
            file.path, f"metadata {key!r} is not JSON: {shown(repr(text), 100)}"
        ) from error
