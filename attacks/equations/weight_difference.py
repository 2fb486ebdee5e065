r"""A gradient computed from the weights that a client sends back.

    SGD, E steps, momentum mu:   d = w_E - w_0 = -lr sum_e c_e g_e,
                                 c_e = 1 + mu + ... + mu^(E-e-1)

    g ~ -d / (lr sum_e c_e) - decay w_0

which is exact for one step, where momentum has not begun, and otherwise the weighted mean of the
steps' gradients at weights that moved. AdamW's first step sends u = -(d + lr decay w) / lr =
g / (|g| + eps), which holds more than the sign of g: g = eps u / (1 - |u|) where the weights'
precision resolves 1 - |u|, and a constant times the sign where it does not. Later steps divide by
a running scale that the attacker is not told.
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
    """How one optimiser's weight difference is turned back into a gradient."""

    def refuses(self, update: ClientUpdate) -> Refusal | None:
        """Why these steps cannot be inverted, or None."""
        ...

    def invert(self, update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor:
        """The gradient of the parameter `name` from its weight difference `sent`, float64."""
        ...

    def rounded(self, update: ClientUpdate, step: float) -> float:
        """The error of a gradient near zero that an error of `step` in a weight causes."""
        ...


class OfSgd:
    """SGD with momentum and weight decay: the difference is a weighted sum of gradients."""

    def refuses(self, update: ClientUpdate) -> Refusal | None:
        """Never: every number of SGD steps gives a mean gradient."""
        return None

    def invert(self, update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor:
        """-d / (lr sum_e c_e) less the weight decay."""
        return -sent / effective_rate(update) - update.weight_decay * state[name].double()

    def rounded(self, update: ClientUpdate, step: float) -> float:
        """`step` over the learning rate."""
        assert update.lr
        return step / update.lr


class OfAdamW:
    """AdamW: its first step determines the gradient, up to the weights' rounding."""

    def refuses(self, update: ClientUpdate) -> Refusal | None:
        """More than one step."""
        if update.steps == 1:
            return None
        return Refusal(
            "weight_difference",
            f"the upload is a weight difference of {update.steps} AdamW steps, each entry divided "
            "by its own running scale, which holds no gradient",
        )

    def invert(self, update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor:
        """eps u / (1 - |u|), u the step over the learning rate."""
        assert update.lr
        shown = -sent / update.lr - update.weight_decay * state[name].double()
        coarsest = max(float(weight.abs().max()) for weight in state.values())
        resolved = torch.finfo(update.dtype).eps * coarsest / update.lr
        # One resolution for all parameters, so that entries cut by it have the same scale.
        return EPSILON * shown / (1 - shown.abs()).clamp_min(resolved)

    def rounded(self, update: ClientUpdate, step: float) -> float:
        """eps times `step` over the learning rate: near zero, u is g / eps."""
        assert update.lr
        return EPSILON * step / update.lr


INVERSIONS: Registry[Inversion] = Registry("optimizer")
INVERSIONS.register("sgd", OfSgd())
INVERSIONS.register("adamw", OfAdamW())


def holds_no_gradient(update: ClientUpdate) -> Refusal | None:
    """Why no gradient can be computed from an upload, or None."""
    if update.kind == "gradient":
        return None
    if not update.lr:
        return Refusal(
            "weight_difference",
            "the upload is a weight difference with an unknown learning rate",
        )
    if update.optimizer not in INVERSIONS:
        return Refusal(
            "weight_difference",
            f"the upload is a weight difference of {update.optimizer}, which holds no gradient",
        )
    return INVERSIONS[update.optimizer].refuses(update)


def pseudo_gradient(update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor:
    """The gradient of one parameter (n, *shape), float64, from the difference `sent`.

    `state` holds the weights before the client's steps, by name.
    """
    return INVERSIONS[update.optimizer].invert(update, sent, state, name)


def weight_rounding(update: ClientUpdate, step: float) -> float:
    """The error of a pseudo-gradient near zero if weights are rounded to multiples of `step`."""
    return INVERSIONS[update.optimizer].rounded(update, step)


def effective_rate(update: ClientUpdate) -> float:
    """lr sum_e c_e: how far weights move per unit of a gradient that is the same in every step."""
    assert update.lr
    return update.lr * sum(shares_of_steps(update.steps, update.momentum))
