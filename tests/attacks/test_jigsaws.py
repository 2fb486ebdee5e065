"""The jigsaw solver: conventions, planted answers, edges, determinism."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.jigsaw import border_costs, solve
from attacks.patch_variants import MASKED, agreed, misplaced, sorted_patches
from mjp_privacy.data import Preprocessing, load_images, open_images
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import load_model
from mjp_privacy.models.jigsaw import (
    blockwise_mask,
    draw_masks,
    shuffle_patches,
    shuffled_order,
    to_images,
    to_patches,
)
from tests.helpers.night import nightly
from tests.helpers.planted import planted_view

GRID, PATCH = 12, 16


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    """(n, 3, 192, 192) crops of scikit-image's photographs."""
    crops = load_images("embedded", size=GRID * PATCH)
    return torch.stack([item.image for item in crops if item.image_id.endswith("0_1")])


def puzzle(image: Tensor, gamma: float = 0.27) -> tuple[Tensor, Tensor, Tensor]:
    """(shuffled patches, mask, permutation)."""
    rng = random.Random(1)
    mask = blockwise_mask(GRID, gamma, rng)
    permutation = shuffled_order(mask, rng)
    shuffled = shuffle_patches(image[None], permutation[None], PATCH)
    return to_patches(shuffled, PATCH)[0], mask, permutation


