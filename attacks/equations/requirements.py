"""What the patch system needs of an upload."""

from __future__ import annotations

from collections.abc import Sequence

from attacks.equations.system import (
    PATCH,
    TABLE,
    missing,
)
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.models import MJPVisionTransformer


def needs_patch_system(model: MJPVisionTransformer) -> Sequence[str]:
    return (TABLE, PATCH)


def lacks_patch_system(view: AttackerView) -> str | None:
    """Why a view has no patch system that determines the patches, or None."""
    model = view.model
    if model.pos_embed is None:
        return "the model has no position embeddings, so their gradient is not uploaded"
    reason = missing(view, TABLE, PATCH)
    patches, width = model.patch_embed.num_patches, model.embed_dim
    if reason is None and patches > width:
        return f"underdetermined: {patches} patches, {width} equations (N <= D is needed)"
    return reason
