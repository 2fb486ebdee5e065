"""What a client may do about its position embeddings: fix the table, or add noise to its gradient.

A client may also withhold that gradient; `FedSGDClient` does so.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import ClientUpdate
from mjp_privacy.models import LoadedModel

TABLE = "pos_embed"


def with_sinusoidal_positions(model: LoadedModel) -> LoadedModel:
    """A copy of the model with sines and cosines of row and column as its position table.

    The class token's row is zero.
    """
    if model.position_embedding != "learned":
        raise UserError(
            "client.positions: sinusoidal replaces a learned position table, but this model's is "
            f"{model.position_embedding}. Set positions: own, or use another model."
        )
    altered = copy.deepcopy(model)
    patches = sinusoidal_table(model.grid, model.embed_dim)
    with torch.no_grad():
        altered.table.zero_()
        altered.table[0, 1:] = patches.to(altered.table)
    return altered


def sinusoidal_table(grid: int, width: int) -> Tensor:
    """(N, D) float64: sin and cos of row and of column, D/4 frequencies each, from 1 to 1e-4."""
    if width % 4:
        raise UserError(
            "client.positions: sinusoidal needs an embedding width divisible by 4, got "
            f"{width}: sine and cosine of row and column take a quarter each. Set positions: own."
        )
    frequencies = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    index = torch.arange(grid * grid)
    angles = [place[:, None] * frequencies for place in (index // grid, index % grid)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=-1)


def noisy(
    update: ClientUpdate, relative: float, image_ids: Sequence[str], *, seed: int
) -> ClientUpdate:
    """The update with Gaussian noise on every row of its gradient of the position table.

    The noise of a step has `relative` times the root mean square of the gradient's nonzero
    entries; it is drawn for (seed, the step's first image, round).
    """
    if not relative or TABLE not in update.grads:
        return update
    gradient = update.grads[TABLE]
    nonzero = (gradient != 0).flatten(1).sum(-1).clamp(min=1)
    scale = relative * (gradient.square().flatten(1).sum(-1) / nonzero).sqrt()
    noise = torch.stack(
        [
            torch.randn(
                gradient.shape[1:],
                generator=torch_generator("position noise", seed, first, update.round),
                dtype=torch.float64,
            )
            for first in image_ids[:: update.batch]
        ]
    )
    shaped = scale.view(-1, *[1] * (gradient.ndim - 1))
    sent = {**update.grads, TABLE: gradient + shaped * noise.to(gradient)}
    return replace(update, grads=sent, position_noise=relative)
