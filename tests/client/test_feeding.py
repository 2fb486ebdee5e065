"""What the client is fed in settings a, b and c, its puzzles and its augmentations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import SETTINGS, Feeding, augmented
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models.jigsaw import Grid, draw_masks, shuffle_patches
from tests.helpers.models import PATCH, some_images, some_labels

IDS = [f"image {i}" for i in range(40)]


def fed(
    count: int,
    client: ClientConfig | None = None,
    setting: str = "c",
    first: int = 0,
    *,
    round: int = 0,
    **named: float,
) -> ClientInput:
    """What a client feeds of some images, from the first on."""
    part, how = slice(first, first + count), {"gamma": 0.5, "patch_size": PATCH, "seed": 0} | named
    feeding = Feeding(client or ClientConfig(), setting, **how)
    return feeding.input(some_images(40)[part], some_labels(40)[part], IDS[part], round)


def test_a_feeds_the_plain_image_b_and_c_the_shuffled_one() -> None:
    """The same puzzle in both, so that comparisons are paired."""
    images, facts = some_images(3), {"gamma": 0.9, "round": 2, "seed": 5}
    mask, permutation = draw_masks(IDS[:3], grid=Grid(4, 4), **facts)
    shuffled = shuffle_patches(images, permutation, PATCH)
    assert [SETTINGS[name].against for name in ("a", "b", "c")] == ["plain", "input", "plain"]
    for setting, expected in (("a", images), ("b", shuffled), ("c", shuffled)):
        inputs = fed(3, setting=setting, **facts)
        assert torch.equal(inputs.images, expected)
        assert torch.equal(inputs.labels, some_labels(3))
        assert list(inputs.image_ids) == IDS[:3]
        assert SETTINGS[setting].shuffles == (setting != "a") == (inputs.mask is not None)
        if inputs.mask is not None:
            assert torch.equal(inputs.mask, mask)
            assert torch.equal(inputs.permutation, permutation)
    empty = fed(3, gamma=0.0)
    assert torch.equal(empty.images, images)
    assert not empty.mask.any()


def test_half_of_the_steps_are_plain_whatever_else_is_in_the_block() -> None:
    client = ClientConfig(plain_share=0.5)
    empty = torch.stack([~fed(40, client, round=r).mask.any(-1) for r in range(10)])
    assert 0.4 < empty.double().mean() < 0.6
    assert any(0 < int(of_one.sum()) < 10 for of_one in empty.T)
    whole, alone = fed(40, client, round=3), fed(1, client, first=7, round=3)
    assert alone.mask.equal(whole.mask[7:8])
    assert alone.images.equal(whole.images[7:8])
    assert fed(40, ClientConfig(plain_share=1.0)).images.equal(some_images(40))
    kept = ~empty[0]
    assert fed(40, client).mask[kept].equal(fed(40, ClientConfig()).mask[kept])


def test_images_of_a_step_have_the_first_ones_puzzle() -> None:
    own, one = (fed(6, ClientConfig(batch=3, mask=mask)) for mask in ("image", "batch"))
    for start in (0, 3):
        assert (one.mask[start : start + 3] == own.mask[start]).all()
        assert (one.permutation[start : start + 3] == one.permutation[start]).all()
    assert not one.mask[0].equal(one.mask[3])
    assert one.images.equal(shuffle_patches(some_images(6), one.permutation, PATCH))


def changed(kind: str, images: Tensor, first: int = 0, **named: int) -> Tensor:
    ids = IDS[first : first + len(images)]
    return augmented(images, ids, kind, **{"round": 0, "seed": 0} | named)


@pytest.mark.parametrize("kind", ["flip", "crop", "mixup"])
def test_augmentations_are_fresh_in_every_round_and_the_same_again(kind: str) -> None:
    plain = some_images(12)
    made = changed(kind, plain)
    assert made.shape == plain.shape
    assert made.min() >= 0
    assert made.max() <= 1
    assert made.equal(changed(kind, plain))
    assert not made.equal(changed(kind, plain, round=1))
    assert not made.equal(changed(kind, plain, seed=1))
    if kind != "mixup":
        assert made[5:6].equal(changed(kind, plain[5:6], first=5))


def test_what_the_augmentations_do() -> None:
    plain = some_images(40)
    flipped = changed("flip", plain)
    turned = (flipped == plain.flip(-1)).flatten(1).all(-1)
    assert (turned | (flipped == plain).flatten(1).all(-1)).all()
    assert 10 < turned.sum() < 30
    even = torch.full_like(plain, 0.2)
    assert changed("crop", even).allclose(even)
    assert changed("none", plain).equal(plain)
    shares = changed("mixup", torch.eye(40).view(40, 40, 1, 1))[:, :, 0, 0]
    assert shares.sum(-1).allclose(torch.ones(40))
    assert (shares.diagonal() >= 0.5).all()
    assert ((shares > 0).sum(-1) <= 2).all()
    with pytest.raises(UserError, match="mixup"):
        changed("mixup", plain[:1])
