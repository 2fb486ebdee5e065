"""The patch equation, by which a network's parts are told:

    dL/dW = sum_i g_i x_i^T

W (D, p) the patch embedding's weight, x_i (p,) the flattened patches of a picture, g_i (D,) the
rows of a table's gradient that belong to the patches. It holds where the table is added to the
embedded patches, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models.vit import START_STD

HOLDS = 1e-3
"""Relative error of the patch equation up to which a network's parts are what they seem."""


def gradients_of(
    network: nn.Module,
    x: Tensor,
    wanted: Sequence[Tensor],
    answer: Callable[[Any], Tensor] = lambda output: output,
    options: dict[str, bool] | None = None,
) -> list[Tensor | None]:
    """The gradients of some of a network's parameters for what it says of pictures x; None of one
    that has no part in it. Matrices of zeros, as a fresh classifier's, would pass nothing back, and
    are drawn for this.

    answer  what is wanted of that which the network returns
    """
    generator = torch_generator("matrices of zeros for the patch equation")
    used: dict[str, Tensor] = {}
    asked: dict[int, Tensor] = {}
    for name, parameter in network.named_parameters():
        is_wanted = any(parameter is one for one in wanted)
        if parameter.ndim > 1 and not bool(parameter.any()):
            drawn = torch.randn(parameter.shape, generator=generator)
            used[name] = drawn.to(parameter) * START_STD
        elif is_wanted:
            used[name] = parameter.detach()
        if is_wanted:
            used[name].requires_grad_()
            asked[id(parameter)] = used[name]
    with torch.enable_grad():
        output = functional_call(network, used, (x,), options)
        loss = answer(output).square().sum()
        inputs = [asked[id(one)] for one in wanted]
        return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def misfit(rows: Tensor, patches: Tensor, total: Tensor) -> float:
    """The relative error of the equation for rows g (N, D), patches x (N, p) and dL/dW (D, p)."""
    return float((rows.mT @ patches - total).norm() / total.norm())


def first_row(table: Tensor, patches: Tensor, total: Tensor) -> int | None:
    """From which row on a table's gradient (R, D) is that of embedded patches (N, p); None where it
    nowhere is."""
    for before in range(len(table) - len(patches) + 1):
        if misfit(table[before : before + len(patches)], patches, total) <= HOLDS:
            return before
    return None
