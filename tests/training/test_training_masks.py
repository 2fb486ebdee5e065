"""Masks and permutations made many at a time, against the authors' generator one by one."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mjp_privacy.models.jigsaw import (
    blockwise_mask,
    shuffle_patches,
    to_patches,
)
from mjp_privacy.training import puzzles as blockwise
from mjp_privacy.training.puzzles import CHUNK, Puzzles, apply, blockwise_masks, shuffled_orders
from tests.helpers.training import small

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("grid", "gamma"), [(14, 0.03), (14, 0.27), (8, 0.27), (8, 0.03), (8, 0.9), (4, 0.5)]
)
def test_the_masks_are_distributed_as_the_authors(grid: int, gamma: float) -> None:
    """Four standard errors of the difference, on the count and on every position."""
    many, few = 1200, 600
    fast = blockwise_masks(many, grid=grid, gamma=gamma, generator=generator()).double()
    rng = random.Random(1)
    slow = torch.stack([blockwise_mask(grid, gamma, rng) for _ in range(few)]).double()
    empty = ((fast.sum(1) == 0).double(), (slow.sum(1) == 0).double())
    for one, other in ((fast.sum(1), slow.sum(1)), empty):
        error = math.sqrt(one.var() / len(one) + other.var() / len(other))
        assert abs(one.mean() - other.mean()) <= 4 * error + 1e-12
    share = slow.mean(0)
    error = torch.sqrt(share * (1 - share) * (1 / many + 1 / few)) + 2e-3
    assert bool(((fast.mean(0) - share).abs() < 4.5 * error).all())


@pytest.mark.parametrize(("grid", "gamma"), [(14, 0.03), (14, 0.27), (8, 0.9), (8, 0.27)])
def test_the_attempts_are_enough(grid: int, gamma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many more attempts nearly no mask would have grown further."""
    number = 300
    few = blockwise.attempts_needed(grid * grid, gamma)
    monkeypatch.setattr(blockwise, "attempts_needed", lambda patches, share: 2 * few)
    ended = []
    original = torch.where

    def counting(condition: Tensor, *rest: object) -> Tensor:
        result = original(condition, *rest)  # type: ignore[call-overload]
        if condition.shape == (number,):
            ended.append(condition)
        return result

    monkeypatch.setattr(torch, "where", counting)
    blockwise_masks(number, grid=grid, gamma=gamma, generator=generator())
    late = torch.stack(ended[few:]).any(0).sum().item()
    assert late <= 1


def test_no_mask_exceeds_its_target_and_none_is_drawn_at_zero() -> None:
    assert not blockwise_masks(50, grid=8, gamma=0.0, generator=generator()).any()
    masks = blockwise_masks(500, grid=8, gamma=0.27, generator=generator())
    assert masks.sum(1).max() <= 17
    assert torch.equal(masks, blockwise_masks(500, grid=8, gamma=0.27, generator=generator()))


def test_permutations_shuffle_the_masked_patches_among_themselves() -> None:
    masks = blockwise_masks(400, grid=6, gamma=0.4, generator=generator())
    orders = shuffled_orders(masks, generator(5))
    places = torch.arange(36).expand_as(orders)
    assert torch.equal(orders.sort(-1).values, places)
    assert torch.equal(orders[~masks], places[~masks])
    assert bool(masks.gather(1, orders)[masks].all())


def test_every_permutation_of_three_is_equally_likely() -> None:
    mask = torch.tensor([[True, False, True, True]]).expand(6000, 4)
    orders = shuffled_orders(mask, generator(2))
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert bool(((counts - 1000).abs() < 4.5 * math.sqrt(1000 * 5 / 6)).all())


# puzzles of a run ---------------------------------------------------------------------------------


def test_half_of_the_steps_after_the_first_epoch_are_shuffled() -> None:
    config = small(recipe={"epochs": 100}, jigsaw={"first_epoch": 10})
    puzzles = Puzzles(config, 40, CPU)
    assert not any(puzzles.shuffled(step) for step in range(400))
    later = sum(puzzles.shuffled(step) for step in range(400, 4000))
    assert abs(later - 1800) < 4 * math.sqrt(3600 / 4)
    always = Puzzles(replace(config, jigsaw=replace(config.jigsaw, share=1.0)), 40, CPU)
    never = Puzzles(replace(config, jigsaw=replace(config.jigsaw, shuffle="none")), 40, CPU)
    assert all(always.shuffled(step) for step in range(400, 900))
    assert not any(never.shuffled(step) for step in range(4000))


def test_one_mask_serves_the_batch_and_every_process() -> None:
    config = small(jigsaw={"share": 1.0, "first_epoch": 0})
    one, other = (Puzzles(config, 10, CPU, part) for part in (slice(0, 3), slice(3, 6)))
    for step in (0, 7, CHUNK - 1, CHUNK, 5):  # also backwards
        assert one.at(step).mask.shape == (1, 16)
        assert torch.equal(one.at(step).mask, other.at(step).mask)
        assert torch.equal(one.at(step).permutation, other.at(step).permutation)
    assert not torch.equal(one.at(0).permutation, one.at(1).permutation)


def test_a_mask_an_image_is_sliced_by_process() -> None:
    config = small(jigsaw={"share": 1.0, "first_epoch": 0, "mask_per": "image"})
    whole = Puzzles(config, 10, CPU).at(3)
    halves = [Puzzles(config, 10, CPU, part).at(3) for part in (slice(0, 3), slice(3, 6))]
    assert whole.mask.shape == (6, 16)
    assert torch.equal(torch.cat([half.mask for half in halves]), whole.mask)
    assert torch.equal(torch.cat([half.permutation for half in halves]), whole.permutation)
    assert len(whole.mask.unique(dim=0)) > 1


def test_images_are_fed_as_the_attacked_client_shuffles_them() -> None:
    puzzle = Puzzles(small(jigsaw={"share": 1.0, "first_epoch": 0}), 10, CPU).at(0)
    images = torch.rand(6, 3, 28, 28)
    assert puzzle.permutation is not None
    expected = shuffle_patches(images, puzzle.permutation.expand(6, -1), 7)
    assert torch.equal(apply(puzzle, images, 7), expected)


def test_row_c_moves_whole_patches_and_gives_all_of_them_one_order_of_pixels() -> None:
    """Read off the shuffled pictures alone."""
    config = small(
        model={"unknown_embedding": False, "dal": "none"},
        jigsaw={"shuffle": "patches_and_pixels", "share": 1.0, "first_epoch": 0},
    )

    def shuffled(seed: int) -> Tensor:
        return apply(Puzzles(replace(config, seed=seed), 10, CPU).at(0), images, 7)

    images = torch.arange(2 * 3 * 28 * 28).reshape(2, 3, 28, 28)
    plain, found = (to_patches(x, 7).unflatten(-1, (3, 49)) for x in (images, shuffled(0)))
    first = plain[0, :, 0, 0].tolist()
    source = [first.index(low) for low in found[0, :, 0].amin(-1).tolist()]
    pixels = [plain[0, source[0], 0].tolist().index(value) for value in found[0, 0, 0].tolist()]
    for order in (source, pixels):
        assert sorted(order) == list(range(len(order)))
        assert order != sorted(order)
    assert torch.equal(found, plain[:, source][..., pixels])
    assert torch.equal(shuffled(0), shuffled(0))
    assert not torch.equal(shuffled(0), shuffled(1))
