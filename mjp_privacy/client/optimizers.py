r"""Optimisers of a client's local steps, as torch's of the same name, and what they do to noise.

    sgd     v <- mu v + (g + wd w),  w <- w - lr v,  v = g + wd w in the first step
    adamw   w <- (1 - lr wd) w - lr m^ / (sqrt(v^) + eps)

The state starts at zero in every upload.
"""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.registry import Registry

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's


class Optimizer(Protocol):
    def __init__(self, client: ClientConfig) -> None: ...

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        """The weight after the next step of this parameter."""
        ...


class Sgd:
    def __init__(self, client: ClientConfig) -> None:
        self.client = client
        self.velocity: dict[str, Tensor] = {}

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        velocity = gradient + self.client.weight_decay * weight
        if self.client.momentum:
            if name in self.velocity:
                velocity = self.client.momentum * self.velocity[name] + velocity
            self.velocity[name] = velocity
        return weight - self.client.lr * velocity


class AdamW:
    betas: ClassVar[tuple[float, float]] = BETAS

    def __init__(self, client: ClientConfig) -> None:
        self.client = client
        self.state: dict[str, tuple[int, Tensor, Tensor]] = {}

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        zero = torch.zeros_like(gradient)
        count, first, second = self.state.get(name, (0, zero, zero))
        one, two = self.betas
        count += 1
        first = one * first + (1 - one) * gradient
        second = two * second + (1 - two) * gradient.square()
        self.state[name] = (count, first, second)
        scale = (second / (1 - two**count)).sqrt() + EPSILON
        decayed = weight * (1 - self.client.lr * self.client.weight_decay)
        return decayed - self.client.lr * (first / (1 - one**count)) / scale


OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer")
OPTIMIZERS.register("sgd", Sgd)
OPTIMIZERS.register("adamw", AdamW)


def shares_of_steps(steps: int, momentum: float) -> list[float]:
    """How often each step's gradient enters w_E - w_0 = -lr sum_e c_e g_e of SGD without decay:
    c_e = 1 + mu + ... + mu^(E - e - 1)."""
    return [sum(momentum**power for power in range(steps - e)) for e in range(steps)]


def noise_gain(steps: int, momentum: float, lr: float) -> float:
    """By how much independent noise of one size on each step's gradient is larger in the sum."""
    return lr * math.sqrt(sum(share**2 for share in shares_of_steps(steps, momentum)))
