r"""Optimisers of a client's local steps, equal to torch's of the same names, and what they do to
noise on the gradients.

    sgd     v <- mu v + (g + wd w),  w <- w - lr v,  v = g + wd w in the first step
    adamw   w <- (1 - lr wd) w - lr m^ / (sqrt(v^) + eps)

Velocity and moments start at zero in every upload.
"""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.registry import Registry

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's defaults


class Optimizer(Protocol):
    """Moves the weights of n clients; it keeps its state by parameter name."""

    def __init__(self, client: ClientConfig) -> None: ...

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        """The weight after the next step of this parameter."""
        ...


class Sgd:
    """SGD with momentum and weight decay, as torch.optim.SGD."""

    def __init__(self, client: ClientConfig) -> None:
        self.client = client
        self.velocity: dict[str, Tensor] = {}

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        """The weight after the next step of this parameter."""
        velocity = gradient + self.client.weight_decay * weight
        if self.client.momentum:
            if name in self.velocity:
                velocity = self.client.momentum * self.velocity[name] + velocity
            self.velocity[name] = velocity
        return weight - self.client.lr * velocity


class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW."""

    betas: ClassVar[tuple[float, float]] = BETAS

    def __init__(self, client: ClientConfig) -> None:
        self.client = client
        self.state: dict[str, tuple[int, Tensor, Tensor]] = {}

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        """The weight after the next step of this parameter."""
        zero = torch.zeros_like(gradient)
        count, first, second = self.state.get(name, (0, zero, zero))
        beta1, beta2 = self.betas
        count += 1
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        self.state[name] = (count, first, second)
        scale = (second / (1 - beta2**count)).sqrt() + EPSILON
        decayed = weight * (1 - self.client.lr * self.client.weight_decay)
        return decayed - self.client.lr * (first / (1 - beta1**count)) / scale


OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer")
OPTIMIZERS.register("sgd", Sgd)
OPTIMIZERS.register("adamw", AdamW)


def shares_of_steps(steps: int, momentum: float) -> list[float]:
    """The weight c_e of each step's gradient in SGD's w_E - w_0 = -lr sum_e c_e g_e, without decay:
    c_e = 1 + mu + ... + mu^(E - e - 1).

    shares_of_steps(2, 0.5) is [1.5, 1.0].
    """
    return [sum(momentum**power for power in range(steps - e)) for e in range(steps)]


def noise_gain(steps: int, momentum: float, lr: float) -> float:
    """Standard deviation of w_E - w_0 if independent noise of deviation 1 is on every gradient."""
    return lr * math.sqrt(sum(share**2 for share in shares_of_steps(steps, momentum)))
