"""Attacks and controls, found by name.

To add one: write a file with a frozen dataclass that satisfies `mjp_privacy.interfaces.Attack`,
add its line below, and name it under `attacks:` in a config. Controls
(`mjp_privacy.interfaces.Control`) are named and run the same way; their cells say `floor` or
`ceiling` where an attack's say `attack`.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

from mjp_privacy.errors import UserError
from mjp_privacy.interfaces import Attack, Control
from mjp_privacy.registry import Registry, unknown_name

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
ATTACKS.register("inverting_gradients", "attacks.optimization:InvertingGradients")
ATTACKS.register("april_optimization", "attacks.optimization:AprilOptimization")


CONTROLS: Registry[str] = Registry("control")
CONTROLS.register("grey", "attacks.controls:Grey")
CONTROLS.register("mean_image", "attacks.controls:MeanImage")
CONTROLS.register("other_image", "attacks.controls:OtherImage")
CONTROLS.register("oracle_inverse", "attacks.controls:OracleInverse")


def find_attack(name: str, options: dict[str, Any] | None = None) -> Attack | Control:
    """The attack or control of that name with these options; both are checked kindly."""
    if name not in ATTACKS and name not in CONTROLS:
        raise unknown_name("attack", name, [*ATTACKS, *CONTROLS])
    module, _, attribute = (CONTROLS if name in CONTROLS else ATTACKS)[name].partition(":")
    cls = getattr(import_module(module), attribute)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    for option in options or {}:
        if option not in fields:
            raise UserError(f"Attack {name}: {unknown_name('option', option, fields)}")
    found: Attack | Control = cls(**(options or {}))
    return found


__all__ = ["ATTACKS", "CONTROLS", "find_attack"]
