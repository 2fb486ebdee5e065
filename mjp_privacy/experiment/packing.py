"""Packs a block's tensors for its file, without loss, so that any reader knows what numbers mean.

    images                 reconstructions: always float32 in [0, 1]
    plain, input, target   private images: bytes where all values are multiples of 1/255 (every
                           picture that was not resampled after it was decoded), else float32
    mask, permutation      as they are

The metadata name the scale of every tensor: value = stored number x scale. `"scale:plain": "1/255"`
says that bytes are stored, `"scale:images": "1"` that the numbers are the values themselves. A
target that equals the plain or the fed images is not stored twice: `"target": "plain"` names it.
In files written before there were scales, reconstructions may be bytes too; there uint8 says it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

RECONSTRUCTION = "images"
SAME_AS = ("plain", "input")
"""The tensors that a target may be equal to, depending on the setting."""
BYTES, VALUES = "1/255", "1"
"""The scales: of bytes, and of numbers that are the values themselves."""


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, and the metadata that any reader needs."""
    if RECONSTRUCTION in tensors and tensors[RECONSTRUCTION].dtype != torch.float32:
        raise TypeError(f"reconstructions are float32, got {tensors[RECONSTRUCTION].dtype}")
    packed = dict(tensors)
    metadata = {}
    target = packed.get("target")
    for name in SAME_AS:
        if target is not None and name in packed and packed[name].equal(target):
            metadata["target"] = name
            del packed["target"]
            break
    stored = {
        # a copy, because safetensors refuses tensors that share memory
        name: tensor.cpu().contiguous().clone() if name == RECONSTRUCTION else _smallest(tensor)
        for name, tensor in packed.items()
    }
    scales = {f"scale:{name}": _scale(tensor) for name, tensor in stored.items()}
    return stored, {**metadata, **scales}


def unpack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors that were given to `pack`, bit for bit; files without scales are read too."""
    unpacked = {
        name: tensor.float() / 255 if _scale_of(name, tensor, metadata) == BYTES else tensor
        for name, tensor in tensors.items()
    }
    if metadata.get("target") in unpacked:
        unpacked["target"] = unpacked[metadata["target"]]
    return unpacked


def _scale(tensor: Tensor) -> str:
    return BYTES if tensor.dtype == torch.uint8 else VALUES


def _scale_of(name: str, tensor: Tensor, metadata: Mapping[str, str]) -> str:
    return metadata.get(f"scale:{name}", _scale(tensor))


def _smallest(tensor: Tensor) -> Tensor:
    """The tensor as uint8 if that loses nothing, else a copy."""
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.float32:
        small = (tensor * 255).round().clamp(0, 255).to(torch.uint8)
        if torch.equal(small.float() / 255, tensor):
            return small
    return tensor.clone()


def appended(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of some images, then those of others; zeros where one side lacks a tensor."""
    lengths = [len(next(iter(tensors.values()))) for tensors in (old, new)]
    joined = {}
    for name in {**old, **new}:
        example = old[name] if name in old else new[name]
        parts = [
            tensors.get(name, example.new_zeros(length, *example.shape[1:]))
            for tensors, length in zip((old, new), lengths, strict=True)
        ]
        joined[name] = torch.cat(parts)
    return joined
