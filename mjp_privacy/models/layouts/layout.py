"""What a layout is: rules that turn a library's names and shapes into this package's own.

A rule moves numbers and never changes them (it renames, cuts, transposes or joins), so what it does
to a parameter is right for its gradient and for a difference of weights too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown

WRAPPERS = (
    *("module", "_orig_mod", "_fsdp_wrapped_module"),  # DataParallel, torch.compile, FSDP
    *("model", "base_model", "backbone", "network", "net"),  # training scripts
    *("vit", "deit", "vision_model"),  # transformers: the network in a classifier
)
"""What stands before names of the same parameters."""
_WRAPPED = re.compile(rf"(?:(?:{'|'.join(WRAPPERS)})\.)*")
JOINED = 3  # query, key and value


def unwrapped(name: str) -> str:
    """A parameter's name without wrappers: `module._orig_mod.cls_token` is `cls_token`."""
    return name[_WRAPPED.match(name).end() :]  # type: ignore[union-attr]


def unchanged(tensor: Tensor) -> Tensor:
    """The tensor as it is."""
    return tensor


@dataclass(frozen=True)
class Rule:
    r"""Names that `pattern` matches as a whole become `own`, a template such as `blocks.\1.norm1`.

    take   the numbers that are taken, in the own parameter's shape; it counts axes from the end,
           so that leading axes (a step, an image) pass through
    part   0, 1, 2: the tensor is the query, key or value of a joined parameter
    """

    pattern: str
    own: str
    take: Callable[[Tensor], Tensor] = unchanged
    part: int | None = None

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def own_name(self, name: str) -> str | None:
        """The own name of a library's name, or None where the rule is not about it."""
        match = self._compiled.fullmatch(name)
        return match.expand(self.own) if match else None


UNRULED = Rule("", "")  # of a name that no rule is about: the tensor stays as it is


@dataclass(frozen=True)
class Layout:
    """One way of naming a Vision Transformer's parameters.

    sign    a pattern that matches as a whole at least one name of every such model, and of a part
            of its gradients, and no name of another layout that stands later in the list
    tower   what stands before the names in a model of pictures and text, where the same names
            without it mean the text's parameters
    beside  a pattern of names that a whole model may hold and that the way from a picture to the
            output does not touch, such as a pooler's
    norm_eps, activation   what the library's networks have by default, which no tensor shows; no
            activation: there are several, and which one must be known
    """

    name: str
    title: str
    sign: str
    rules: tuple[Rule, ...] = ()
    tower: str = ""
    beside: str = r"(?!)"
    norm_eps: float = 1e-6
    activation: str | None = "gelu"

    def to_own(self, tensors: Mapping[str, Tensor], *, axes: int = 0) -> dict[str, Tensor]:
        """The tensors under this package's names, in the shapes of its parameters.

        `axes` leading axes stand before the parameter's own. The tensors may be a part of the
        model's: a joined qkv appears where query, key and value are all there. A name that the
        layout does not know stays as it is.

            recognised(grads).to_own(grads)["blocks.0.attn.qkv.weight"]
        """
        own: dict[str, Tensor] = {}
        source: dict[str, str] = {}
        parts: dict[str, dict[int, Tensor]] = {}
        towered = self._has_tower(tensors)
        for name, tensor in tensors.items():
            for rule, target in self._applied(name, towered) or [(UNRULED, name)]:
                taken = _taken(rule, name, tensor)
                place = target if rule.part is None else f"{target}, part {rule.part}"
                if place in source:
                    raise UserError(
                        f"The names {shown(source[place])!r} and {shown(name)!r} both mean "
                        f"{shown(place)!r}: expected "
                        "the parameters of one model, got two. Leave one of them out."
                    )
                source[place] = name
                if rule.part is None:
                    own[target] = taken
                else:
                    parts.setdefault(target, {})[rule.part] = taken
        for target, pieces in parts.items():
            if len(pieces) == JOINED:
                own[target] = _joined([pieces[part] for part in range(JOINED)], axes, target)
        return own

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Names that are neither parameters of this layout nor known to stand beside them."""
        names = list(names)
        towered = self._has_tower(names)
        of_the_picture = [n for n in names if self._in_tower(n, towered) is not None]
        strange = (n for n in of_the_picture if not self._applied(n, towered))
        return [n for n in strange if not re.fullmatch(self.beside, unwrapped(n))]

    def own_names(self, name: str) -> list[str]:
        """What one name is called here; a table that holds two kinds of rows has two names."""
        return [target for _, target in self._applied(name, self._has_tower((name,)))]

    def _has_tower(self, names: Iterable[str]) -> bool:
        return bool(self.tower) and any(unwrapped(n).startswith(self.tower) for n in names)

    def _in_tower(self, name: str, towered: bool) -> str | None:
        """The name without wrappers; None where it is of the text's tower."""
        bare = unwrapped(name)
        if towered and not bare.startswith(self.tower):
            return None
        return bare.removeprefix(self.tower)

    def _applied(self, name: str, towered: bool) -> list[tuple[Rule, str]]:
        """The rules that are about a name, each with the own name that it gives."""
        bare = self._in_tower(name, towered)
        if bare is None:
            return []
        given = ((rule, rule.own_name(bare)) for rule in self.rules)
        return [(rule, target) for rule, target in given if target is not None]


def _taken(rule: Rule, name: str, tensor: Tensor) -> Tensor:
    try:
        return rule.take(tensor)
    except (IndexError, RuntimeError) as error:  # of a shape that has no such rows or axes
        raise UserError(
            f"{shown(name)} has the shape {tuple(tensor.shape)}: expected one that holds "
            f"{rule.own!r}. Give the parameters of a whole Vision Transformer."
        ) from error


def _joined(parts: Sequence[Tensor], axes: int, target: str) -> Tensor:
    """Query, key and value as one parameter."""
    if len({(part.shape, part.dtype) for part in parts}) > 1 or parts[0].ndim <= axes:
        shapes = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in parts)
        raise UserError(
            f"The query, key and value of {target!r} have the shapes {shapes}: expected three of "
            "one shape and type. Give the parameters of a whole Vision Transformer."
        )
    return torch.cat(list(parts), dim=axes)
