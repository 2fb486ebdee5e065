"""Packs images to be stored in little space without loss.

Images whose values are all multiples of 1/255 (every original, plain or shuffled) become bytes. A
target that equals the plain or the fed images is replaced by that name. A reconstruction stays
float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SAME_AS = ("plain", "input")
"""The tensors that a target may be equal to, depending on the setting."""


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, and the metadata that `unpack` needs."""
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
    """The tensors that were given to `pack`, bit for bit."""
    unpacked = {
        name: tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor
        for name, tensor in tensors.items()
    }
    if "target" in metadata:
        unpacked["target"] = unpacked[metadata["target"]]
    return unpacked


def _bytes_if_exact(tensor: Tensor) -> Tensor:
    """The tensor as uint8 if that loses nothing, else a copy."""
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.float32:
        small = (tensor * 255).round().clamp(0, 255).to(torch.uint8)
        if torch.equal(small.float() / 255, tensor):
            return small
    return tensor.clone()  # safetensors refuses tensors that share memory
