"""How badly two patches fit side by side, for every ordered pair.

With l the last and l' the last but one column of the left patch, and r, r' the first and second of
the right one (P pixels of C channels each), there are two measures:

    difference  d(l, r) = sum |r - l|^2
    mgc         Mahalanobis gradient compatibility (Gallagher, CVPR 2012): the step r - l against
                the mean and covariance over the P rows of the left patch's own last step l - l',
                plus the same from the right patch; here its square root, which is more robust.

Each is divided by the cost of the third best patch for the same place, so that a flat patch, which
fits everywhere, does not outweigh a textured one. On exact pixels MGC puts back more pieces; under
noise the two do equally well.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mjp_privacy.core.registry import unknown_name

Cost = Literal["mgc", "difference"]
RIVAL = 3  # the rank of the fit that sets the scale
LEVEL = 1 / 255  # one grey level
SMALLEST = 0.02  # share of the median scale added, for patches with several perfect fits


def border_costs(patches: Tensor, patch_size: int, cost: Cost = "mgc") -> tuple[Tensor, Tensor]:
    """Costs of every pair (a, b) of patches, (N, N) each: a left of b, and a above b.

    patches (N, C*P*P) in [0, 1].
    """
    if cost not in get_args(Cost):
        raise unknown_name("border cost", cost, list(get_args(Cost)))
    tiles = patches.double().unflatten(-1, (-1, patch_size, patch_size))
    sideways = tiles.permute(0, 2, 3, 1)  # (N, row, column, channel)
    return _costs(sideways, cost), _costs(sideways.transpose(1, 2), cost)


def _costs(tiles: Tensor, cost: Cost) -> Tensor:
    """The cost of a left of b for tiles (N, P rows, P columns, C) -> (N, N)."""
    step = tiles[None, :, :, 0] - tiles[:, None, :, -1]  # (a, b, P, C)
    if cost == "difference":
        return _scaled(step.square().sum((-1, -2)))
    # With one column there is no inner step: it counts as zero, and only the dummies matter.
    inner = min(2, tiles.shape[2])
    left = _mahalanobis(tiles[:, :, -1] - tiles[:, :, -inner], step)
    right = _mahalanobis(tiles[:, :, 0] - tiles[:, :, inner - 1], -step.transpose(0, 1))
    return _scaled((left + right.T).sqrt())


def _mahalanobis(inner: Tensor, step: Tensor) -> Tensor:
    """Squared Mahalanobis length of steps (a, b, P, C) given inner steps (a, P, C) -> (a, b)."""
    channels = inner.shape[-1]
    unit = torch.eye(channels).to(inner)
    grey = torch.ones(1, channels).to(inner)
    # Gallagher's dummy gradients of one grey level keep the covariance regular on flat patches.
    dummies = LEVEL * torch.cat((0 * grey, grey, -grey, unit, -unit))
    samples = torch.cat((inner, dummies.expand(len(inner), -1, -1)), dim=1)
    centred = samples - samples.mean(1, keepdim=True)
    covariance = centred.mT @ centred / (samples.shape[1] - 1)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance))
    distance = torch.einsum("aij,abpj->abpi", whiten, step - inner.mean(1)[:, None, None])
    return distance.square().sum((-1, -2))


def _scaled(cost: Tensor) -> Tensor:
    """The costs divided by the third best of their row or of their column, whichever is smaller."""
    rank = min(RIVAL, len(cost))
    rivals = cost + torch.diag(torch.full_like(cost[0], torch.inf))
    rows, columns = rivals.kthvalue(rank, 1).values, rivals.kthvalue(rank, 0).values
    scale = torch.minimum(rows[:, None], columns[None])
    scale = torch.where(scale.isfinite(), scale, 1.0)  # fewer patches than rivals
    return cost / (SMALLEST * scale.median() + LEVEL**2 + scale)
