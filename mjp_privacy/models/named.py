"""Checkpoints as command lines name them: PATH, LABEL=PATH, timm:NAME or a name of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import is_there
from mjp_privacy.core.registry import did_you_mean, unknown_name
from mjp_privacy.core.text import shown
from mjp_privacy.models.zoo import NAMED_MODELS

MOST_LETTERS = 100
"""Of a label in a table; a longer one is shortened in its middle."""
GENERIC = ("model", "model_float16", "checkpoint")
"""Names of files that say nothing; the folder's name says what they are."""


@dataclass(frozen=True)
class NamedCheckpoint:
    """A label for tables, and what `load_model` takes as its checkpoint.

    described: whether --model, --mean and --std are about this one
    """

    label: str
    source: str
    described: bool = True

    def options(self, *values: Any) -> tuple[Any, ...]:
        """What these options mean for this checkpoint: nothing, if they are about others.

        name, mean, std = checkpoint.options(arguments.model, arguments.mean, arguments.std)
        """
        return values if self.described else (None,) * len(values)


def named_checkpoints(items: Sequence[str], option: str) -> list[NamedCheckpoint]:
    """The checkpoints of a command line, each with its own label.

    named_checkpoints(["cifar_vit", "ours=run/model.safetensors"], "--checkpoint")

    option  what the command line calls them, for messages
    """
    checkpoints = [_named(item, option) for item in items]
    labels = [checkpoint.label for checkpoint in checkpoints]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise UserError(
            f"Two checkpoints are called {twice[0]!r}: expected a different name for each. Give "
            f"{option} NAME=PATH NAME=PATH."
        )
    lacking = {item.label for item in checkpoints if not _describes_itself(item.source)}
    if not lacking:  # then an option is meant to replace what they state
        return checkpoints
    return [replace(item, described=item.label in lacking) for item in checkpoints]


def _describes_itself(source: str) -> bool:
    """Whether a checkpoint states how pictures are normalised; timm's names stand for all of it."""
    from mjp_privacy.models.checkpoint_files import TIMM_PREFIX, read_metadata

    return source.startswith(TIMM_PREFIX) or "mean" in read_metadata(source)


def for_all_channels(numbers: tuple[float, ...] | None) -> float | tuple[float, ...] | None:
    """Per-channel numbers of a command line, where one stands for all three."""
    return numbers[0] if numbers is not None and len(numbers) == 1 else numbers


def _named(item: str, option: str) -> NamedCheckpoint:
    """The label and path of LABEL=PATH; a plain PATH is labelled by its file or folder name."""
    file = Path(item)
    if "=" in item and not is_there(file):
        label, _, path = item.partition("=")
        if not label or not path:
            raise UserError(f"{option}: expected PATH or LABEL=PATH, got {shown(item)!r}.")
        return NamedCheckpoint(shown(label, MOST_LETTERS), _source(path))
    if not is_there(file) or file.is_dir():
        return NamedCheckpoint(shown(item, MOST_LETTERS), _source(item))
    name = file.resolve().parent.name if file.stem in GENERIC else file.stem
    return NamedCheckpoint(shown(name, MOST_LETTERS), _source(item))


def _source(path: str) -> str:
    """The checkpoint of a named model; anything else is a path and stays as it is."""
    named = NAMED_MODELS[path].checkpoint if path in NAMED_MODELS else None
    if named is None and path.isidentifier() and not is_there(Path(path)):
        near = did_you_mean(path, NAMED_MODELS)
        if near:
            raise unknown_name("model", path, list(NAMED_MODELS))
    return named or path
