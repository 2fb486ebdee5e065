r"""Gradients and local steps of many clients at once, each with its own weights.

A client trains on the images of its step. If it has a `StepDefense`, that works inside every step.
The optimisers are equal to torch's of the same names:

    sgd     v <- mu v + (g + wd w),  w <- w - lr v,  v = g + wd w in the first step
    adamw   w <- (1 - lr wd) w - lr m^ / (sqrt(v^) + eps)

Velocity and moments start at zero in every upload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig, local_round
from mjp_privacy.client.defenses.disturbance import Draws
from mjp_privacy.client.defenses.registry import StepDefense
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import ClientInput

Weights = Mapping[str, Tensor]
"""Weights by parameter name, (n, *shape): every client has its own."""


@dataclass(frozen=True)
class LocalTraining:
    """What n clients compute, before defences change the whole upload.

    It covers all parameters that are not withheld; withheld ones keep their values.
    """

    client: FedSGDClient
    defense: StepDefense | None
    seed: int
    round: int

    def gradient(self, inputs: ClientInput) -> dict[str, Tensor]:
        """The gradient of each client's step at the model's weights, (n, *shape)."""
        return self._step_gradient(inputs, None, 0)

    def difference(self, inputs: Sequence[ClientInput]) -> dict[str, Tensor]:
        """w_E - w_0 after one step for each of the inputs, in the precision of the weights."""
        optimizer = OPTIMIZERS[self.client.config.optimizer](self.client.config)
        count = len(inputs[0].image_ids) // self.client.config.batch
        names = self.client.wanted(None)
        start = {name: self.client.model.get_parameter(name).detach() for name in names}
        weights = {name: w.expand(count, *w.shape) for name, w in start.items()}
        for number, step in enumerate(inputs):
            grads = self._step_gradient(step, weights if number else None, number)
            weights = {name: optimizer.step(name, weights[name], grads[name]) for name in names}
        return {name: weights[name] - start[name] for name in names}

    def _step_gradient(
        self, inputs: ClientInput, weights: Weights | None, number: int
    ) -> dict[str, Tensor]:
        """The gradient of local step `number`; weights None: the model's, shared by all clients."""
        if self.defense is None:
            return self.client.gradients(inputs) if weights is None else self._at(inputs, weights)
        batch = self.client.config.batch
        examples = self._examples(inputs, weights)
        round = local_round(self.round, number)
        draws = Draws(self.seed, inputs.image_ids[::batch], round, self.defense.name)
        return self.defense.step_gradient(examples, draws)

    def _examples(self, inputs: ClientInput, weights: Weights | None) -> dict[str, Tensor]:
        """The gradient of each single example, (n, B, *shape)."""
        batch, config = self.client.config.batch, replace(self.client.config, batch=1)
        alone = replace(self, client=replace(self.client, config=config))
        if weights is None:
            grads = alone.client.gradients(inputs)
        else:
            repeated = {name: w.repeat_interleave(batch, 0) for name, w in weights.items()}
            grads = alone._at(inputs, repeated)
        return {name: g.unflatten(0, (-1, batch)) for name, g in grads.items()}

    def _at(self, inputs: ClientInput, weights: Weights) -> dict[str, Tensor]:
        """The gradient of each client's step at its own weights, (n, *shape)."""
        with self.client.differentiating():
            return self.client.step_gradients(weights, self.client.steps(inputs), own_weights=True)


MOST_NUMBERS = 2**27
"""Of the gradients of clients that are computed together."""


def clients_at_once(model: torch.nn.Module, batch: int) -> int:
    """How many clients may be computed together. Each example counts as a whole gradient, which is
    what clipping keeps in memory."""
    size = sum(p.numel() for p in model.parameters())
    return max(1, MOST_NUMBERS // (size * batch))


# optimisers --------------------------------------------------------------------------------------

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's defaults


class Sgd:
    """SGD with momentum and weight decay, as torch.optim.SGD."""

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
    """Adam with decoupled weight decay, as torch.optim.AdamW."""

    def __init__(self, client: ClientConfig) -> None:
        self.client = client
        self.state: dict[str, tuple[int, Tensor, Tensor]] = {}

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        zero = torch.zeros_like(gradient)
        count, first, second = self.state.get(name, (0, zero, zero))
        beta1, beta2 = BETAS
        count += 1
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        self.state[name] = (count, first, second)
        scale = (second / (1 - beta2**count)).sqrt() + EPSILON
        decayed = weight * (1 - self.client.lr * self.client.weight_decay)
        return decayed - self.client.lr * (first / (1 - beta1**count)) / scale


OPTIMIZERS: Mapping[str, type[Sgd | AdamW]] = {"sgd": Sgd, "adamw": AdamW}


def shares_of_steps(steps: int, momentum: float) -> list[float]:
    """The weight c_e of each step's gradient in SGD's w_E - w_0 = -lr sum_e c_e g_e, without decay:
    c_e = 1 + mu + ... + mu^(E - e - 1).

    shares_of_steps(2, 0.5) is [1.5, 1.0].
    """
    return [sum(momentum**power for power in range(steps - e)) for e in range(steps)]


def noise_gain(steps: int, momentum: float, lr: float) -> float:
    """Standard deviation of w_E - w_0 if independent noise of deviation 1 is on every gradient."""
    return lr * math.sqrt(sum(share**2 for share in shares_of_steps(steps, momentum)))
