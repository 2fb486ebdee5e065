r"""Defences that add noise.

`gaussian_noise s`: s times the root mean square of the whole upload's nonzero entries, on every
entry. `dp_sgd sigma` (Abadi et al. 2016): of each example's gradient g_b over all parameters

    (1/B) ( sum_b g_b min(1, C / ||g_b||) + N(0, sigma^2 C^2 I) ).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mjp_privacy.client.defenses.disturbance import (
    Disturbed,
    Draws,
    entries,
    per_step,
    squared_norm,
)
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Grads


@dataclass(frozen=True)
class GaussianNoise:
    """`std`: relative to the rms of the whole upload's nonzero entries."""

    std: float
    name: ClassVar[str] = "gaussian_noise"
    main: ClassVar[str | None] = "std"

    def __post_init__(self) -> None:
        if self.std < 0:
            raise UserError(
                f"Defense gaussian_noise.std: expected 0 or a number above, got {self.std:g}. It "
                "is relative to the upload's own size: 0.1 is a tenth of it."
            )

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        scale = self.std * (squared_norm(sent) / _nonzero(sent)).sqrt()
        noisy = {
            name: g + per_step(scale, g) * draws.normal(name, g.shape[1:]).to(g)
            for name, g in sent.items()
        }
        return Disturbed(noisy, dict.fromkeys(noisy, self._told(noisy)))

    def _told(self, noisy: Grads) -> Tensor:
        """The noise's size as the noisy upload shows it: the rms of what is sent is
        sqrt(1 + std^2) times that of the gradient, up to how many entries were zero."""
        mean = squared_norm(noisy) / entries(noisy)
        return self.std * (mean / (1 + self.std**2)).sqrt()


def _nonzero(sent: Grads) -> Tensor:
    """(n,) how many entries are not zero up to rounding, which moves with the block; 1 or more."""
    largest = torch.stack([g.flatten(1).abs().amax(1) for g in sent.values()]).amax(0)
    zero = (largest * torch.finfo(largest.dtype).eps).unsqueeze(1)
    counts = [(g.flatten(1).abs() > zero).sum(1) for g in sent.values()]
    return torch.stack(counts).sum(0).clamp(min=1)


@dataclass(frozen=True)
class DpSgd:
    """`noise`: the multiplier sigma; `clip`: the norm C that an example's gradient may have."""

    noise: float
    clip: float = 1.0
    name: ClassVar[str] = "dp_sgd"
    main: ClassVar[str | None] = "noise"

    def __post_init__(self) -> None:
        if self.noise < 0 or self.clip <= 0:
            raise UserError(
                "Defense dp_sgd: expected a noise of 0 or above and a clip above 0, got noise "
                f"{self.noise:g} and clip {self.clip:g}. The clip is a gradient's norm."
            )

    def step_gradient(self, examples: Grads, draws: Draws) -> dict[str, Tensor]:
        """(n, B, *shape) of every uploaded parameter -> (n, *shape)."""
        squares = [g.double().flatten(2).square().sum(2) for g in examples.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        shrunk = (self.clip / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp(max=1)
        level = self.deviation(norms.shape[1])
        made = {}
        for name, g in examples.items():
            mean = (g * shrunk.to(g).view(*shrunk.shape, *[1] * (g.ndim - 2))).mean(1)
            made[name] = mean + level * draws.normal(name, g.shape[2:]).to(g) if level else mean
        return made

    def deviation(self, batch: int) -> float:
        return self.noise * self.clip / batch
