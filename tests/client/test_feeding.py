"""The augmentations of what a client is fed; how it is shuffled the frozen runs know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mjp_privacy.client.feeding import augmented
from mjp_privacy.core.errors import UserError
from tests.helpers.models import some_images

IDS = [f"image {i}" for i in range(40)]


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
