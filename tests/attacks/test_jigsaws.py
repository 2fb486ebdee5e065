"""The jigsaw solver: conventions, planted answers, edges, determinism; and patch_jigsaw on clients
that shuffle patches and mask none."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.jigsaw import solve
from attacks.patch_variants import agreed, sorted_patches
from mjp_privacy.data import Preprocessing, load_images, open_images
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import load_model
from mjp_privacy.models.jigsaw import (
    Grid,
    blockwise_mask,
    draw_masks,
    shuffle_patches,
    shuffled_order,
    to_patches,
)
from tests.helpers.planted import planted_view

GRID, PATCH = 12, 16
PLACES = torch.arange(GRID**2)


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    """(n, 3, 192, 192) crops of scikit-image's photographs."""
    crops = load_images("embedded", size=GRID * PATCH)
    return torch.stack([item.image for item in crops if item.image_id.endswith("0_1")])


def puzzle(image: Tensor, gamma: float = 0.27) -> tuple[Tensor, Tensor, Tensor]:
    """(shuffled patches, mask, permutation)."""
    rng = random.Random(1)
    mask = blockwise_mask(Grid(GRID, GRID), gamma, rng)
    permutation = shuffled_order(mask, rng)
    shuffled = shuffle_patches(image[None], permutation[None], PATCH)
    return to_patches(shuffled, PATCH)[0], mask, permutation


def solved(shuffled: Tensor, mask: Tensor, **options: object) -> Tensor:
    known = shuffled.masked_fill(mask[:, None], torch.nan)  # what must not be read
    return solve(known, mask, shuffled[mask], grid=Grid(GRID, GRID), patch_size=PATCH, **options)


def test_the_permutation_is_the_clients_own_and_the_same_every_time(photographs: Tensor) -> None:
    shuffled, mask, permutation = puzzle(photographs[0])
    found = solved(shuffled, mask)
    assert (found == permutation)[mask].double().mean() > 0.9
    assert not (permutation[mask] == permutation.argsort()[mask]).all()  # the inverse differs
    assert (found[~mask] == PLACES[~mask]).all()
    assert sorted(found.tolist()) == PLACES.tolist()
    shuffled, mask, _ = puzzle(photographs[1], 0.5)
    torch.manual_seed(5)
    first = solved(shuffled, mask, rounds=5)
    torch.manual_seed(6)
    assert torch.equal(first, solved(shuffled, mask, rounds=5))


@pytest.mark.parametrize("masked", [[], [5]])
def test_nothing_masked_is_the_identity(photographs: Tensor, masked: list[int]) -> None:
    mask = torch.isin(PLACES, torch.tensor(masked))
    assert torch.equal(solved(to_patches(photographs[0], PATCH), mask), PLACES)


def test_everything_masked_gives_a_permutation_with_neighbours_together() -> None:
    ramp = torch.linspace(0.1, 1, 32)
    plain = to_patches((ramp * ramp[:, None]).expand(3, -1, -1), 8)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(16, dtype=torch.bool)
    found = solve(plain, mask, plain[order], grid=Grid(4, 4), patch_size=8)
    assert sorted(found.tolist()) == list(range(16))
    at = order[found.argsort()].reshape(4, 4)  # the plain patch at each position
    assert (at[:, 1:] - at[:, :-1] == 1).double().mean() > 0.5


# patch_jigsaw -------------------------------------------------------------------------------------

COUNT, SIZE, CIFAR_PATCH = 6, 56, 7


@pytest.fixture(scope="module")
def enlarged() -> Tensor:
    source = open_images("embedded")
    prepare = Preprocessing(SIZE, SIZE, "bicubic")
    return torch.stack([prepare(source.decode(record)) for record in source.records[:COUNT]])


def test_one_upload_gives_most_pictures_back_in_order(enlarged: Tensor) -> None:
    """Of the zoo's model without E_unk."""
    attack = find_attack("patch_jigsaw")
    view, fed = planted_view(load_model("cifar_vit_jp"), attack, "c", images=enlarged)
    images = attack.run(view, generator=torch.Generator()).images
    sorted_pictures, before = psnr(images.cpu().float(), enlarged), psnr(fed.images, enlarged)
    assert float(before.max()) < 30
    assert int((sorted_pictures > 60).sum()) >= 3
    assert bool((sorted_pictures > before - 0.1).all())


def test_uploads_agree_on_places_and_sort_the_rest(enlarged: Tensor) -> None:
    """Three that shuffle nearly all agree on few places, and on some by chance."""
    patches = to_patches(enlarged[:1], CIFAR_PATCH)[0]
    given = {"grid": Grid(8, 8), "gamma": 0.8, "seed": 1}
    orders = [draw_masks(["i"], **given, round=round)[1][0] for round in range(3)]
    rounds = torch.stack([patches[order] for order in orders])
    assert int(agreed(rounds)[1].sum()) > 20
    assert torch.equal(sorted_patches(rounds, Grid(8, 8), CIFAR_PATCH), patches)
