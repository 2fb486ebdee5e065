"""Products of matrices in bfloat16 on CPUs where torch has none that are fast.

There torch multiplies the numbers one by one, and a step of a small ViT takes twelve times as long
as in float32. What it computes is a float32 product of rounded numbers, rounded once more (but for
the weights of a convolution, whose gradient it rounds image by image), and float32 products are
fast on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mjp_privacy.training.config import TrainingConfig

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
}
"""What is slow: all products that a ViT, a Swin or a ResNet trains with, as long as its
attention is made of them (`learner` switches fused attention off)."""
REMARK = (
    "note: torch has no fast bfloat16 on this CPU: products are computed in float32 and rounded, "
    "as a CPU with instructions for it does, in little more time than float32 takes"
)


class RoundedProducts(TorchDispatchMode):
    """While it is entered, products of bfloat16 tensors on the CPU are computed in float32 and
    rounded to bfloat16, forwards and backwards: with RoundedProducts(): ..."""

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls in place of every operation."""
        if function not in PRODUCTS or not any(map(_is_rounded, args)):
            return function(*args, **(kwargs or {}))
        wide = (arg.float() if _is_rounded(arg) else arg for arg in args)
        result = function(*wide, **(kwargs or {}))
        if isinstance(result, Tensor):
            return result.bfloat16()
        return tuple(part if part is None else part.bfloat16() for part in result)


def _is_rounded(arg: object) -> bool:
    return isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 and arg.device.type == "cpu"


def rounds_products(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a training in bfloat16 needs `RoundedProducts` here. It is not compiled then, because
    compiled code calls the slow products itself."""
    slow = device.type == "cpu" and not has_bfloat16()
    return slow and config.recipe.precision == "bfloat16"


def products(config: TrainingConfig, device: torch.device) -> AbstractContextManager[Any]:
    """What a step and a validation of this training are computed in; it can be entered again."""
    return RoundedProducts() if rounds_products(config, device) else nullcontext()


def has_bfloat16() -> bool:
    """Whether the library that multiplies for torch (oneDNN) knows bfloat16 on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and torch.backends.mkldnn.is_available() and supported())
