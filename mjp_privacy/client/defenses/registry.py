"""The defences by name, and how they are written in configs, in tables and on the command line.

In YAML: `client: {defenses: [{dp_sgd: 0.5}, {top_k: 0.1}, int8]}`, or with every option named,
`{dp_sgd: {noise: 0.5, clip: 1.0}}`. They are applied in this order. A client's config keeps each
as one line of text (`dp_sgd 0.5 clip 2`), which tables show and the command line takes.

To add one, write a frozen dataclass with `name`, `main` (the option whose value may stand alone,
or None) and `apply` (on the whole upload) or `step_gradient` and `deviation` (inside a step of
training) in a file of this folder, and register it below. The first line of its docstring is what
`mjp list defenses` shows. `tests/contract` then holds it to what it declares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry, Registry
from mjp_privacy.core.text import shown

if TYPE_CHECKING:
    from torch import Tensor

    from mjp_privacy.client.defenses.disturbance import Disturbed, Draws
    from mjp_privacy.interfaces import Grads


@runtime_checkable
class UploadDefense(Protocol):
    """Changes what is uploaded: gradients or weight differences of all parameters."""

    name: ClassVar[str]
    main: ClassVar[str | None]

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        """(n, *shape) of every parameter -> the altered upload and the size of its error."""
        ...


@runtime_checkable
class StepDefense(Protocol):
    """Makes the gradient of every step of training from the gradients of its examples."""

    name: ClassVar[str]
    main: ClassVar[str | None]

    def step_gradient(self, examples: Grads, draws: Draws) -> dict[str, Tensor]:
        """(n, B, *shape) of every parameter -> (n, *shape)."""
        ...

    def deviation(self, batch: int) -> float:
        """Standard deviation of the noise on an entry of the step's gradient; public."""
        ...


Defense = UploadDefense | StepDefense

DEFENSES: Registry[Entry] = Registry("defense")


def _defense(name: str, where: str) -> None:
    DEFENSES.register(name, Entry(f"mjp_privacy.client.defenses.{where}"))


_defense("gaussian_noise", "published:GaussianNoise")
_defense("dp_sgd", "published:DpSgd")
_defense("top_k", "published:TopK")
_defense("prune", "published:Prune")
_defense("float16", "published:Float16")
_defense("int8", "published:Int8")
_defense("sign", "published:Sign")
_defense("percentile_privacy", "published:PercentilePrivacy")

MOST = 1e9
"""An option's size; no noise, share or clipping norm comes near it."""

MEMBERS = ("name", "main", "apply")
STEP_MEMBERS = ("name", "main", "step_gradient", "deviation")


def defense_class(name: str) -> type[Any]:
    """The class of the defence called `name`; UserError where it is no defence as described above.

    defense_class("int8").__module__ is "mjp_privacy.client.defenses.published".
    """
    entry = DEFENSES[name]
    plugin: type[Any] = entry.load()
    wanted = STEP_MEMBERS if hasattr(plugin, "step_gradient") else MEMBERS
    missing = [member for member in wanted if not hasattr(plugin, member)]
    calls = getattr(plugin, "name", None)
    if missing or calls != name or not dataclasses.is_dataclass(plugin):
        raise UserError(
            f"Defense {name}: expected a frozen dataclass of this `name` with {', '.join(wanted)}, "
            f"got {entry.where}, which calls itself {calls!r} and lacks "
            f"{', '.join(missing) or 'none of them'}. Declare what is no option as a ClassVar."
        )
    return plugin


def canonical(item: Any) -> str:
    """A defence's one line of text: canonical({"dp_sgd": {"noise": 0.5}}) is "dp_sgd 0.5".

    item: a mapping with one name, as YAML gives it, or a line of text.
    """
    if isinstance(item, str):
        return text_of(defense_of(item))
    if not isinstance(item, Mapping) or len(item) != 1:
        raise UserError(
            f"A defense is a name or one name with its value, as in {{dp_sgd: 0.5}}; got {item!r}. "
            f"Known: {', '.join(list(DEFENSES))}."
        )
    ((name, value),) = item.items()
    plugin = defense_class(str(name))
    options = value if isinstance(value, Mapping) else {} if value is None else {"": value}
    return text_of(_configured(plugin, options))


@lru_cache(maxsize=256)
def defense_of(text: str) -> Defense:
    """The defence that a line of text stands for: a name, its main option, others by name.

    defense_of("dp_sgd 0.5 clip 2") is DpSgd(noise=0.5, clip=2.0).
    """
    name, *words = text.split() or [""]
    plugin = defense_class(name)
    options: dict[str, Any] = {}
    if len(words) % 2:
        options[""] = _word(words.pop(0))
    options |= {option: _word(word) for option, word in zip(words[::2], words[1::2], strict=True)}
    return _configured(plugin, options)


def _word(word: str) -> float | str:
    """The number that a word of a line stands for, or the word itself if it is none."""
    try:
        return float(word)
    except ValueError:
        return word


def text_of(defense: Defense) -> str:
    """A defence's one line of text: text_of(DpSgd(noise=0.5, clip=2.0)) is "dp_sgd 0.5 clip 2".

    It has the main option always, other options only where they differ from their default.
    """
    words = [defense.name]
    for option in dataclasses.fields(defense):  # type: ignore[arg-type]
        value = getattr(defense, option.name)
        if option.name == defense.main:
            words.insert(1, f"{value:.12g}")
        elif value != option.default:
            words += [option.name, f"{value:.12g}"]
    return " ".join(words)


def check_order(texts: Sequence[str], where: str) -> None:
    """Raise UserError unless per-example clipping, which is part of training, comes first."""
    for place, text in enumerate(texts):
        if place and isinstance(defense_of(text), StepDefense):
            raise UserError(
                f"{where}.defenses: expected {text.split()[0]} first and once, got it at place "
                f"{place + 1}: it clips the gradient of each example, and an upload no longer "
                "holds those. Move it to the front."
            )


def _configured(plugin: Any, options: Mapping[str, Any]) -> Defense:
    """The plug-in with its options; the name "" stands for the main one."""
    values: dict[str, float] = {}
    for name, value in options.items():
        option = name or plugin.main
        if option is None:
            raise UserError(f"Defense {plugin.name}: expected no value, got {value!r}.")
        if type(value) not in (int, float) or not abs(value) <= MOST:
            got = shown(repr(value), 60)
            raise UserError(f"Defense {plugin.name}.{option}: expected a number, got {got}.")
        values[option] = float(value)
    try:
        defense: Defense = plugin(**values)
    except (UserError, TypeError) as error:  # which names the option, also a missing one
        raise UserError(f"Defense {plugin.name}: {error}") from error
    return defense
