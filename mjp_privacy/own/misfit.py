"""A check of a reconstruction that needs neither truth nor labels nor the client's loss.

The gradient of the patch embedding is G = sum_i g_i x_i^T over the patches (`attacks/equations/
patch_system.py`). The rows g_i of visible patches are in the upload; those of masked ones are not,
so the best ones are taken:

    misfit = min over the masked g_i of || G - sum_i g_i x_i^T || / || G ||
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.equations.names import PATCH, TABLE
from attacks.equations.patch_system import patch_system
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.models.jigsaw import to_patches


def patch_misfit(view: AttackerView, images: Tensor) -> Tensor | None:
    """(m,) of reconstructed images (m, C, H, W) in [0, 1], by the first upload; None where it holds
    no gradient of the position table or of the patch embedding, or the batch is larger than one."""
    update = view.updates[0]
    if update.batch != 1 or not {TABLE, PATCH} <= update.grads.keys():
        return None
    system = patch_system(view, update)
    mean = torch.tensor(view.pixels.mean, dtype=torch.float64).view(-1, 1, 1)
    std = torch.tensor(view.pixels.std, dtype=torch.float64).view(-1, 1, 1)
    patches = to_patches((images.double() - mean) / std, view.model.patch_size)
    rest = system.total.cpu() - system.rows.cpu().mT @ patches
    shares = []
    for left, hidden, own in zip(rest, system.hidden.cpu(), patches, strict=True):
        if bool(hidden.any()) and bool(own.isfinite().all()):
            span = torch.linalg.svd(own[hidden], full_matrices=False).Vh
            left = left - (left @ span.mT) @ span
        shares.append(left.norm())
    return torch.stack(shares) / system.total.cpu().flatten(1).norm(dim=1)
