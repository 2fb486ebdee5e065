"""A client that computes in half precision, as PyTorch's automatic mixed precision does.

    with torch.autocast(device, dtype):        products of matrices and convolutions in half
        loss = objective(images, labels)       precision; weights, tables, LayerNorm, the sum of
    (scale * loss).backward()                  the residual stream and the loss in float32

Gradients of float32 weights are float32; those of a linear layer's weights were rounded to half
precision on the way. fp16, whose numbers end at 65504 and near 6e-8, needs a loss scale: it is the
2^16 that torch's GradScaler starts with, halved, as the GradScaler halves it, until no gradient of
the step is infinite or NaN. It is a power of two, and gradients are divided by it before they are
sent.

Steps are computed one after the other, as each client computes its own: sums are rounded to half
precision at the end, so a batched backward pass, which sums in another order, gives other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError

Autocast = Literal["none", "fp16", "bf16"]

HALF: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The half precision of each kind of autocast."""

PATCH, TABLE = "patch_embed.proj.weight", "pos_embed"

FIRST_SCALE, LAST_SCALE = 2.0**16, 2.0**-16
"""Loss scales of fp16: what GradScaler starts with, and below which no gradient is left."""

Loss = Callable[[Mapping[str, Tensor]], Tensor]
"""The loss of one step as a function of its weights."""


@dataclass
class AutocastGradients:
    """Gradients of one step after the other, computed under autocast."""

    kind: Autocast
    scale: float = FIRST_SCALE
    """The loss scale of the last fp16 step, where the next step's is looked for first."""

    def of(
        self, loss: Loss, weights: Mapping[str, Tensor], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """The gradient of one step for the parameters `names`.

        weights  all that are trained: the loss scale of fp16 depends on every gradient of the step
        """
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        device = next(iter(leaves.values())).device.type
        with torch.autocast(device, HALF[self.kind]):
            value = loss(leaves)
        if self.kind == "bf16":
            return _gradients(value, {name: leaves[name] for name in names})
        scaled = self._scaled(value, leaves)
        return {name: scaled[name] for name in names}

    def _scaled(self, value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by the largest loss scale with which all of them are finite, divided by it."""
        gradients = _finite(value, leaves, self.scale)
        while gradients is None:
            self.scale /= 2
            if self.scale < LAST_SCALE:
                raise UserError(
                    "client.autocast: expected a step whose gradients fit into half precision, got "
                    "infinite or undefined ones with every loss scale, since numbers of fp16 end "
                    "at 65504. Set autocast: bf16, or none."
                )
            gradients = _finite(value, leaves, self.scale)
        while self.scale < FIRST_SCALE:
            larger = _finite(value, leaves, 2 * self.scale)
            if larger is None:
                break
            gradients, self.scale = larger, 2 * self.scale
        return gradients


def shown_autocast(grads: Mapping[str, Tensor]) -> Autocast:
    """Which autocast the gradients (n, *shape) of one upload show: none, fp16 or bf16.

    Under autocast the patch embedding's gradient has few enough bits for half precision, and the
    position table's has not. Where both have, the whole upload was rounded afterwards.
    """
    if not {PATCH, TABLE} <= grads.keys():
        return "none"
    for kind in ("bf16", "fp16"):
        if _fits(grads[PATCH], HALF[kind]) and not _fits(grads[TABLE], HALF[kind]):
            return kind
    return "none"


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether there are values besides zero and all have as few bits as this precision."""
    return bool(values.any()) and bool((rounded(values, dtype) == values).all())


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, float64, with as many bits as `dtype` has, whatever their exponents."""
    step = spacing(values, dtype)
    return torch.where(step > 0, (values.double() / step).round() * step, 0.0)


def spacing(values: Tensor, dtype: torch.dtype, least: float = 0.0) -> Tensor:
    """The distance from each value to the next number with as many bits as `dtype` has, float64; 0
    for zero. Numbers below `least` are as far apart as those from there; 0: exponents have no end,
    as those of scaled gradients."""
    size = values.double().abs()
    power = 2.0 ** (torch.frexp(size).exponent.double() - 1)
    return torch.where(size == 0, 0.0, torch.finfo(dtype).eps * power.clamp(min=least))


def _finite(value: Tensor, leaves: Mapping[str, Tensor], scale: float) -> dict[str, Tensor] | None:
    """Gradients by this loss scale, divided by it; None if one of them is infinite or NaN."""
    gradients = _gradients(value * scale, leaves)
    if not all(bool(g.isfinite().all()) for g in gradients.values()):
        return None
    return {name: g / scale for name, g in gradients.items()}


def _gradients(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by name; zero for a leaf that the value does not depend on."""
    computed = torch.autograd.grad(
        value, list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, computed, strict=True))
