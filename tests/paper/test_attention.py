"""Attention of the last block: beside a computation by hand, and divergences that are known."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from mjp_privacy.models import LoadedModel
from mjp_privacy.paper.positions import BATCH, class_attention, divergence, last_attention
from tests.helpers.models import PATCHES, some_images, tiny


def by_hand(model: LoadedModel, x: torch.Tensor) -> torch.Tensor:
    """(B, heads, N): the class token's softmax in the last block, head by head."""
    last = model.blocks[-1]
    tokens = last.norm1(model.blocks[:-1](model.embed(x)))
    width, heads = model.embed_dim, 3
    weight, bias = last.attn.qkv.weight, last.attn.qkv.bias
    query = tokens[:, :1] @ weight[:width].T + bias[:width]
    key = tokens @ weight[width : 2 * width].T + bias[width : 2 * width]
    maps = []
    for part in torch.arange(width).chunk(heads):
        scores = query[..., part] @ key[..., part].mT / math.sqrt(width // heads)
        maps.append(scores.softmax(-1)[:, 0, 1:])
    return torch.stack(maps, dim=1)


def test_the_maps_are_those_computed_by_hand() -> None:
    model, x = tiny(unknown_embedding=True), some_images(3)
    expected = by_hand(model, x).detach().numpy()
    assert class_attention(model, x) == pytest.approx(expected, rel=1e-9)
    assert (expected.sum(-1) < 1).all()  # the class token looks at itself, too
    maps = last_attention(model, x).maps
    assert maps.shape == (3, 3, 4, 4)
    assert maps.sum((-1, -2)) == pytest.approx(1)
    assert maps[1, 2].flatten() == pytest.approx(expected[1, 2] / expected[1, 2].sum())


def test_no_hook_stays_and_batches_change_nothing() -> None:
    model, x = tiny(), some_images(BATCH + 3)
    whole = last_attention(model, x)
    assert not model.blocks[-1].attn._forward_pre_hooks
    assert whole.maps[-1] == pytest.approx(last_attention(model, x[-1:]).maps[0])


def test_a_first_block_without_norm_is_looked_into_as_well() -> None:
    model = tiny(depth=1, first_block="closed_form")
    assert last_attention(model, some_images(2)).maps.shape == (2, 3, 4, 4)


def test_divergence_of_equal_and_of_disjoint_maps() -> None:
    even = np.full((4, 1, 16), 1 / 16)
    assert divergence(even) == pytest.approx(0)
    apart = np.eye(16)[:4, None]
    assert divergence(apart) == pytest.approx(1)
    assert math.isnan(divergence(even[:1]))


def test_the_divergence_of_two_maps_is_jensen_and_shannons() -> None:
    maps = np.random.default_rng(0).dirichlet(np.ones(PATCHES), size=(2, 5))
    pairs = zip(*maps, strict=True)
    expected = np.mean([jensenshannon(one, other, base=2) ** 2 for one, other in pairs])
    assert divergence(maps) == pytest.approx(expected)


def test_heads_and_images_are_told_apart() -> None:
    """Heads that differ on equal images, then equal heads on images that differ."""
    model = tiny()
    same = some_images(1).expand(4, -1, -1, -1)
    assert last_attention(model, same).image_diversity == pytest.approx(0, abs=1e-12)
    assert last_attention(model, same).head_diversity > 1e-4
    with torch.no_grad():
        width = model.embed_dim
        for part in (slice(0, width), slice(width, 2 * width)):
            weight, bias = model.blocks[-1].attn.qkv.weight, model.blocks[-1].attn.qkv.bias
            weight[part] = weight[part][:8].repeat(3, 1)
            bias[part] = bias[part][:8].repeat(3)
    several = last_attention(model, some_images(4))
    assert several.head_diversity == pytest.approx(0, abs=1e-12)
    assert several.image_diversity > 1e-6
    assert 0.5 < several.spread <= 1
