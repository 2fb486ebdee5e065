r"""Low-rank adapters (LoRA) beside frozen linear layers, under the names that PEFT saves them by.

    y = W x + b + (alpha / rank) B A x,      A: LAYER.lora_A.weight (rank, in)
                                             B: LAYER.lora_B.weight (out, rank)

A client with adapters trains A and B, often the classifier as well; W, b and all other parameters
stay as they are and are never sent. As in PEFT A starts uniform within 1 / sqrt(in) and B at zero,
so that the network computes at first what it did without them. While B is zero, so is the gradient
of every A.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models.copies import copied
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.sizes import LowRank

Model = TypeVar("Model", bound=MJPVisionTransformer)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter beside it; its own weight and bias keep their names."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        with torch.device("meta"):  # nothing is drawn; the layer's own weight and bias stay
            super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.lora_A = skip_init(nn.Linear, layer.in_features, rank, bias=False, **like)
        self.lora_B = skip_init(nn.Linear, rank, layer.out_features, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        adapted: Tensor = super().forward(x) + self.scale * self.lora_B(self.lora_A(x))
        return adapted

    def start(self, generator: torch.Generator, spread: float) -> None:
        """Draw the adapter: numbers that are equal for all precisions, and for other targets."""
        first, second = self.lora_A.weight, self.lora_B.weight
        drawn = torch.rand(first.shape, generator=generator, dtype=torch.float64)
        moved = torch.randn(second.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            first.copy_(1 / math.sqrt(self.in_features) * (2 * drawn - 1))
            second.copy_(spread * moved)


def with_adapters(model: Model, adapters: LowRank, seed: int) -> Model:
    """A copy of the model with an adapter beside each target, drawn from the seed; a model that
    has such adapters already, as after fine-tuning, keeps the numbers in them.

    with_adapters(load_model("cifar_vit"), LowRank(4), seed=0) has blocks.0.attn.qkv.lora_A.weight
    """
    adapted = copied(model)
    if (own := adapted.adapters) is not None:
        if (own.rank, own.targets, own.scale) != (adapters.rank, adapters.targets, adapters.scale):
            raise UserError(
                f"client.lora: expected the adapters that the model has, {own.text}, got "
                f"{adapters.text}. Give the same, or a model without adapters."
            )
        return adapted
    adapted.adapters = adapters
    for name, layer in list(adapted.blocks.named_modules(prefix="blocks")):
        owner, _, last = name.rpartition(".")
        if last in adapters.targets and isinstance(layer, nn.Linear):
            smaller = min(layer.in_features, layer.out_features)
            if adapters.rank > smaller:
                raise UserError(
                    f"adapters, rank: expected at most {smaller}, the smaller side of "
                    f"{name}.weight, got {adapters.rank}. Give a smaller rank."
                )
            beside = AdaptedLinear(layer, adapters.rank, adapters.scale)
            if not layer.weight.is_meta:
                beside.start(torch_generator("adapters", name, seed), adapters.spread)
            setattr(adapted.get_submodule(owner), last, beside)
    return adapted
