"""patch_jigsaw: pictures of clients that shuffle patches and mask none, back in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.patch_variants import MASKED, agreed, misplaced, sorted_patches
from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import load_model
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches, to_patches
from tests.helpers.planted import planted_view

COUNT, SIZE, PATCH = 6, 56, 7


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    source = open_images("embedded")
    prepare = Preprocessing(SIZE, SIZE, "bicubic")
    return torch.stack([prepare(source.decode(record)) for record in source.records[:COUNT]])


def found(photographs: Tensor, setting: str, uploads: int) -> tuple[Tensor, Tensor]:
    """PSNR of the attack on the zoo's model without E_unk, and of what its client was fed."""
    attack = find_attack("patch_jigsaw", {"uploads": uploads})
    view, fed = planted_view(load_model("cifar_vit_jp"), attack, setting, images=photographs)
    images = attack.run(view, generator=torch.Generator()).images
    target = photographs if setting == "c" else fed.images
    return psnr(images.cpu().float(), target), psnr(fed.images, target)


def test_one_upload_gives_most_pictures_back_in_order(photographs: Tensor) -> None:
    sorted_pictures, fed = found(photographs, "c", 1)
    assert float(fed.max()) < 30
    assert int((sorted_pictures > 60).sum()) >= 3
    assert bool((sorted_pictures > fed - 0.1).all())


@pytest.mark.nightly
def test_six_uploads_give_pictures_back_in_order(photographs: Tensor) -> None:
    """Also the fourth, whose borders mislead: as they were fed, the uploads agree on its places."""
    assert float(found(photographs[2:4], "c", 6)[0].min()) > 60


def test_uploads_are_sorted_where_too_few_agree_as_they_were_fed(photographs: Tensor) -> None:
    patches = to_patches(photographs[:1], PATCH)[0]
    rounds = rounds_of(patches, 3, gamma=0.8)
    assert int(agreed(rounds)[1].sum()) > 20
    assert torch.equal(sorted_patches(rounds, PATCH), patches)


def test_as_fed_nothing_is_sorted(photographs: Tensor) -> None:
    assert float(found(photographs, "b", 1)[0].min()) > 60


def test_pictures_with_masked_patches_are_left_to_other_attacks(photographs: Tensor) -> None:
    attack = find_attack("patch_jigsaw")
    view, _ = planted_view(load_model("cifar_vit_mjp"), attack, "c", images=photographs)
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


def test_a_patch_in_the_wrong_place_is_suspected(photographs: Tensor) -> None:
    patches = to_patches(shuffle_patches(photographs[:1], torch.arange(64)[None], PATCH), PATCH)[0]
    exchanged = patches.clone()
    exchanged[[9, 54]] = patches[[54, 9]]
    before, after = misplaced(patches, PATCH), misplaced(exchanged, PATCH)
    assert bool(after[[9, 54]].all())
    assert int(before.sum()) < int(after.sum())
