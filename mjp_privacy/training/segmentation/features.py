"""The maps of features that a head reads from a network: of a ViT's blocks, of a Swin's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mjp_privacy.training.config import TrainingConfig

PYRAMID = 4
"""Maps that are read off a ViT, at the ends of the quarters of its blocks."""


@dataclass(frozen=True)
class Maps:
    """What a network offers: the width of each map, and the factor by which a pyramid resizes it.

    A ViT's maps all have one size, so a pyramid makes them 4, 2, 1 and ½ times as large; a Swin's
    stages are a pyramid already.
    """

    widths: tuple[int, ...]
    factors: tuple[float, ...]


def maps_of(config: TrainingConfig) -> Maps:
    """The maps of the config's network: `features` gives as many tensors."""
    width = config.model.embed_dim
    if config.family == "vit":
        factors = (4.0, 2.0, 1.0, 0.5)
        return Maps((width,) * PYRAMID, factors)
    stages = range(len(config.stages or ()))
    return Maps(tuple(width << stage for stage in stages), (1.0,) * len(stages))


def features(network: Any, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """The maps (B, D, h, w) of normalised images (B, 3, S, S), the last one after the last norm.

    mask: as the network itself takes it, True where a patch is shuffled
    """
    read = _of_vit if network.family == "vit" else _of_swin
    return read(network, images, mask)


def block_ends(depth: int) -> Sequence[int]:
    """Indices of the blocks that a ViT's maps come from: 2, 5, 8 and 11 of twelve."""
    return [max(depth * quarter // PYRAMID, 1) - 1 for quarter in range(1, PYRAMID + 1)]


def _of_vit(network: Any, images: Tensor, mask: Tensor | None) -> list[Tensor]:
    tokens, kept = network.embed(images, mask), []
    for block in network.blocks:
        tokens = block(tokens)
        kept.append(tokens)
    read = [kept[end] for end in block_ends(len(kept))]
    read[-1] = network.norm(read[-1])
    grid = network.grid
    return [  # without the class token in front, and a distillation token behind
        tokens[:, 1 : grid * grid + 1].transpose(1, 2).unflatten(2, (grid, grid)) for tokens in read
    ]


def _of_swin(network: Any, images: Tensor, mask: Tensor | None) -> list[Tensor]:
    z, read = network.patch_embed(images), []
    if network.absolute_pos_embed is not None:
        z = z + network.positions(mask).unflatten(1, (network.grid, network.grid))
    for stage in network.layers:
        z = stage(z)
        read.append(z)
    read[-1] = network.norm(read[-1])
    return [z.permute(0, 3, 1, 2).contiguous() for z in read]
