"""The layers of AlexNet that LPIPS compares, without the `lpips` package's own imports.

`perceptual.lpips` scores with the package itself, which takes seconds to import. Here the same
convolutions and heads are read from the same files, for reports that compare thousands of pairs.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from mjp_privacy.metrics.perceptual import backbone_weights

SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""LPIPS' own: from [-1, 1] to the values that AlexNet was trained on."""
CONVOLUTIONS = ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1))  # index, stride, padding
POOLED_BEFORE = (3, 6)


def alexnet_layers(images: Tensor) -> list[Tensor]:
    """The five rectified layers of images (n, 3, H, W) in [0, 1]: each (n, C, h, w) float32."""
    weights = backbone_weights()
    shift, scale = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (SHIFT, SCALE))
    flowing = (images.float() * 2 - 1 - shift) / scale
    layers = []
    for index, stride, padding in CONVOLUTIONS:
        if index in POOLED_BEFORE:
            flowing = max_pool2d(flowing, kernel_size=3, stride=2)
        weight, bias = (weights[f"features.{index}.{kind}"].float() for kind in ("weight", "bias"))
        flowing = conv2d(flowing, weight, bias, stride=stride, padding=padding).relu()
        layers.append(flowing)
    return layers


@cache
def lpips_heads() -> tuple[Tensor, ...]:
    """LPIPS' weight of every channel, by layer: (1, C, 1, 1), not negative."""
    package = find_spec("lpips")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "weights" / "v0.1" / "alex.pth"
    stored = torch.load(file, map_location="cpu", weights_only=True)
    return tuple(stored[f"lin{i}.model.1.weight"].clamp(min=0) for i in range(len(CONVOLUTIONS)))
