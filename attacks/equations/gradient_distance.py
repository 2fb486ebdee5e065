r"""How far the gradients of candidate pictures are from those of one step's upload.

    d(x) = mean over tensors w of  1 - <g_w(x), g_w> / (|g_w(x)| |g_w|)

Each tensor counts the same: over all numbers together the classifier and the last blocks outweigh
the first ones, which say most of the patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from mjp_privacy.models import MJPVisionTransformer

LEAST = 1e-30  # the norm of a gradient that is zero, as of a layer that sees no picture


@dataclass(frozen=True)
class GradientDistance:
    """The distance from what was sent: GradientDistance.of(model, grads, mask)(images, labels)."""

    model: MJPVisionTransformer
    parameters: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]  # (*shape), those that are not zero
    mask: Tensor | None  # (B, N), True where E_unk takes the place of the position

    @classmethod
    def of(
        cls, model: MJPVisionTransformer, grads: Mapping[str, Tensor], mask: Tensor | None
    ) -> GradientDistance:
        """To the gradients (*shape) of one step; `mask` (B, N) where the model can mask."""
        usable = {name: grad for name, grad in grads.items() if float(grad.norm()) > LEAST}
        own = {name: value.detach() for name, value in model.named_parameters() if name in usable}
        dtype = model.cls_token.dtype
        return cls(
            model,
            {name: value.clone().requires_grad_() for name, value in own.items()},
            {name: usable[name].to(dtype) / usable[name].norm().to(dtype) for name in own},
            mask,
        )

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """The distance of normalised images (B, C, H, W) with these labels (B,), differentiable."""
        with sdpa_kernel(SDPBackend.MATH):  # the only kernel that can be differentiated twice
            arguments = (images,) if self.mask is None else (images, self.mask)
            logits = functional_call(self.model, dict(self.parameters), arguments)
            loss = torch.nn.functional.cross_entropy(logits, labels.to(logits.device))
            values = list(self.parameters.values())
            own = torch.autograd.grad(loss, values, create_graph=True, allow_unused=True)
        cosines = [
            (one * sent).sum() / one.norm().clamp_min(LEAST)
            for one, sent in zip(own, self.sent.values(), strict=True)
            if one is not None
        ]
        return 1 - torch.stack(cosines).mean()
