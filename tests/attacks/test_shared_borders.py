"""Uploads that mask patches of one border: it is no picture that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.equations.agreement import Search
from attacks.shared_picture import BatchUploads
from mjp_privacy import attack_gradients
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.metrics.pictures import psnr
from tests.attacks.test_shared_picture import SHAPE, attack_of, gradients, model_of, run, view_of
from tests.helpers.night import by_day
from tests.helpers.planted import planted_images

LARGER = SHAPE | {"img_size": 32, "embed_dim": 96}
"""N = 16 patches of p = 192 pixels in four rows, the first and the last of which are border."""
MASKS = [("image", 2), ("image", 4), ("batch", 4)]
BORDERS = ["white", "black", "textured"]
CLIENTS = [(border, *mask) for border in BORDERS for mask in MASKS]
each_client = pytest.mark.parametrize(("border", "mask", "batch"), by_day(CLIENTS, {0, 4, 8}))


def framed(count: int, border: str) -> Tensor:
    """Pictures that differ in their two middle rows of patches alone."""
    images = planted_images(count + 1, 32)
    frame = {"white": torch.ones_like(images[0]), "black": 0 * images[0]}
    frame["textured"] = images[-1]
    rows = [*range(8), *range(24, 32)]
    images[:, :, rows] = frame[border][:, rows]
    return images[:count]


def view_with(border: str, mask: str, batch: int, rounds: int = 3) -> tuple[AttackerView, Tensor]:
    """What is seen of a client that masks framed pictures, and these pictures."""
    images = framed(16, border)
    client = ClientConfig(batch=batch, partners="fresh", mask=mask)  # type: ignore[arg-type]
    return seen(images, client, "c", rounds), images


def seen(images: Tensor, client: ClientConfig, setting: str, rounds: int = 3) -> AttackerView:
    """What is seen of a client that sends float32."""
    model = model_of(**LARGER, unknown_embedding=True)
    view = view_of(model, images, rounds, client, setting)
    updates = [
        replace(u, grads={n: g.float() for n, g in u.grads.items()}, dtype=torch.float32)
        for u in view.updates
    ]
    return replace(view, updates=updates)


def nearest(made: Tensor, images: Tensor) -> Tensor:
    """PSNR of each reconstruction to that one of the images that is nearest."""
    return torch.stack([psnr(image.expand_as(images), images).max() for image in made])


@pytest.mark.nightly
@each_client
def test_no_picture_is_certain_that_is_none(border: str, mask: str, batch: int) -> None:
    view, images = view_with(border, mask, batch)
    made = run(attack_of(3), view)
    assert made.images is not None
    certain = made.images[made.diagnostics["certain"].bool()]
    assert len(certain) >= 4
    quality = nearest(certain, images)
    assert quality.min() > 60
    assert len(certain) == len({int(psnr(c.expand_as(images), images).argmax()) for c in certain})


@pytest.mark.nightly
@each_client
def test_uploads_of_one_round_share_nothing(border: str, mask: str, batch: int) -> None:
    """The search is not told the rounds: the equations alone say so."""
    view, _ = view_with(border, mask, batch)
    for update in view.updates:
        search = Search(BatchUploads.of(replace(view, updates=[update])).spans)
        assert not search.pictures()
        assert not search.groups


@pytest.mark.parametrize("border", BORDERS)
def test_uploads_of_one_round_are_not_asked(border: str) -> None:
    """Nor are they taken to share a picture where they are equal."""
    uploads = BatchUploads.of(view_with(border, "image", 4)[0])
    assert uploads.rounds is not None
    assert all(uploads.rounds[a] != uploads.rounds[b] for a, b in _pairs(uploads))
    first, second = uploads.spans[0], uploads.spans[4]
    assert Search([first, second]).agreeing
    assert not Search([first, second], [0, 0]).agreeing


def _pairs(uploads: BatchUploads) -> Sequence[tuple[int, int]]:
    return sorted(Search(uploads.spans, uploads.rounds).agreeing)


def test_a_picture_of_equal_patches_alone_is_still_found() -> None:
    """All 16 patches of it are the border's."""
    images = framed(16, "white")
    images[3] = 1
    client = ClientConfig(batch=2, partners="fresh")
    view = seen(images, client, "a")
    made = run(attack_of(3), view)
    assert made.images is not None
    certain = made.images[made.diagnostics["certain"].bool()]
    assert nearest(images[3:4], certain.float()).max() > 60
    assert nearest(certain, images).min() > 60


def test_one_upload_is_refused_with_what_it_needs() -> None:
    model, images = model_of(), planted_images(4, 16)
    upload = gradients(model, images, (0, 1, 2, 3))
    leak = attack_gradients(model, upload, batch=4, attacks="shared_picture")
    refusal = "it needs two uploads or more of batches that share pictures, and one was given"
    assert leak.refused["shared_picture"] == refusal
