"""What a client does to its upload so that it tells less: plug-ins, applied in the order given.

In YAML `client: {defenses: [{dp_sgd: 0.5}, {top_k: 0.1}, int8]}`, also `{dp_sgd: {noise: 0.5,
clip: 1.0}}`. A client's config keeps each as one line of text (`dp_sgd 0.5 clip 2`), which is what
tables show and what the command line takes.

To add one: a frozen dataclass with `name`, `main` (the option that may stand alone, or None) and
`apply` (on the whole upload) or `step_gradient` (inside a step of training), and a line below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from mjp_privacy.client.defenses.compression import Float16, Int8, Sign, TopK
from mjp_privacy.client.defenses.disturbance import Disturbed, Draws
from mjp_privacy.client.defenses.noise import DpSgd, GaussianNoise
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Registry, unknown_name
from mjp_privacy.interfaces import Grads


@runtime_checkable
class UploadDefense(Protocol):
    """Changes what is uploaded, gradients or weight differences of all parameters."""

    name: ClassVar[str]
    main: ClassVar[str | None]

    def apply(self, sent: Grads, draws: Draws) -> Disturbed: ...


@runtime_checkable
class StepDefense(Protocol):
    """Changes the gradient of every step of training, which it makes from each example's own."""

    name: ClassVar[str]
    main: ClassVar[str | None]

    def step_gradient(self, examples: Grads, draws: Draws) -> dict[str, Tensor]:
        """(n, B, *shape) of every parameter -> (n, *shape)."""
        ...

    def deviation(self, batch: int) -> float:
        """Standard deviation of the noise on an entry of the step's gradient; public."""
        ...


Defense = UploadDefense | StepDefense

DEFENSES: Registry[type[Any]] = Registry("defense")
for _plugin in (GaussianNoise, DpSgd, TopK, Float16, Int8, Sign):
    DEFENSES.register(_plugin.name, _plugin)


def canonical(item: Any) -> str:
    """A defence as YAML gives it, a mapping or a line of text, as its one line of text."""
    if isinstance(item, str):
        return text_of(defense_of(item))
    if not isinstance(item, Mapping) or len(item) != 1:
        raise UserError(
            f"A defense is a name or one name with its value, as in {{dp_sgd: 0.5}}; got {item!r}. "
            f"Known: {', '.join(DEFENSES.names())}."
        )
    ((name, value),) = item.items()
    plugin = DEFENSES[str(name)]
    options = value if isinstance(value, Mapping) else {} if value is None else {"": value}
    return text_of(_made(plugin, options))


@lru_cache(maxsize=256)
def defense_of(text: str) -> Defense:
    """`dp_sgd 0.5 clip 2` -> the plug-in: a name, its main option, further ones by name."""
    name, *words = text.split()
    plugin = DEFENSES[name]
    options: dict[str, Any] = {}
    if len(words) % 2:
        options[""] = words.pop(0)
    options |= dict(zip(words[::2], words[1::2], strict=True))
    return _made(plugin, options)


def text_of(defense: Defense) -> str:
    """Its main option always, the others where they are not at their default."""
    words = [defense.name]
    for option in dataclasses.fields(defense):  # type: ignore[arg-type]
        value = getattr(defense, option.name)
        if option.name == defense.main:
            words.insert(1, f"{value:.12g}")
        elif value != option.default:
            words += [option.name, f"{value:.12g}"]
    return " ".join(words)


def check_order(texts: Sequence[str], where: str) -> None:
    """Per-example clipping is a part of training, so it comes before anything on the upload."""
    for place, text in enumerate(texts):
        if place and isinstance(defense_of(text), StepDefense):
            raise UserError(
                f"{where}.defenses: expected {text.split()[0]} first and once, got it at place "
                f"{place + 1}: it clips each example's gradient, which is gone in an upload. Move "
                "it to the front."
            )


def _made(plugin: Any, options: Mapping[str, Any]) -> Defense:
    known = [option.name for option in dataclasses.fields(plugin)]
    found: dict[str, float] = {}
    for given, value in options.items():
        option = given or plugin.main
        if option not in known:
            if not given:
                raise UserError(f"Defense {plugin.name} has no value; got {value!r}. Leave it out.")
            raise UserError(f"Defense {plugin.name}: {unknown_name('option', option, known)}")
        found[option] = _number(f"{plugin.name}.{option}", value)
    if plugin.main and plugin.main not in found:
        raise UserError(
            f"Defense {plugin.name}: expected its {plugin.main}, got none. Write "
            f"{{{plugin.name}: {{{plugin.main}: 0.1}}}} or {{{plugin.name}: 0.1}}."
        )
    made: Defense = plugin(**found)
    return made


def _number(where: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"Defense {where}: expected a number, got {value!r}. Give one.")
    return number
