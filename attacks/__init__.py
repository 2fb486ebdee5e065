"""Attacks and controls, found by name.

To add one: write a file with a frozen dataclass that satisfies `mjp_privacy.interfaces.Attack`,
add its line below, and name it under `attacks:` in a config. Controls
(`mjp_privacy.interfaces.Control`) are named and run the same way; their cells say `floor` or
`ceiling` where an attack's say `attack`.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from inspect import get_annotations
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Registry, unknown_name
from mjp_privacy.interfaces import Attack, Control

ATTACKS: Registry[str] = Registry("attack")
ATTACKS.register("april", "attacks.april:April")
ATTACKS.register("april_unk_aware", "attacks.april:UnknownAwareApril")
ATTACKS.register("april_prior", "attacks.april_prior:AprilPrior")
ATTACKS.register("patch_gradient", "attacks.patch_gradient:PatchGradient")
ATTACKS.register("patch_prior", "attacks.patch_gradient:PatchPriorAttack")
ATTACKS.register("plain_step", "attacks.patch_gradient:PlainStep")
ATTACKS.register("mask_locator", "attacks.mask_locator:MaskLocator")
ATTACKS.register("masked_span", "attacks.masked_span:MaskedSpan")
ATTACKS.register("pixel_lattice", "attacks.pixel_lattice:PixelLattice")
ATTACKS.register("multi_round", "attacks.masked_span:MultiRound")
ATTACKS.register("token_span", "attacks.token_span:TokenSpan")
ATTACKS.register("inverting_gradients", "attacks.gradient_matching:InvertingGradients")
ATTACKS.register("april_optimization", "attacks.gradient_matching:AprilOptimization")


CONTROLS: Registry[str] = Registry("control")
CONTROLS.register("grey", "attacks.controls:Grey")
CONTROLS.register("mean_image", "attacks.controls:MeanImage")
CONTROLS.register("other_image", "attacks.controls:OtherImage")
CONTROLS.register("oracle_inverse", "attacks.controls:OracleInverse")


MEMBERS = ("name", "published", "victim", "uploads", "needs", "unsupported", "run")
CONTROL_MEMBERS = ("name", "role", "run")


def find_attack(name: str, options: dict[str, Any] | None = None) -> Attack | Control:
    """The attack or control of that name with these options; both are checked kindly."""
    if name not in ATTACKS and name not in CONTROLS:
        raise unknown_name("attack", name, [*ATTACKS, *CONTROLS])
    module, _, attribute = (CONTROLS if name in CONTROLS else ATTACKS)[name].partition(":")
    cls = getattr(import_module(module), attribute)
    found = _made(name, cls, options or {})
    members = CONTROL_MEMBERS if name in CONTROLS else MEMBERS
    if missing := [member for member in members if not hasattr(found, member)]:
        raise UserError(
            f"Attack {name}: {attribute} in {module} lacks {', '.join(missing)}. Expected "
            f"{', '.join(members)}, as `mjp_privacy.interfaces` describes them; what is no option "
            "is a ClassVar."
        )
    return found


def _made(name: str, cls: Any, options: dict[str, Any]) -> Attack | Control:
    """With known options; what the attack itself says of their values goes first."""
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    for option in options:
        if option not in fields:
            raise UserError(f"Attack {name}: {unknown_name('option', option, fields)}")
    try:
        made: Attack | Control = cls(**options)
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
            told = error.errors()[0]["msg"]
            raise UserError(f"Attack {name}, option {option}: {told}; got {value!r}.") from error


def _type_of(cls: Any, option: str) -> Any:
    """Of this field alone: others may name what is imported for type checkers only."""
    owned = (get_annotations(base) for base in cls.__mro__)
    owner, annotation = next(
        (base, found[option])
        for base, found in zip(cls.__mro__, owned, strict=True)
        if option in found
    )
    body = {"__module__": owner.__module__, "__annotations__": {option: annotation}}
    return get_type_hints(type(owner.__name__, (), body))[option]


__all__ = ["ATTACKS", "CONTROLS", "find_attack"]