def solved(shuffled: Tensor, mask: Tensor, **options: object) -> Tensor:
    known = shuffled.masked_fill(mask[:, None], torch.nan)  # what must not be read
    return solve(known, mask, shuffled[mask], grid=GRID, patch_size=PATCH, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(("gamma", "least"), [(0.27, 0.9), nightly(0.5, 0.9)])
def test_the_pieces_of_photographs_are_put_back(
    photographs: Tensor, gamma: float, least: float
) -> None:
    right = []
    for image in photographs:
        shuffled, mask, _ = puzzle(image, gamma)
        found = solved(shuffled, mask)
        # Equal patches are interchangeable: what counts is the picture.
        restored = torch.empty_like(shuffled)
        restored[found] = shuffled
        same = (restored == to_patches(image, PATCH)).all(-1)
        assert same[~mask].all()
        right.append(same[mask].double().mean())
        assert sorted(found.tolist()) == list(range(GRID**2))
        assert (found[~mask] == torch.arange(GRID**2)[~mask]).all()
    assert torch.stack(right).mean() >= least


def test_the_permutation_is_the_clients_own(photographs: Tensor) -> None:
    """Round trip: shuffling the restored picture by the answer gives the shuffled picture."""
    image = photographs[0]
    shuffled, mask, permutation = puzzle(image)
    found = solved(shuffled, mask)
    assert (found == permutation)[mask].double().mean() > 0.9
    assert not (permutation[mask] == permutation.argsort()[mask]).all()  # the inverse differs
    restored = torch.empty_like(shuffled)
    restored[found] = shuffled
    again = shuffle_patches(to_images(restored, PATCH)[None], found[None], PATCH)
    assert torch.equal(to_patches(again, PATCH)[0], shuffled)


def test_nothing_masked_is_the_identity(photographs: Tensor) -> None:
    patches = to_patches(photographs[0], PATCH)
    none = torch.zeros(GRID**2, dtype=torch.bool)
    assert torch.equal(solved(patches, none), torch.arange(GRID**2))
    one = none.clone()
    one[5] = True
    assert torch.equal(solved(patches, one), torch.arange(GRID**2))


def test_everything_masked_gives_a_permutation_with_neighbours_together() -> None:
    image = torch.linspace(0, 1, 32)[None, None, :] * torch.linspace(0.1, 1, 32)[None, :, None]
    image = image.expand(3, -1, -1)
    plain = to_patches(image, 8)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(16, dtype=torch.bool)
    found = solve(plain, mask, plain[order], grid=4, patch_size=8)
    assert sorted(found.tolist()) == list(range(16))
    at = order[found.argsort()].reshape(4, 4)  # the plain patch at each position
    right = (at[:, 1:] - at[:, :-1] == 1).double().mean()
    assert right > 0.5


def test_the_same_answer_every_time(photographs: Tensor) -> None:
    shuffled, mask, _ = puzzle(photographs[1], 0.5)
    torch.manual_seed(5)
    first = solved(shuffled, mask, rounds=5)
    torch.manual_seed(6)
    assert torch.equal(first, solved(shuffled, mask, rounds=5))


def test_true_neighbours_fit_best(photographs: Tensor) -> None:
    patches = to_patches(photographs[0], PATCH)
    sideways, downwards = border_costs(patches, PATCH)
    sideways.fill_diagonal_(torch.inf)
    downwards.fill_diagonal_(torch.inf)
    places = torch.arange(GRID**2).view(GRID, GRID)
    left, upper = places[:, :-1].flatten(), places[:-1].flatten()
    assert (sideways[left].argmin(1) == left + 1).double().mean() > 0.7
    assert (downwards[upper].argmin(1) == upper + GRID).double().mean() > 0.7


def test_costs_of_flat_and_of_tiny_patches_are_finite() -> None:
    for patch in (1, 2, 4):
        patches = torch.full((4, 3 * patch * patch), 0.5)
        patches[0] = 0
        for costs in border_costs(patches, patch):
            assert costs.isfinite().all()
            assert (costs >= 0).all()
    assert border_costs(torch.rand(1, 12), 2)[0].shape == (1, 1)


# patch_jigsaw: pictures of clients that shuffle patches and mask none, back in order --------------

COUNT, SIZE, CIFAR_PATCH = 6, 56, 7


@pytest.fixture(scope="module")
def enlarged() -> Tensor:
    source = open_images("embedded")
    prepare = Preprocessing(SIZE, SIZE, "bicubic")
    return torch.stack([prepare(source.decode(record)) for record in source.records[:COUNT]])


def found(enlarged: Tensor, setting: str, uploads: int) -> tuple[Tensor, Tensor]:
    """PSNR of the attack on the zoo's model without E_unk, and of what its client was fed."""
    attack = find_attack("patch_jigsaw", {"uploads": uploads})
    view, fed = planted_view(load_model("cifar_vit_jp"), attack, setting, images=enlarged)
    images = attack.run(view, generator=torch.Generator()).images
    target = enlarged if setting == "c" else fed.images
    return psnr(images.cpu().float(), target), psnr(fed.images, target)


def test_one_upload_gives_most_pictures_back_in_order(enlarged: Tensor) -> None:
    sorted_pictures, fed = found(enlarged, "c", 1)
    assert float(fed.max()) < 30
    assert int((sorted_pictures > 60).sum()) >= 3
    assert bool((sorted_pictures > fed - 0.1).all())


@pytest.mark.nightly
def test_six_uploads_give_pictures_back_in_order(enlarged: Tensor) -> None:
    """Also the fourth, whose borders mislead: as they were fed, the uploads agree on its places."""
    assert float(found(enlarged[2:4], "c", 6)[0].min()) > 60


def test_uploads_are_sorted_where_too_few_agree_as_they_were_fed(
    enlarged: Tensor,
) -> None:
    patches = to_patches(enlarged[:1], CIFAR_PATCH)[0]
    rounds = rounds_of(patches, 3, gamma=0.8)
    assert int(agreed(rounds)[1].sum()) > 20
    assert torch.equal(sorted_patches(rounds, CIFAR_PATCH), patches)


def test_pictures_with_masked_patches_are_left_to_other_attacks(
    enlarged: Tensor,
) -> None:
    attack = find_attack("patch_jigsaw")
    view, _ = planted_view(load_model("cifar_vit_mjp"), attack, "c", images=enlarged)
    reasons = attack.run(view, generator=torch.Generator()).inapplicable
    assert reasons == dict.fromkeys(range(COUNT), MASKED)
    assert "masked_span" in MASKED


def rounds_of(patches: Tensor, number: int, gamma: float = 0.27) -> Tensor:
    """The patches (N, p) of a picture as each of some uploads shuffled them."""
    shuffles = [
        draw_masks(["i"], grid=8, gamma=gamma, round=round, seed=1)[1][0] for round in range(number)
    ]
    return torch.stack([patches[order] for order in shuffles])


def test_places_on_which_two_uploads_agree_are_known() -> None:
    patches = torch.rand(64, 12, generator=torch.Generator().manual_seed(0))
    placed, free = agreed(rounds_of(patches, 8))
    assert int(free.sum()) <= 4
    assert torch.equal(placed[~free], patches[~free])
    assert sorted(placed[:, 0].tolist()) == sorted(patches[:, 0].tolist())


def test_a_patch_in_the_wrong_place_is_suspected(enlarged: Tensor) -> None:
    patches = to_patches(
        shuffle_patches(enlarged[:1], torch.arange(64)[None], CIFAR_PATCH),
        CIFAR_PATCH,
    )[0]
    exchanged = patches.clone()
    exchanged[[9, 54]] = patches[[54, 9]]
    before, after = misplaced(patches, CIFAR_PATCH), misplaced(exchanged, CIFAR_PATCH)
    assert bool(after[[9, 54]].all())
    assert int(before.sum()) < int(after.sum())
