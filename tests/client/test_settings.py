"""Settings a, b, c: what the client is fed, and what its reconstruction is compared with."""

import pytest
import torch
from torch import Tensor

from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput, Setting, Truth
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches
from tests.helpers.models import some_images, some_labels

IDS = ("n01_1", "n02_2", "n03_3")


def prepared(setting: Setting, images: Tensor, **changes: float) -> ClientInput:
    facts = {"patch_size": 8, "gamma": 0.9, "round": 0, "seed": 0, **changes}
    return setting.prepare(images, some_labels(len(images)), IDS[: len(images)], **facts)


def test_there_are_three() -> None:
    assert list(SETTINGS) == ["a", "b", "c"]
    assert [SETTINGS[name].name for name in SETTINGS] == ["a", "b", "c"]
    assert [SETTINGS[name].shuffles for name in SETTINGS] == [False, True, True]
    with pytest.raises(UserError, match=r"Unknown setting 'd'.* Available: a, b, c"):
        SETTINGS["d"]


def test_a_feeds_and_scores_the_plain_image() -> None:
    images = some_images(3)
    inputs = prepared(SETTINGS["a"], images)
    assert torch.equal(inputs.images, images)
    assert inputs.mask is None
    assert inputs.permutation is None
    truth = Truth(images, some_labels(3), IDS)
    assert torch.equal(SETTINGS["a"].target(truth, inputs), images)


@pytest.mark.parametrize("name", ["b", "c"])
def test_b_and_c_feed_the_shuffled_image(name: str) -> None:
    images = some_images(3)
    inputs = prepared(SETTINGS[name], images, round=2, seed=5)
    mask, permutation = draw_masks(IDS, grid=4, gamma=0.9, round=2, seed=5)
    assert torch.equal(inputs.mask, mask)
    assert torch.equal(inputs.permutation, permutation)
    assert torch.equal(inputs.images, shuffle_patches(images, permutation, 8))
    assert not torch.equal(inputs.images, images)
    assert torch.equal(inputs.labels, some_labels(3))
    assert inputs.image_ids == IDS


def test_b_is_scored_against_the_shuffled_and_c_against_the_plain_image() -> None:
    images = some_images(3)
    truth = Truth(images, some_labels(3), IDS)
    b, c = (prepared(SETTINGS[name], images) for name in "bc")
    assert torch.equal(b.images, c.images)  # the same puzzle: comparisons are paired
    assert torch.equal(b.mask, c.mask)
    assert torch.equal(SETTINGS["b"].target(truth, b), b.images)
    assert torch.equal(SETTINGS["c"].target(truth, c), images)


@pytest.mark.parametrize("name", ["b", "c"])
def test_an_empty_mask_leaves_the_image_plain(name: str) -> None:
    images = some_images(3)
    inputs = prepared(SETTINGS[name], images, gamma=0.0)
    assert torch.equal(inputs.images, images)
    assert not inputs.mask.any()


def test_images_alone_and_together_are_shuffled_alike() -> None:
    images = some_images(3)
    together = prepared(SETTINGS["b"], images)
    alone = prepared(SETTINGS["b"], images[:1])
    assert torch.equal(together.images[:1], alone.images)


@pytest.mark.parametrize("changes", [{"patch_size": 7}, {"gamma": 1.5}])
def test_what_cannot_be_shuffled_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"32×32 .* 7×7 .* multiple|expected 0 to 1, got 1.5"):
        prepared(SETTINGS["b"], some_images(1), **changes)


def test_an_image_that_is_no_square_is_refused() -> None:
    with pytest.raises(UserError, match="use square images"):
        prepared(SETTINGS["b"], some_images(1)[..., :16])
