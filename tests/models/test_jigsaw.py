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
    blockwise_mask,
    draw_masks,
    largest_block,
    shuffle_patches,
    shuffled_order,
    to_images,
    to_patches,
)

GRIDS = st.integers(1, 28)
GAMMAS = st.floats(0, 1)


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# patches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "patch"), [(32, 8), (48, 16), (24, 4), (8, 8)])
def test_patches_are_those_of_the_patch_embedding(size: int, patch: int) -> None:
    embedding = PatchEmbed(img_size=size, patch_size=patch, embed_dim=10).double()
    x = images(3, 3, size, size)
    weight, bias = embedding.proj.weight.flatten(1), embedding.proj.bias
    torch.testing.assert_close(to_patches(x, patch) @ weight.T + bias, embedding(x))
    assert torch.equal(to_patches(x, patch), nn.Unfold(patch, stride=patch)(x).mT)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_to_images_is_the_inverse(lead: tuple[int, ...], channels: int) -> None:
    x = images(*lead, channels, 24, 24)
    patches = to_patches(x, 8)
    assert patches.shape == (*lead, 9, channels * 64)
    assert torch.equal(to_images(patches, 8, channels), x)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: to_patches(images(1, 3, 30, 32), 8), "30×32.*8×8"),
        (lambda: to_images(images(2, 8, 192), 8), "got 8"),
        (lambda: blockwise_mask(14, 27.0, random.Random(0)), "0 to 1, got 27"),
        (lambda: blockwise_mask(14, float("nan"), random.Random(0)), "nan"),
        (lambda: shuffle_patches(images(1, 3, 32, 32), torch.arange(4)[None], 8), "16.*4"),
    ],
)
def test_a_puzzle_that_is_none_is_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        call()


# the mask -----------------------------------------------------------------------------------------


@given(grid=GRIDS, gamma=GAMMAS, seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_the_mask_keeps_its_limits(grid: int, gamma: float, seed: int) -> None:
    mask = blockwise_mask(grid, gamma, random.Random(seed))
    assert mask.shape == (grid * grid,)
    assert mask.dtype == torch.bool
    assert 0 <= int(mask.sum()) <= int(grid * grid * gamma)


@pytest.mark.parametrize(("patches", "block"), [(196, 75), (49, 18), (64, 24), (576, 220), (1, 0)])
def test_the_largest_block_is_the_papers_in_proportion(patches: int, block: int) -> None:
    assert largest_block(patches) == block


def test_no_block_is_larger_than_the_largest() -> None:
    """Under a target of everything, the first rectangle alone decides the smallest masks."""
    rng = random.Random(0)
    areas = [_first_block(20, rng) for _ in range(300)]
    assert max(height * width for height, width in areas) <= largest_block(400)
    assert min(height * width for height, width in areas) >= 6  # 8 patches, sides rounded
    ratios = [height / width for height, width in areas]
    assert 0.25 <= min(ratios) <= 0.4
    assert 2.5 <= max(ratios) <= 4.0


def _first_block(grid: int, rng: random.Random) -> tuple[int, int]:
    from mjp_privacy.models.jigsaw import _add_block

    mask = torch.zeros(grid, grid, dtype=torch.bool)
    added = _add_block(mask, largest_block(grid * grid), rng)
    height, width = int(mask.any(1).sum()), int(mask.any(0).sum())
    assert added == int(mask.sum()) == height * width  # a full rectangle
    return height, width


def test_gamma_zero_masks_nothing_and_one_nearly_everything() -> None:
    mask, permutation = draw_masks(["a", "b"], grid=14, gamma=0.0, round=0, seed=0)
    assert not mask.any()
    assert torch.equal(permutation, torch.arange(196).expand(2, -1))
    mask, _ = draw_masks([str(i) for i in range(50)], grid=14, gamma=1.0, round=0, seed=0)
    assert mask.sum(-1).min() >= 120
    assert mask.sum(-1).double().mean() >= 175


# the shuffle --------------------------------------------------------------------------------------


@given(grid=st.integers(2, 16), gamma=GAMMAS, seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_permutation_moves_masked_patches_only(grid: int, gamma: float, seed: int) -> None:
    mask, permutation = draw_masks(["x"], grid=grid, gamma=gamma, round=0, seed=seed)
    order = permutation[0]
    assert torch.equal(order.sort().values, torch.arange(grid * grid))
    assert torch.equal(order[~mask[0]], torch.arange(grid * grid)[~mask[0]])
    assert set(order[mask[0]].tolist()) == set(mask[0].nonzero().flatten().tolist())


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


def test_one_mask_is_pinned() -> None:
    """Stored results are paired by these masks: a change of the stream must not go unseen."""
    mask, permutation = draw_masks(["pinned"], grid=7, gamma=0.27, round=3, seed=7)
    masked = [8, 9, 10, 15, 16, 17, 18, 19, 22, 23, 24, 25, 26]
    assert mask[0].nonzero().flatten().tolist() == masked
    order = [8, 16, 18, 24, 10, 15, 26, 22, 19, 9, 23, 25, 17]
    assert permutation[0][mask[0]].tolist() == order


PUZZLE = {"grid": 14, "gamma": 0.27, "round": 0, "seed": 0}


def test_order_and_company_of_the_images_do_not_matter() -> None:
    ids = ["n01440764_0", "b", "c"]
    mask, permutation = draw_masks(ids, **PUZZLE)
    for shown in (["c"], ["c", "n01440764_0"], ["z", "b", "b"], ids[::-1]):
        other_mask, other_permutation = draw_masks(shown, **PUZZLE)
        for row, image_id in enumerate(shown):
            if image_id in ids:
                assert torch.equal(other_mask[row], mask[ids.index(image_id)])
                assert torch.equal(other_permutation[row], permutation[ids.index(image_id)])


def test_global_random_state_does_not_matter() -> None:
    random.seed(0)
    torch.manual_seed(0)
    before = draw_masks(["a"], **PUZZLE)
    state = random.getstate()
    random.seed(1)
    torch.manual_seed(1)
    after = draw_masks(["a"], **PUZZLE)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    random.seed(0)
    assert random.getstate() == state


@pytest.mark.parametrize("change", [{"round": 1}, {"seed": 1}, {"gamma": 0.28}])
def test_each_part_of_the_name_makes_another_mask(change: dict[str, float]) -> None:
    ids = [str(i) for i in range(20)]
    first, _ = draw_masks(ids, **PUZZLE)
    second, _ = draw_masks(ids, **{**PUZZLE, **change})
    assert (first == second).all(-1).sum() <= 1
    assert len({tuple(row.tolist()) for row in first}) == 20
