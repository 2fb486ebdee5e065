"""When uploads of batches tell the pictures that they share, and the largest batch that does."""

from __future__ import annotations

from attacks.equations.names import PATCH, TABLE
from attacks.equations.patch_system import located
from attacks.equations.requirements import (
    lacks_gradients,
    lacks_positions,
    too_few_equations,
)
from mjp_privacy.interfaces import AttackerView, Refusal


def lacks_shared_pictures(view: AttackerView) -> Refusal | None:
    """Why the view's uploads cannot tell the pictures that they share, or None.

    A batch of 12 on a ViT-Ti/16 at 64 px: "N B = 16 * 12 = 192 patches >= D = 192: ...".
    """
    refusal = lacks_positions(view.model) or lacks_gradients(view, TABLE, PATCH)
    refusal = refusal or too_few_equations(view.model)
    first = view.updates[0]
    if refusal is not None or first.batch == 1:
        return refusal
    if first.partners == "fixed":
        return Refusal(
            "batch",
            f"every upload of a step holds the same batch of {first.batch} pictures, which leaves "
            "the differences between them open however many are seen; it needs batches that are "
            "drawn anew (client.partners: fresh)",
        )
    uploads = len(view.updates) if len(view.updates) > 1 else first.steps_in_all
    if uploads < 2:
        return Refusal("uploads", "it looks for pictures that uploads share, and one was given")
    return _too_large(view, uploads)


def _too_large(view: AttackerView, uploads: int) -> Refusal | None:
    """The refusal of a batch that is too large for so many uploads, or None."""
    model, batch = view.model, view.updates[0].batch
    patches, width = model.patch_embed.num_patches, model.embed_dim
    length = model.patch_embed.proj.weight[0].numel()
    masked = _always_masked(view)
    open_directions = patches * (batch - 1) + masked
    # A patch's gradient is orthogonal to ones, whose part LayerNorm takes out: D - 1 are free.
    largest = min(
        (width - 1) // patches,
        1 + (length * (uploads - 1) - 1 - masked * uploads) // (uploads * patches),
    )
    way_out = f"up to a batch of {largest} they do" if largest > 1 else "no batch is small enough"
    if patches * batch >= width:
        return Refusal(
            "underdetermined",
            f"N B = {patches} * {batch} = {patches * batch} patches >= D = {width}: the gradients "
            f"of a batch's patches are told apart only below the width; {way_out}",
        )
    if uploads * (length - open_directions) > length:
        return None
    hidden = f" + {masked} masked" if masked else ""
    return Refusal(
        "underdetermined",
        f"{uploads} uploads leave {uploads} * (p - N (B - 1){' - k' if masked else ''}) = "
        f"{uploads} * ({length} - {patches} * {batch - 1}{hidden.replace(' +', ' -')}) = "
        f"{uploads * (length - open_directions)} equations <= p = {length} unknowns of a patch: "
        f"they fit any picture; {way_out}, or give more uploads",
    )


def _always_masked(view: AttackerView) -> int:
    """The most positions that are masked in all pictures of an upload; 0 in an outline."""
    if any(update.grads[TABLE].is_meta for update in view.updates):
        return 0
    return max(int(located(view, update).sum(-1).max()) for update in view.updates)
