r"""What is known of the rounding in a client that computes under autocast.

The tokens and the position table are float32, and products of matrices are taken in half precision.
So dL/dz_i passes, on its way back to the patch embedding, through a rounding h to half precision,
and the patches are rounded on their way in:

    row i of pos_embed.grad = g_i in float32,
    patch_embed.proj.weight.grad = h(sum_i h(g_i) h(x_i)^T).

Of one picture and one step the rows h(g_i) are therefore known exactly: they are the sent rows,
rounded. What is left is the last rounding of the sum, whose size shows in the sum itself, and h(x):
the patches that are found are rounded ones, 60 dB or more from those that were fed, and for pixels
of 8 bits still nearer to them than to any other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.equations.names import TABLE
from mjp_privacy.client.gradients import TABLES
from mjp_privacy.client.optimizers import shares_of_steps
from mjp_privacy.client.traces import HALF, rounded, spacing
from mjp_privacy.interfaces import ClientUpdate


def multiplied_rows(update: ClientUpdate, rows: Tensor) -> Tensor:
    """The rows (n, N, D) of dL/dz as the client multiplied them with its patches."""
    return rounded(rows, HALF[update.autocast]) if shows_its_rows(update) else rows


def computing_as(update: ClientUpdate, device: torch.device) -> torch.autocast:
    """A `with` block that rounds what the attacker computes as the client rounded it."""
    enabled = update.autocast != "none"
    half = HALF.get(update.autocast, torch.bfloat16)
    return torch.autocast(device.type, half, enabled=enabled)


def shows_its_rows(update: ClientUpdate) -> bool:
    """Whether rounding the uploaded rows gives those that the client multiplied with its patches:
    in one step of one picture by SGD, where no defence or clipping changed the rows since."""
    changed = TABLE in update.noise or TABLE in update.rounding or update.position_noise
    one = update.batch == 1 and update.steps == 1 and update.optimizer == "sgd"
    return update.autocast != "none" and one and not changed and not update.clipped


def autocast_error(update: ClientUpdate, name: str, gradient: Tensor) -> Tensor:
    """(n,) standard deviation of the error that autocast leaves on an entry of a gradient
    (n, *shape) where it stands in an equation, float64.

    It is that of the last rounding, with which each step's gradient of a linear layer ends; tables
    and norms are not rounded, but the rows of dL/dz are before they are multiplied.
    """
    exact = name in TABLES or "norm" in name.rpartition(".")[0]
    if name == TABLE:
        exact = shows_its_rows(update)
    if update.autocast == "none" or exact:
        return torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
    shares = shares_of_steps(update.steps, update.momentum)
    steps = math.sqrt(sum(share**2 for share in shares)) / sum(shares)
    return steps * rounding_error(gradient, HALF[update.autocast])


def rounding_error(values: Tensor, dtype: torch.dtype, least: float = 0.0) -> Tensor:
    """(n,) standard deviation of the rounding of values (n, *shape) to a precision, float64.

    The error of each value is uniform over the distance to the next number; `least` as in
    `spacing`.
    """
    return (spacing(values, dtype, least).flatten(1).square().mean(1) / 12).sqrt()
