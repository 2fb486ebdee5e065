"""A check of a reconstruction that needs neither truth nor labels nor the client's loss.

The gradient of the patch embedding is G = sum_i g_i x_i^T over the patches (`attacks/equations/
patch_system.py`). The rows g_i of visible patches are in the upload; those of masked ones are not,
so the best ones are taken:

    misfit = min over the masked g_i of || G - sum_i g_i x_i^T || / || G ||

Where no patch is masked and there are fewer patches than equations (N < D), G = A^T X has one
solution, and a relative error of G becomes at most cond(A) times that in X.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.equations.least_squares import condition_and_rank
from attacks.equations.names import PATCH, TABLE
from attacks.equations.patch_system import patch_system
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.models.jigsaw import to_patches

LITTLE = 0.05
"""Relative error of the patches up to which the equations tell the client's picture from others."""


@dataclass(frozen=True)
class PatchCheck:
    """How well m pictures meet the equations of the first upload's patch embedding."""

    misfits: Tensor  # (m,)
    certain: Tensor  # (m,) bool: they meet them, and only the client's picture does


def check_patches(view: AttackerView, images: Tensor) -> PatchCheck | None:
    """Check reconstructed images (m, C, H, W) in [0, 1]; None where the first upload holds no
    gradient of the position table or of the patch embedding, or is of a batch."""
    update = view.updates[0]
    if update.batch != 1 or not {TABLE, PATCH} <= update.grads.keys():
        return None
    system = patch_system(view, update)
    rows, total, masked = system.rows.cpu(), system.total.cpu(), system.hidden.cpu()
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
        for values in (view.pixels.mean, view.pixels.std)
    )
    patches = to_patches((images.double() - mean) / std, view.model.patch_size)
    misfits = torch.stack(
        [_left(*one) for one in zip(total - rows.mT @ patches, masked, patches, strict=True)]
    ) / total.flatten(1).norm(dim=1)
    facts = condition_and_rank(rows, update.dtype)
    patch_count, width = rows.shape[1:]
    unique = (facts["rank_a"] == patch_count) & (patch_count < width) & ~masked.any(1)
    return PatchCheck(misfits, unique & (misfits * facts["cond_a"] < LITTLE))


def _left(rest: Tensor, masked: Tensor, patches: Tensor) -> Tensor:
    """The norm of what the masked patches (rows of `patches` (N, p)) leave of `rest` (D, p)."""
    if bool(masked.any()) and bool(patches.isfinite().all()):
        span = torch.linalg.svd(patches[masked], full_matrices=False).Vh
        rest = rest - (rest @ span.mT) @ span
    return rest.norm()
