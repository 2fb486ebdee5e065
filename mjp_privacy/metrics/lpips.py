"""LPIPS v0.1 with AlexNet (Zhang et al. 2018), without a download.

Within 5e-7 of the `lpips` package, which takes seconds to import and is the tests' yardstick.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.metrics.pictures import Prepared
from mjp_privacy.models.tensor_files import TensorFile, read_torch_file

# ------------------------------------------------------------------------------------------------
# AlexNet's convolutions and LPIPS' heads, read without importing the packages they come from.
#
# The heads come with the `lpips` package. The convolutions come from torchvision's file where
# torch.hub has it already, else from the float16 copy inside this package; scores by the two differ
# by less than 2e-4. The network computes in float32, TF32 off.

PACKAGED = Path(__file__).parents[1] / "assets" / "alexnet_features_fp16.safetensors"
TORCHVISION = "alexnet-owt-7be5be79.pth"  # the last part is the start of its SHA-256
SMALLEST = 31  # pixels a side: below that the second pooling has no window left

HUB = FileKind(
    "torchvision's AlexNet as torch.hub downloaded it, whole",
    "Remove the file; torch.hub downloads it again when it is asked to.",
    512 << 20,
)
HEADS = FileKind("LPIPS' weights in the lpips package", "Install the lpips package again.")
OF_PACKAGE = FileKind("AlexNet's weights in this package", "Install mjp-privacy again.")

SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""LPIPS' own: from [-1, 1] to the values that AlexNet was trained on."""
CONVOLUTIONS = ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1))  # index, stride, padding
POOLED_BEFORE = (3, 6)
EPS = 1e-10  # as in the lpips package


def alexnet_layers(images: Tensor) -> Iterator[Tensor]:
    """AlexNet's five rectified layers (n, places, channels) float32 of images (n, C, H, W) in
    [0, 1]; C = 3, or 1 for grey taken as three equal ones.

    On a CPU their memory has the channels last, which is what its convolutions are fastest with.
    """
    shift, scale = (torch.tensor(v, device=images.device) for v in (SHIFT, SCALE))
    gain, offset = (x.reshape(1, 3, 1, 1) for x in (2 / scale, -(1 + shift) / scale))
    layout = _layout(images.device)
    flowing = (images.float() * gain + offset).contiguous(memory_format=layout)
    for (index, stride, padding), (weight, bias) in zip(
        CONVOLUTIONS, _convolutions(images.device), strict=True
    ):
        exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
        with torch.no_grad(), exact:
            if index in POOLED_BEFORE:
                flowing = max_pool2d(flowing, kernel_size=3, stride=2)
            flowing = conv2d(flowing, weight, bias, stride=stride, padding=padding).relu_()
        yield flowing.permute(0, 2, 3, 1).flatten(1, 2)


def of_length_one(layer: Tensor) -> Tensor:
    """The layer, at every place divided by its length."""
    length: Tensor = torch.linalg.vector_norm(layer, dim=-1, keepdim=True)
    return layer / (length + EPS)


def lpips_backbone() -> str:
    """Which AlexNet weights are used on this machine, in words."""
    return backbone()[0]


@cache
def lpips_heads() -> tuple[Tensor, ...]:
    """LPIPS' weight of every channel, by layer: (1, C, 1, 1), not negative."""
    package = find_spec("lpips")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "weights" / "v0.1" / "alex.pth"
    stored = read_torch_file(file, HEADS)
    names = [f"lin{number}.model.1.weight" for number in range(len(CONVOLUTIONS))]
    with HEADS.reading(file):
        return tuple(stored[name].clamp(min=0) for name in names)


def _layout(device: torch.device) -> torch.memory_format:
    return torch.channels_last if device.type == "cpu" else torch.contiguous_format


@cache
def _convolutions(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each convolution, as the device takes them."""
    stored, layout = backbone()[1], _layout(device)
    return [
        (
            stored[f"features.{index}.weight"].to(device, torch.float32, memory_format=layout),
            stored[f"features.{index}.bias"].to(device, torch.float32),
        )
        for index, _, _ in CONVOLUTIONS
    ]


@cache
def backbone() -> tuple[str, dict[str, Tensor]]:
    """A description of the weights, and AlexNet's convolutions under torchvision's names:
    `features.0.weight` and so on."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / TORCHVISION
    if is_there(file):
        try:
            digest = hashlib.sha256(HUB.bytes(file)).hexdigest()
            if not digest.startswith(file.stem.rsplit("-", 1)[1]):
                raise HUB.refusal(file, f"a file whose SHA-256 begins with {digest[:8]}")
            return f"{file.name} of torchvision, float32", read_torch_file(file, HUB)
        except BadFile as error:
            print(f"{error} Until then, the weights inside this package are used.", file=sys.stderr)
    weights = TensorFile(PACKAGED, OF_PACKAGE).tensors(finite=True)
    return f"{PACKAGED.name} of this package, float16", weights


@dataclass(frozen=True)
class Lpips:
    """LPIPS as a measure: weighted squared distance of unit-length features, averaged over space,
    summed over layers. Float32, >= 0.

    Images have 3 channels (RGB) or 1 (grey).
    """

    precision: ClassVar[torch.dtype] = torch.float32

    def prepare(self, references: Tensor) -> Prepared:
        """The references' features, (m, places, channels) for each layer."""
        channels, height, width = references.shape[1:]
        if min(height, width) < SMALLEST:
            raise UserError(
                f"LPIPS expected images of at least {SMALLEST}×{SMALLEST} pixels, the smallest "
                f"that AlexNet can take; these are {height}×{width}. Leave lpips out of the "
                "metrics or score larger images."
            )
        if channels not in (1, 3):
            raise UserError(
                f"LPIPS expected images of 3 channels (RGB) or 1 (grey); these have {channels}. "
                "Leave lpips out of the metrics or score RGB images."
            )
        return tuple(map(of_length_one, alexnet_layers(references)))

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """(m, C, H, W) in [0, 1] and the features of the references -> (m,)."""
        total = reconstructions.new_zeros(len(reconstructions))
        layers = zip(alexnet_layers(reconstructions), prepared, lpips_heads(), strict=True)
        for layer, known, head in layers:
            squares = of_length_one(layer).sub_(known).square_()
            total += (squares @ head.flatten().to(squares)).mean(1)
        return total
