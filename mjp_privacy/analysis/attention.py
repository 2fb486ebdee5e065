"""Where the class token of the last block looks (Fig. 8), and how much its heads differ.

The paper calls MJP's heads “more diverse and content-aware” and prints no number. Two are computed
here, both from the class token's attention to the patches, scaled to sum 1, and both the
generalised Jensen-Shannon divergence of n maps (the entropy of their mean, minus the mean of their
entropies), divided by log n: 0 where all are equal, 1 where no two look at the same patch.

    head_diversity    of the heads of one image, the mean over the images
    image_diversity   of the images in one head, the mean over the heads ("content-aware")
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.vit import Attention

Maps = NDArray[np.float64]
BATCH = 32


@dataclass(frozen=True)
class LastAttention:
    """maps (images, heads, G, G), each of sum 1; NaN for a divergence of fewer than two maps.

    spread: the entropy of a map over that of an even one; 1: it looks everywhere alike
    """

    maps: Maps
    head_diversity: float
    image_diversity: float
    spread: float


def last_attention(model: MJPVisionTransformer, x: Tensor) -> LastAttention:
    """The last block's attention on normalised images x (B, 3, S, S), unshuffled."""
    weights = np.concatenate([class_attention(model, part) for part in x.split(BATCH)])
    shares = weights / weights.sum(axis=-1, keepdims=True)
    images, heads, patches = shares.shape
    spread = float(_entropy(shares).mean()) / math.log(patches)
    return LastAttention(
        shares.reshape(images, heads, model.grid, model.grid),
        divergence(shares.transpose(1, 0, 2)),
        divergence(shares),
        spread,
    )


@torch.no_grad()
def class_attention(model: MJPVisionTransformer, x: Tensor) -> Maps:
    """(B, heads, N): the last block's softmax weights of the class token on the patches."""
    attention = model.blocks[-1].attn
    assert isinstance(attention, Attention)
    entering: list[Tensor] = []
    hook = attention.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    try:
        model.forward_features(x)
    finally:
        hook.remove()
    tokens = entering[0]
    split = attention.qkv(tokens).reshape(*tokens.shape[:2], 3, attention.num_heads, -1)
    query, key = split[:, 0, 0], split[:, :, 1]  # (B, heads, d) of [CLS]; (B, tokens, heads, d)
    scores = torch.einsum("bhd,bnhd->bhn", query * attention.scale, key)
    weights: Maps = scores.double().softmax(dim=-1)[..., 1 : model.grid**2 + 1].cpu().numpy()
    return weights


def divergence(maps: Maps) -> float:
    """The divergence of the maps along the first axis of (n, ..., N), over log n, its mean."""
    if len(maps) < 2:
        return math.nan
    gained = _entropy(maps.mean(axis=0)) - _entropy(maps).mean(axis=0)
    return float(gained.mean()) / math.log(len(maps))


def _entropy(maps: Maps) -> Maps:
    """In nats, along the last axis; a share of 0 adds nothing."""
    logs = np.log(np.where(maps > 0, maps, 1))
    entropy: Maps = -(maps * logs).sum(axis=-1)
    return entropy
