r"""Defences that add noise.

`gaussian_noise s` adds, on every entry, noise of s times the root mean square of the whole upload's
nonzero entries. `dp_sgd sigma` (Abadi et al. 2016) makes of the examples' gradients g_b, clipped
over all parameters together,

    (1/B) ( sum_b g_b min(1, C / ||g_b||) + N(0, sigma^2 C^2 I) ).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mjp_privacy.client.defenses.disturbance import Disturbed, Draws, per_step, squared_norm
from mjp_privacy.core.schema import NotNegative, Positive, schema
from mjp_privacy.interfaces import Grads


@schema
class GaussianNoise:
    """Adds Gaussian noise; the number is its size relative to the entries'.

    `std`: relative to the root mean square of the whole upload's nonzero entries.
    """

    std: NotNegative
    name: ClassVar[str] = "gaussian_noise"
    main: ClassVar[str | None] = "std"

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        scale = self.std * (squared_norm(sent) / _nonzero(sent)).sqrt()
        noisy = {
            name: g + per_step(scale, g) * draws.normal(name, g.shape[1:]).to(g)
            for name, g in sent.items()
        }
        return Disturbed(noisy, dict.fromkeys(noisy, self.public_deviation(noisy)))

    def public_deviation(self, noisy: Grads) -> Tensor:
        """The noise's size (n,) as anybody can estimate it from the noisy upload.

        The rms of what is sent is sqrt(1 + std^2) times that of the gradient, apart from the
        unknown number of zero entries.
        """
        mean = squared_norm(noisy) / sum(g[0].numel() for g in noisy.values())
        return self.std * (mean / (1 + self.std**2)).sqrt()


def _nonzero(sent: Grads) -> Tensor:
    """(n,) number of entries that are not zero, at least 1.

    What may be a rounding error counts as zero, since such errors depend on the rest of the block.
    """
    largest = torch.stack([g.flatten(1).abs().amax(1) for g in sent.values()]).amax(0)
    zero = (largest * torch.finfo(largest.dtype).eps).unsqueeze(1)
    counts = [(g.flatten(1).abs() > zero).sum(1) for g in sent.values()]
    return torch.stack(counts).sum(0).clamp(min=1)


@schema
class DpSgd:
    """Clips each gradient, then adds noise; the number is noise over clip.

    DP-SGD. `noise`: the multiplier sigma; `clip`: the largest norm C of an example's gradient.
    """

    noise: NotNegative
    clip: Positive = 1.0
    name: ClassVar[str] = "dp_sgd"
    main: ClassVar[str | None] = "noise"

    def step_gradient(self, examples: Grads, draws: Draws) -> dict[str, Tensor]:
        """Clip, average and add noise: (n, B, *shape) of every parameter -> (n, *shape)."""
        squares = [g.double().flatten(2).square().sum(2) for g in examples.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        factors = (self.clip / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp(max=1)
        level = self.deviation(norms.shape[1])
        gradients = {}
        for name, g in examples.items():
            mean = (g * factors.to(g).view(*factors.shape, *[1] * (g.ndim - 2))).mean(1)
            noisy = mean + level * draws.normal(name, g.shape[2:]).to(g) if level else mean
            gradients[name] = noisy
        return gradients

    def deviation(self, batch: int) -> float:
        """Standard deviation of the noise on an entry of the step's gradient: sigma C / B."""
        return self.noise * self.clip / batch
