"""Patch order, the block-wise mask, the shuffle and where their randomness comes from."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import PatchEmbed
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.jigsaw import (
    _add_block,
    blockwise_mask,
    draw_masks,
    largest_block,
    shuffle_patches,
    shuffled_order,
    to_images,
    to_patches,
)


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("size", "patch"), [(32, 8), (48, 16), (24, 4), (8, 8)])
def test_patches_are_those_of_the_patch_embedding_and_go_back(size: int, patch: int) -> None:
    embedding = PatchEmbed(img_size=size, patch_size=patch, embed_dim=10).double()
    x = images(3, 3, size, size)
    weight, bias = embedding.proj.weight.flatten(1), embedding.proj.bias
    torch.testing.assert_close(to_patches(x, patch) @ weight.T + bias, embedding(x))
    assert torch.equal(to_patches(x, patch), nn.Unfold(patch, stride=patch)(x).mT)
    for lead in ((), (2,), (2, 3)):
        for channels in (1, 3):
            x = images(*lead, channels, size, size)
            assert torch.equal(to_images(to_patches(x, patch), patch, channels), x)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: to_patches(images(1, 3, 30, 32), 8), "30×32.*8×8"),
        (lambda: to_images(images(2, 8, 192), 8), "8"),
        (lambda: blockwise_mask(14, 27.0, random.Random(0)), "27"),
        (lambda: blockwise_mask(14, float("nan"), random.Random(0)), "nan"),
        (lambda: shuffle_patches(images(1, 3, 32, 32), torch.arange(4)[None], 8), "16.*4"),
    ],
)
def test_a_puzzle_that_is_none_is_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        call()


@given(grid=st.integers(1, 28), gamma=st.floats(0, 1), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_the_mask_keeps_its_limits_and_only_masked_patches_move(
    grid: int, gamma: float, seed: int
) -> None:
    mask, permutation = draw_masks(["x"], grid=grid, gamma=gamma, round=0, seed=seed)
    assert (mask.shape, mask.dtype) == ((1, grid * grid), torch.bool)
    assert 0 <= int(mask.sum()) <= int(grid * grid * gamma)
    order, places = permutation[0], torch.arange(grid * grid)
    assert torch.equal(order.sort().values, places)
    assert torch.equal(order[~mask[0]], places[~mask[0]])
    assert set(order[mask[0]].tolist()) == set(places[mask[0]].tolist())


def _first_block(rng: random.Random) -> tuple[int, int]:
    mask = torch.zeros(20, 20, dtype=torch.bool)
    added = _add_block(mask, largest_block(400), rng)
    height, width = int(mask.any(1).sum()), int(mask.any(0).sum())
    assert added == int(mask.sum()) == height * width  # a full rectangle
    return height, width


def test_blocks_have_the_papers_sizes_and_ratios() -> None:
    for patches, block in ((196, 75), (49, 18), (64, 24), (576, 220), (1, 0)):
        assert largest_block(patches) == block
    rng = random.Random(0)
    sides = [_first_block(rng) for _ in range(300)]
    areas = [height * width for height, width in sides]
    assert 6 <= min(areas) < max(areas) <= largest_block(400)  # from 8 patches on, sides rounded
    ratios = [height / width for height, width in sides]
    assert 0.25 <= min(ratios) <= 0.4
    assert 2.5 <= max(ratios) <= 4.0
    masks, _ = draw_masks([str(i) for i in range(50)], grid=14, gamma=1.0, round=0, seed=0)
    assert masks.sum(-1).min() >= 120
    assert masks.sum(-1).double().mean() >= 175


def test_every_order_is_as_likely() -> None:
    mask = torch.tensor([True, False, True, True])
    rng = random.Random(0)
    counts = Counter(tuple(shuffled_order(mask, rng).tolist()) for _ in range(6000))
    assert len(counts) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5  # chi2(5), 0.999


def test_the_shuffle_is_that_of_unfold_and_fold() -> None:
    """The authors' way: columns of nn.Unfold, reordered, through nn.Fold."""
    x = images(2, 3, 32, 32)
    mask, permutation = draw_masks(["a"], grid=4, gamma=0.9, round=0, seed=1)
    columns = nn.Unfold(8, stride=8)(x)
    reordered = columns.clone()
    reordered[..., mask[0]] = columns[..., permutation[0][mask[0]]]
    expected = nn.Fold(32, 8, stride=8)(reordered)
    assert torch.equal(shuffle_patches(x, permutation[0], 8), expected)


# where the randomness comes from ------------------------------------------------------------------

PUZZLE = {"grid": 14, "gamma": 0.27, "round": 0, "seed": 0}


def test_one_mask_is_pinned() -> None:
    """Stored results are paired by these masks: a change of the stream must not go unseen."""
    mask, permutation = draw_masks(["pinned"], grid=7, gamma=0.27, round=3, seed=7)
    masked = [8, 9, 10, 15, 16, 17, 18, 19, 22, 23, 24, 25, 26]
    assert mask[0].nonzero().flatten().tolist() == masked
    order = [8, 16, 18, 24, 10, 15, 26, 22, 19, 9, 23, 25, 17]
    assert permutation[0][mask[0]].tolist() == order


def test_company_and_global_state_do_not_matter() -> None:
    ids = ["n01440764_0", "b", "c"]
    random.seed(0)
    torch.manual_seed(0)
    mask, permutation = draw_masks(ids, **PUZZLE)
    state = random.getstate()
    for shown in (["c"], ["c", "n01440764_0"], ["z", "b", "b"], ids[::-1]):
        random.seed(1)
        torch.manual_seed(1)
        other_mask, other_permutation = draw_masks(shown, **PUZZLE)
        for row, image_id in enumerate(shown):
            if image_id in ids:
                assert torch.equal(other_mask[row], mask[ids.index(image_id)])
                assert torch.equal(other_permutation[row], permutation[ids.index(image_id)])
    random.seed(0)
    assert random.getstate() == state


@pytest.mark.parametrize("change", [{"round": 1}, {"seed": 1}, {"gamma": 0.28}])
def test_each_part_of_the_name_makes_another_mask(change: dict[str, float]) -> None:
    ids = [str(i) for i in range(20)]
    first, _ = draw_masks(ids, **PUZZLE)
    second, _ = draw_masks(ids, **{**PUZZLE, **change})
    assert (first == second).all(-1).sum() <= 1
    assert len({tuple(row.tolist()) for row in first}) == 20
