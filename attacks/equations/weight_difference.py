r"""One gradient from the weights that a client sends back.

    SGD, E steps, momentum mu:   d = w_E - w_0 = -lr sum_e c_e g_e,
                                 c_e = 1 + mu + ... + mu^(E-e-1)

    g ~ -d / (lr sum_e c_e) - decay w_0

exact for one step, where momentum has not begun, and otherwise the weighted mean of the steps'
gradients at weights that moved. Of AdamW's first step, u = -(d + lr decay w) / lr = g / (|g| + eps)
is the sign of g only as long as it is rounded coarsely: g = eps u / (1 - |u|) where the weights'
precision resolves 1 - |u|, and a constant times the sign where it does not. Later steps divide by
a running scale that nobody is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from mjp_privacy.client.optimizers import EPSILON, shares_of_steps
from mjp_privacy.core.registry import Registry
from mjp_privacy.interfaces import ClientUpdate, Refusal

State = Mapping[str, Tensor]


class Inversion(Protocol):
    """From a weight difference back to a gradient, for one optimiser."""

    def refuses(self, update: ClientUpdate) -> Refusal | None: ...

    def invert(self, update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor: ...

    def rounded(self, update: ClientUpdate, step: float) -> float:
        """By how much a gradient near zero is off where a weight is off by `step`."""
        ...


class OfSgd:
    def refuses(self, update: ClientUpdate) -> Refusal | None:
        return None

    def invert(self, update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor:
        return -sent / effective_rate(update) - update.weight_decay * state[name].double()

    def rounded(self, update: ClientUpdate, step: float) -> float:
        assert update.lr
        return step / update.lr


class OfAdamW:
    def refuses(self, update: ClientUpdate) -> Refusal | None:
        if update.steps == 1:
            return None
        return Refusal(
            "weight_difference",
            f"the upload is a weight difference of {update.steps} AdamW steps, each entry divided "
            "by its own running scale, which holds no gradient",
        )

    def invert(self, update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor:
        assert update.lr
        shown = -sent / update.lr - update.weight_decay * state[name].double()
        coarsest = max(float(weight.abs().max()) for weight in state.values())
        resolved = torch.finfo(update.dtype).eps * coarsest / update.lr
        # One resolution for all parameters: where it cuts, all keep the same scale.
        return EPSILON * shown / (1 - shown.abs()).clamp_min(resolved)

    def rounded(self, update: ClientUpdate, step: float) -> float:
        assert update.lr
        return EPSILON * step / update.lr


INVERSIONS: Registry[Inversion] = Registry("optimizer")
INVERSIONS.register("sgd", OfSgd())
INVERSIONS.register("adamw", OfAdamW())


def holds_no_gradient(update: ClientUpdate) -> Refusal | None:
    """Why nothing like a gradient can be had from an upload, or None."""
    if update.kind == "gradient":
        return None
    if not update.lr:
        return Refusal(
            "weight_difference", "the upload is a weight difference of an unknown learning rate"
        )
    if update.optimizer not in INVERSIONS:
        return Refusal(
            "weight_difference",
            f"the upload is a weight difference of {update.optimizer}, which holds no gradient",
        )
    return INVERSIONS[update.optimizer].refuses(update)


def pseudo_gradient(update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor:
    """(n, *shape) float64 from what was sent of one parameter; state: the weights before."""
    return INVERSIONS[update.optimizer].invert(update, sent, state, name)


def weight_rounding(update: ClientUpdate, step: float) -> float:
    """Error of a pseudo-gradient near zero where weights are rounded to `step`."""
    return INVERSIONS[update.optimizer].rounded(update, step)


def effective_rate(update: ClientUpdate) -> float:
    """lr sum_e c_e: what one gradient in every step would have moved the weights by."""
    assert update.lr
    return update.lr * sum(shares_of_steps(update.steps, update.momentum))
