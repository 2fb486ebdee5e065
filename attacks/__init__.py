"""Attacks and controls, found by name.

To add one: write a file with a frozen dataclass that satisfies `mjp_privacy.interfaces.Attack`,
add its line below, and name it under `attacks:` in a config. Controls
(`mjp_privacy.interfaces.Control`) are named and run the same way; their cells say `floor` or
`ceiling` where an attack's say `attack`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from inspect import get_annotations
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry, Registry, unknown_name
from mjp_privacy.interfaces import Attack, Control

__all__ = ["ATTACKS", "CONTROLS", "find_attack"]

ATTACKS: Registry[Entry] = Registry("attack")
CONTROLS: Registry[Entry] = Registry("control")


def _attack(name: str, where: str, summary: str, preset: Mapping[str, Any] | None = None) -> None:
    ATTACKS.register(name, Entry(f"attacks.{where}", summary, preset or {}))


def _control(name: str, where: str, summary: str) -> None:
    CONTROLS.register(name, Entry(f"attacks.{where}", summary))


_attack("april", "april:April", "the published closed form, on a client with an altered block 0")
_attack("april_unk_aware", "april:UnknownAwareApril", "the same, knowing MJP's unknown embedding")
_attack("april_prior", "april_prior:AprilPrior", "the same equations with a picture prior")
_attack("patch_gradient", "patch_gradient:PatchGradient", "two gradients of the model as it is")
_attack("patch_prior", "patch_gradient:PatchPriorAttack", "the same with a prior, for noise")
_attack("plain_step", "patch_gradient:PlainStep", "waits for a step that MJP left unshuffled")
_attack("mask_locator", "mask_locator:MaskLocator", "names the masked positions, makes no picture")
_attack("masked_span", "masked_span:MaskedSpan", "knows MJP: the masked patches' span, and a prior")
_attack("pixel_lattice", "pixel_lattice:PixelLattice", "the same where pixels are 8-bit: a lattice")
_attack(
    "multi_round",
    "masked_span:MaskedSpan",
    "several uploads of the same pixels: their spans intersect",
    {"name": "multi_round", "uploads": 6},
)
_attack("token_span", "token_span:TokenSpan", "needs no gradient of the position embeddings")
_attack(
    "inverting_gradients",
    "gradient_matching:GradientMatching",
    "gradient matching as breaching runs it",
)
_attack(
    "april_optimization",
    "gradient_matching:GradientMatching",
    "the same with a term for the position embeddings",
    {"name": "april_optimization", "positions": 1.0},
)

_control("grey", "controls:Grey", "floor: every pixel 0.5")
_control("mean_image", "controls:MeanImage", "floor: the mean colour of photographs")
_control("other_image", "controls:OtherImage", "floor: another photograph")
_control("oracle_inverse", "controls:OracleInverse", "ceiling: the true embeddings, inverted")

MEMBERS = ("name", "published", "victim", "uploads", "needs", "unsupported", "run")
CONTROL_MEMBERS = ("name", "role", "run")


def find_attack(name: str, options: dict[str, Any] | None = None) -> Attack | Control:
    """The attack or control of that name with these options; both are checked.

    find_attack("multi_round", {"uploads": 3})
    """
    if name not in ATTACKS and name not in CONTROLS:
        raise unknown_name("attack", name, [*ATTACKS, *CONTROLS])
    entry = (CONTROLS if name in CONTROLS else ATTACKS)[name]
    made = _made(name, entry.load(), entry.preset, options or {})
    members = CONTROL_MEMBERS if name in CONTROLS else MEMBERS
    if missing := [member for member in members if not hasattr(made, member)]:
        raise UserError(
            f"Attack {name}: {entry.where} lacks {', '.join(missing)}. Expected "
            f"{', '.join(members)}, as `mjp_privacy.interfaces` describes them; what is no option "
            "is a ClassVar."
        )
    return made


def _made(
    name: str, cls: Any, preset: Mapping[str, Any], options: dict[str, Any]
) -> Attack | Control:
    """With known options; what the attack itself says of their values goes first."""
    fields = [f.name for f in dataclasses.fields(cls) if f.init and f.name != "name"]
    for option in options:
        if option not in fields:
            raise UserError(f"Attack {name}: {unknown_name('option', option, fields)}")
    try:
        made: Attack | Control = cls(**{**preset, **options})
    except (TypeError, ValueError):
        _check_types(name, cls, options)
        raise
    _check_types(name, cls, options)
    return made


def _check_types(name: str, cls: Any, options: dict[str, Any]) -> None:
    for option, value in options.items():
        try:
            TypeAdapter(_type_of(cls, option)).validate_python(value)
        except ValidationError as error:
            mistake = error.errors()[0]["msg"]
            raise UserError(f"Attack {name}, option {option}: {mistake}; got {value!r}.") from error


def _type_of(cls: Any, option: str) -> Any:
    """Of this field alone: others may name what is imported for type checkers only."""
    owned = (get_annotations(base) for base in cls.__mro__)
    owner, annotation = next(
        (base, annotations[option])
        for base, annotations in zip(cls.__mro__, owned, strict=True)
        if option in annotations
    )
    body = {"__module__": owner.__module__, "__annotations__": {option: annotation}}
    return get_type_hints(type(owner.__name__, (), body))[option]
