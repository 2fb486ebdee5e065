r"""The span of a batch's differences from all uploads of the same batch, and what lies off it.

Each upload r of B pictures gives H_r = (I - Q_r Q_r^T) G_r, whose rows lie in the span S of the
pictures' differences (`equations.batch_span`). S is the same whatever the weights, while an upload
leaves D - N - 1 rows, as the gradients of LayerNorms' inputs are orthogonal to ones: so R uploads
show it where R (D - N - 1) >= N (B - 1), also where one does not. The patches off S, which are the
same too, are averaged by how exact they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.equations.batch_span import rounding_of
from attacks.equations.least_squares import minimum_norm_solve
from attacks.equations.patch_system import PatchSystem
from attacks.equations.span import Knowledge
from attacks.equations.superposition import SHOWN
from mjp_privacy.interfaces import Refusal
from mjp_privacy.models import MJPVisionTransformer


def differences(systems: Sequence[PatchSystem], batch: int, precision: float) -> Knowledge:
    """S and what lies off it, for uploads of one step of `batch` pictures each.

    precision  eps of the numbers that were sent
    """
    places = systems[0].rows.shape[1]
    left, solved, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    for system in systems:
        rows, total = system.rows[0], system.total[0]
        q = torch.linalg.qr(rows.mT).Q
        noise = rounding_of(total, precision)
        left.append((total - q @ (q.mT @ total)) / noise)
        identity = torch.eye(len(total)).to(total)
        operator = minimum_norm_solve(rows[None], identity[None])[0][0]
        solved.append(operator @ total)
        weights.append((noise * operator.norm(dim=1, keepdim=True)).square().reciprocal())
    _, s, vh = torch.linalg.svd(torch.cat(left), full_matrices=False)
    count = min(places * (batch - 1), len(s))
    floor = max(float(s[count]) if count < len(s) else 0.0, 1.0)
    basis = vh[:count][s[:count] > SHOWN * floor]
    pairs = zip(solved, weights, strict=True)
    known = torch.stack([patches * weight for patches, weight in pairs]).sum(0)
    known = known / torch.stack(weights).sum(0)
    return Knowledge(known - (known @ basis.mT) @ basis, basis, systems[0].hidden[0])


def too_few_uploads(
    model: MJPVisionTransformer, batch: int, uploads: int, most: int
) -> Refusal | None:
    """Why uploads of so many pictures do not show a lattice of at most `most` steps, or None.

    too_few_uploads(model, 8, 1, 80) for a ViT-Ti/16 at 64 px: "N (B - 1) = 112 differences > 80".
    """
    patches, width = model.patch_embed.num_patches, model.embed_dim
    length = model.patch_embed.proj.weight[0].numel()
    steps, shown = patches * (batch - 1), uploads * (width - patches - 1)
    limit = min(most, length - 1)
    if steps > limit:
        largest = 1 + limit // patches
        way_out = f"batches of at most {largest} do" if largest > 1 else "no batch is small enough"
        what = f"> {most}, the largest lattice that is reduced"
        if limit < most:
            what = f">= p = {length} pixels of a patch"
        text = f"N (B - 1) = {steps} differences {what}; {way_out}"
    elif steps > shown:
        enough = -(-steps // max(width - patches - 1, 1))
        text = (
            f"N (B - 1) = {steps} differences > R (D - N - 1) = "
            f"{uploads} * {width - patches - 1} "
            f"equations of {uploads} uploads; {enough} uploads of the same batch do"
        )
    else:
        return None
    return Refusal("underdetermined", text)
