"""Which low-rank adapters a client trains: as fields, and as the line that stands for them.

{rank: 4, targets: [qkv, proj]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import yaml_value
from mjp_privacy.core.schema import NotNegative, Positive, Switch, Width, parse, schema
from mjp_privacy.core.text import shown

Target = Literal["qkv", "proj", "fc1", "fc2"]
ADAPTERS = ("lora_A", "lora_B")
"""What PEFT calls the two matrices of an adapter."""


@schema
class LowRank:
    """Which layers get adapters, and how these start: LowRank(4, ("qkv", "proj"))."""

    rank: Width
    targets: Annotated[tuple[Target, ...], Field(min_length=1, max_length=4)] = ("qkv",)
    """Linear layers of every block; `proj` is the attention's. (PEFT would also take the patch
    embedding's, which has the same last name.)"""
    alpha: Positive | None = None
    """The adapter's product counts alpha / rank times; None: once."""
    head: Switch = True
    """Whether the classifier is trained and sent whole, PEFT's `modules_to_save`: usual where a
    model learns new classes."""
    spread: NotNegative = 0.0
    """Standard deviation of B's entries at the start. 0 is PEFT's start, at which the gradient of
    every A is zero; above it stands for a round after others, where B has moved."""

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def trains(self, name: str) -> bool:
        """Whether the client trains, and so sends, the parameter of this name."""
        parts = name.split(".")
        return not set(parts).isdisjoint(ADAPTERS) or (self.head and parts[0] == "head")

    @property
    def text(self) -> str:
        """The line that `low_rank` reads back: LowRank(4).text is "{rank: 4, targets: [qkv]}"."""
        parts = [f"rank: {self.rank}", f"targets: [{', '.join(self.targets)}]"]
        parts += [] if self.alpha is None else [f"alpha: {self.alpha!r}"]
        parts += [] if self.head else ["head: false"]
        parts += [f"spread: {self.spread!r}"] if self.spread else []
        return f"{{{', '.join(parts)}}}"


def low_rank(item: Any) -> LowRank:
    """low_rank({"rank": 4}) and low_rank("{rank: 4}") are LowRank(4)."""
    content = yaml_value(item, "client.lora") if isinstance(item, str) else item
    if not isinstance(content, Mapping):
        raise UserError(
            "low-rank adapters are written as {rank: 4, targets: [qkv, proj]}; got "
            f"{shown(repr(item), 100)}"
        )
    adapters = parse(LowRank, content, "it", {})
    if len(set(adapters.targets)) < len(adapters.targets):
        raise UserError(f"targets: expected each layer once, got {', '.join(adapters.targets)}")
    return adapters


def _one_line(item: Any) -> str:
    """The adapters of a file or of the command line as their line of text."""
    try:
        return low_rank(item).text
    except UserError as error:  # pydantic adds the name of the field
        said = " ".join(str(error).split()).rstrip(".")
        raise PydanticCustomError("adapters", "{said}", {"said": said}) from error


def _line_or_none(item: Any) -> str:
    return "" if item == "" else _one_line(item)


AdaptersText = Annotated[str, BeforeValidator(_one_line), Field(max_length=200)]
"""A field that holds such a line; it may be given as a mapping."""
PerhapsAdapters = Annotated[str, BeforeValidator(_line_or_none), Field(max_length=200)]
"""The same, or an empty text for no adapters."""
