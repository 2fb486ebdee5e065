"""Reasons why the equations do not apply to a model or its uploads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attacks.equations.names import PATCH, TABLE
from attacks.equations.weight_difference import holds_no_gradient
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Refusal
from mjp_privacy.models import MJPVisionTransformer


def check_uploads(attack: str, uploads: int) -> None:
    """Raise UserError unless an attack's option `uploads` is at least 1."""
    if uploads < 1:
        raise UserError(f"{attack}, uploads: expected at least 1, got {uploads}.")


def lacks_positions(model: MJPVisionTransformer) -> Refusal | None:
    """Why there is no gradient of the position table, or None."""
    if model.pos_embed is not None:
        return None
    return Refusal(
        "positions", "the model has no position embeddings, so their gradient is not uploaded"
    )


def lacks_gradients(view: AttackerView, *names: str) -> Refusal | None:
    """Why the gradients of these parameters cannot be taken from the view's uploads, or None.

    lacks_gradients(view, "pos_embed", "patch_embed.proj.weight")
    """
    for update in view.updates:
        absent = [name for name in names if name not in update.grads]
        if absent:
            return no_gradient(view.model, *absent)
        refusal = holds_no_gradient(update)
        if refusal is not None:
            return refusal
    return None


def no_gradient(model: MJPVisionTransformer, *names: str) -> Refusal:
    """The refusal of uploads that lack the gradients of these parameters, with the reason where
    the model tells it: no_gradient(model, "pos_embed")."""
    text = f"the upload holds no gradient of {', '.join(names)}"
    if model.adapters is not None:
        text += ": the client sends low-rank adapters (LoRA), and its own weights are frozen"
    return Refusal("missing_gradient", text)


def needs_patch_system(model: MJPVisionTransformer) -> Sequence[str]:
    """Names of the two gradients that make the patch system G = A^T X."""
    return (TABLE, PATCH)


def lacks_patch_system(view: AttackerView) -> Refusal | None:
    """Why a view gives no patch system with enough equations for the patches, or None."""
    model = view.model
    refusal = lacks_positions(model) or lacks_gradients(view, TABLE, PATCH)
    return refusal or too_few_equations(model)


def too_few_equations(
    model: MJPVisionTransformer, *, extra: int = 0, who: str = "closed forms"
) -> Refusal | None:
    """The refusal of a model with more patches N, and `extra` unknowns, than its width D; or None.

    It states the inequality and the way out, in the same words wherever it is shown:
    too_few_equations(model) for a ViT-Ti/16 at 224: "N = 196 patches > D = 192: closed forms need
    patches <= width; up to 208 px they apply".
    """
    patches, width = model.patch_embed.num_patches, model.embed_dim
    if patches + extra <= width:
        return None
    more = f" + {extra}" if extra else ""
    grid = math.isqrt(max(width - extra, 0))
    way_out = f"up to {grid * model.patch_size} px they apply"
    if grid < 2:
        way_out = "no picture of more than one patch is small enough"
    return Refusal(
        "underdetermined",
        f"N{more} = {patches + extra} {'unknowns' if extra else 'patches'} > D = {width}: {who} "
        f"need patches{more} <= width; {way_out}",
    )


def unless_underdetermined(refusal: Refusal | None) -> Refusal | None:
    """The refusal, or None if it says that equations are too few: a prior makes up for those."""
    if refusal is not None and refusal.kind == "underdetermined":
        return None
    return refusal
