"""What the client is fed in settings a, b and c, its puzzles and its augmentations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import SETTINGS, Setting, augmented, step_puzzles
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput, Truth
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches
from tests.helpers.models import PATCH, some_images, some_labels

IDS = ("n01_1", "n02_2", "n03_3")


def prepared(setting: Setting, images: Tensor, **changes: float) -> ClientInput:
    facts = {"patch_size": 8, "gamma": 0.9, "round": 0, "seed": 0, **changes}
    return setting.prepare(images, some_labels(len(images)), IDS[: len(images)], **facts)


def test_a_feeds_the_plain_image_b_and_c_the_shuffled_one() -> None:
    """The same puzzle in both, so that comparisons are paired; c is scored against the plain."""
    images = some_images(3)
    truth = Truth(images, some_labels(3), IDS)
    mask, permutation = draw_masks(IDS, grid=4, gamma=0.9, round=2, seed=5)
    shuffled = shuffle_patches(images, permutation, 8)
    fed = {"a": images, "b": shuffled, "c": shuffled}
    scored = {"a": images, "b": shuffled, "c": images}
    assert list(SETTINGS) == list(fed)
    for name, expected in fed.items():
        inputs = prepared(SETTINGS[name], images, round=2, seed=5)
        assert torch.equal(inputs.images, expected)
        assert torch.equal(inputs.labels, some_labels(3))
        assert inputs.image_ids == IDS
        assert torch.equal(SETTINGS[name].target(truth, inputs), scored[name])
        assert SETTINGS[name].shuffles == (name != "a") == (inputs.mask is not None)
        if inputs.mask is not None:
            assert torch.equal(inputs.mask, mask)
            assert torch.equal(inputs.permutation, permutation)
    empty = prepared(SETTINGS["c"], images, gamma=0.0)
    assert torch.equal(empty.images, images)
    assert not empty.mask.any()


@pytest.mark.parametrize("changes", [{"patch_size": 7}, {"gamma": 1.5}])
def test_what_cannot_be_shuffled_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"7×7|1.5"):
        prepared(SETTINGS["b"], some_images(1), **changes)


def fed(
    client: ClientConfig, ids: list[str], round: int = 0, plain: Tensor | None = None
) -> ClientInput:
    """What such a client feeds in setting c."""
    plain = some_images(len(ids)) if plain is None else plain
    named = {"patch_size": PATCH, "round": round, "seed": 0}
    inputs = SETTINGS["c"].prepare(plain, some_labels(len(ids)), ids, gamma=0.5, **named)
    return step_puzzles(inputs, plain, client, **named)


def test_half_of_the_steps_are_plain_whatever_else_is_in_the_block() -> None:
    client = ClientConfig(plain_share=0.5)
    ids = [f"image {i}" for i in range(40)]
    empty = torch.stack([~fed(client, ids, r).mask.any(-1) for r in range(10)])  # type: ignore[union-attr]
    assert 0.4 < empty.double().mean() < 0.6
    assert any(0 < int(of_one.sum()) < 10 for of_one in empty.T)
    whole = fed(client, ids, 3)
    alone = fed(client, ids[7:8], 3, some_images(40)[7:8])
    assert alone.mask.equal(whole.mask[7:8])  # type: ignore[union-attr, index]
    assert alone.images.equal(whole.images[7:8])
    always, never = ClientConfig(plain_share=1.0), ClientConfig()
    assert fed(always, ids).images.equal(some_images(40))
    kept = ~empty[0]
    assert fed(client, ids).mask[kept].equal(fed(never, ids).mask[kept])  # type: ignore[index]


def test_images_of_a_step_have_the_first_ones_puzzle() -> None:
    ids = [f"image {i}" for i in range(6)]
    own = fed(ClientConfig(batch=3), ids)
    one = fed(ClientConfig(batch=3, mask="batch"), ids)
    assert one.mask is not None
    assert one.permutation is not None
    assert own.mask is not None
    for start in (0, 3):
        assert (one.mask[start : start + 3] == own.mask[start]).all()
        assert (one.permutation[start : start + 3] == one.permutation[start]).all()
    assert not one.mask[0].equal(one.mask[3])
    assert one.images.equal(shuffle_patches(some_images(6), one.permutation, PATCH))


@pytest.mark.parametrize("kind", ["flip", "crop", "mixup"])
def test_augmentations_are_fresh_in_every_round_and_the_same_again(kind: str) -> None:
    plain, ids = some_images(12), [f"image {i}" for i in range(12)]
    made = [augmented(plain, ids, kind, round=round, seed=0) for round in range(4)]
    assert all(one.shape == plain.shape for one in made)
    assert all(one.min() >= 0 and one.max() <= 1 for one in made)
    assert made[1].equal(augmented(plain, ids, kind, round=1, seed=0))
    assert not made[0].equal(made[1])
    assert not made[0].equal(augmented(plain, ids, kind, round=0, seed=1))
    if kind != "mixup":
        assert made[2][5:6].equal(augmented(plain[5:6], ids[5:6], kind, round=2, seed=0))


def test_what_the_augmentations_do() -> None:
    plain, ids = some_images(40), [f"image {i}" for i in range(40)]
    flipped = augmented(plain, ids, "flip", round=0, seed=0)
    turned = (flipped == plain.flip(-1)).flatten(1).all(-1)
    assert (turned | (flipped == plain).flatten(1).all(-1)).all()
    assert 10 < turned.sum() < 30
    even = torch.full_like(plain, 0.2)
    assert augmented(even, ids, "crop", round=0, seed=0).allclose(even)
    assert augmented(plain, ids, "none", round=0, seed=0).equal(plain)
    basis = torch.eye(40).view(40, 40, 1, 1)
    shares = augmented(basis, ids, "mixup", round=0, seed=0)[:, :, 0, 0]
    assert shares.sum(-1).allclose(torch.ones(40))
    assert (shares.diagonal() >= 0.5).all()
    assert ((shares > 0).sum(-1) <= 2).all()
    with pytest.raises(UserError, match="mixup"):
        augmented(plain[:1], ids[:1], "mixup", round=0, seed=0)
