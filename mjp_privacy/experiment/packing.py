"""Images as small as they can be stored without loss.

Pictures that are whole multiples of 1/255 (every original, plain or shuffled) become bytes, and a
target that equals one of them becomes its name. A reconstruction stays float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SAME_AS = ("plain", "input")
"""What a target may be: the setting's own choice between these two."""


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to write and the metadata that `unpack` needs."""
    packed = dict(tensors)
    metadata = {}
    target = packed.get("target")
    for name in SAME_AS:
        if target is not None and name in packed and packed[name].equal(target):
            metadata["target"] = name
            del packed["target"]
            break
    return {name: _bytes_if_exact(tensor) for name, tensor in packed.items()}, metadata


def unpack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """What was given to `pack`, bit by bit."""
    found = {
        name: tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor
        for name, tensor in tensors.items()
    }
    if "target" in metadata:
        found["target"] = found[metadata["target"]]
    return found


def _bytes_if_exact(tensor: Tensor) -> Tensor:
    # Clones, for safetensors refuses tensors that share memory.
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.float32:
        small = (tensor * 255).round().clamp(0, 255).to(torch.uint8)
        if torch.equal(small.float() / 255, tensor):
            return small
    return tensor.clone()
