"""What batches share: planted systems, the search among many uploads, and the attack on clients."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.agreement import Search
from attacks.equations.batches import BatchSpan, batch_span
from attacks.equations.patch_system import PatchSystem
from attacks.shared_picture import BatchUploads
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.client.upload import make_upload
from mjp_privacy.interfaces import AttackerView, Pixels, Reconstruction
from mjp_privacy.metrics.matching import assigned
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from tests.helpers.models import tiny_model
from tests.helpers.night import by_day
from tests.helpers.planted import best, planted_images, solved

N, D, P = 5, 40, 60
EPS = torch.finfo(torch.float64).eps


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


PICTURES = draw(40, N, P, seed=0)


def span(
    batch: Sequence[int], seed: int, *, noise: float = 0.0, pictures: Tensor = PICTURES
) -> BatchSpan:
    """What an upload of these pictures holds, with rows of its own."""
    rows = draw(len(batch), N, D, seed=1000 + seed)
    total = torch.einsum("bid,bip->dp", rows, pictures[list(batch)])
    total = total + noise * draw(*total.shape, seed=2000 + seed)
    made = PatchSystem(rows.sum(0)[None], total[None], torch.zeros(1, N, dtype=torch.bool), None)
    return batch_span(made, 0, len(batch), EPS, can_mask=False)


# several uploads ----------------------------------------------------------------------------------


def test_pairs_with_too_few_equations_wait_for_a_third_upload() -> None:
    """2 (p - N (B - 1)) <= p: any two batches agree, so three are asked."""
    short = PICTURES[:, :, :18]
    batches = [(0, 1, 2), (3, 4, 5), (0, 6, 7), (0, 8, 9)]
    spans = [span(batch, seed, pictures=short) for seed, batch in enumerate(batches)]
    (picture,) = Search(spans).pictures()
    assert sorted(picture.uploads) == [0, 2, 3]
    assert torch.allclose(picture.patches, short[0], atol=1e-7)


def test_errors_that_hide_a_contradiction_are_no_agreement() -> None:
    """They are as large as what is known."""
    pair = [span((0, *others), others[0], noise=1.0) for others in ((1, 2), (3, 4))]
    assert not Search(pair).pictures()


# `shared_picture` on a tiny client: what is found and verified ------------------------------------

SHAPE = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 4}
"""N = 4 patches of p = 192 pixels, width D = 48: batches of up to 11."""
FRESH = ClientConfig(batch=4, partners="fresh")


def model_of(**changes: object) -> LoadedModel:
    shape = SHAPE | {"num_classes": 10, "mean": 0.5, "std": 0.25} | changes
    return tiny_model(shape, "conditioned")


def view_of(
    model: LoadedModel,
    images: Tensor,
    rounds: int,
    client: ClientConfig = FRESH,
    setting: str = "a",
) -> AttackerView:
    """What is seen of a client that holds these images."""
    feeding, updates = Feeding(client, setting, 0.3, model.patch_size, 0), []
    needed = find_attack("shared_picture").needs(model)
    names = [name for name, _ in model.named_parameters() if name in needed]
    for round in range(rounds):
        order = feeding.order([str(n) for n in range(len(images))], round)
        ids = [str(n) for n in order.tolist()]
        inputs = feeding.input(images[order], order % 10, ids, round)
        updates.append(make_upload(model, [inputs], client, names=names, round=round))
    pixels = Pixels(model.card.img_size, model.card.mean, model.card.std)
    return AttackerView(model, updates, pixels, None, "plain" if setting == "c" else "input")


def run(view: AttackerView) -> Reconstruction:
    return solved(view, "shared_picture", uploads=len(view.updates))


def certain(made: Reconstruction) -> Tensor:
    """The pictures that are said to be certain."""
    return made.images[made.diagnostics["certain"].bool()]


def scores(made: Reconstruction, images: Tensor) -> tuple[Tensor, Tensor]:
    """PSNR (m,) of each image's reconstruction, and whether it is certain."""
    order = assigned(made.images.float(), images)
    return psnr(made.images[order], images), made.diagnostics["certain"][order].bool()


@pytest.mark.parametrize("case", ["plain", "moving", "more than declared"])
def test_a_client_that_shuffles_gives_its_pictures_away(case: str) -> None:
    images = planted_images(12, 16)
    view, declared = view_of(model_of(), images, 5), 4
    if case == "moving":  # nothing but row spaces is used, and they do not know the weights
        other = view_of(model_of(depth=2), images, 5)
        view = replace(view, updates=[*view.updates[:2], *other.updates[2:]])
    elif case == "more than declared":
        declared = 3
        view = replace(view, updates=[replace(update, batch=3) for update in view.updates])
    made = run(view)
    assert made.diagnostics["certain"].all()
    assert made.diagnostics["pictures_by_rank"].tolist() == [4] * 3 * declared
    assert made.mask is None or not made.mask.any()
    quality = best(made.images, images)
    assert (quality > 100).sum() == 3 * declared
    assert made.diagnostics["uploads_sharing"].tolist() == [5] * 3 * declared
    assert (made.diagnostics["expected_psnr"] - quality.median()).abs().max() < 20


def test_what_is_not_determined_is_a_guess_and_not_certain() -> None:
    images = planted_images(12, 16)
    quality, sure = scores(run(view_of(model_of(), images, 2)), images)
    assert 0 < sure.sum() < 12
    assert quality[sure].min() > 100
    assert quality[~sure].max() < 60
    assert quality[~sure].isfinite().all()


@pytest.mark.parametrize("augment", ["flip", "crop"])
def test_augmented_pictures_are_found_where_they_recur_and_no_others(augment: str) -> None:
    images, client = planted_images(8, 16), replace(FRESH, augment=augment)
    made = run(view_of(model_of(), images, 4, client))
    feeding, ids = Feeding(client, "a", 0.3, 8, 0), [str(n) for n in range(8)]
    fed = torch.cat([feeding.photographs(images, ids, round) for round in range(4)])
    assert len(certain(made)) > 0
    assert all(best(fed, picture[None]) > 100 for picture in certain(made))


def test_masks_do_not_keep_it_from_the_plain_pictures() -> None:
    images = planted_images(6, 16)
    client = ClientConfig(batch=2, partners="fresh", mask="image")
    view = view_of(model_of(unknown_embedding=True), images, 6, client, "c")
    quality, sure = scores(run(view), images)
    assert sure.all()
    assert quality.min() > 100


# uploads that mask patches of one border: it is no picture that they share ------------------------


def framed(border: str, mask: str, batch: int, setting: str = "c") -> tuple[AttackerView, Tensor]:
    """What is seen of a client that sends float32, and its pictures: of 16 patches in four rows
    they differ in the two middle rows alone; the fourth of a plain client is all border."""
    images = planted_images(17, 32)
    frame = {"white": torch.ones_like(images[0]), "black": 0 * images[0]}
    frame["textured"] = images[-1]
    rows = [*range(8), *range(24, 32)]
    images[:, :, rows] = frame[border][:, rows]
    if setting == "a":
        images[3] = frame[border]
    client = ClientConfig(batch=batch, partners="fresh", mask=mask)
    model = model_of(img_size=32, embed_dim=96, unknown_embedding=True)
    view = view_of(model, images[:16], 3, client, setting)
    updates = [
        replace(u, grads={n: g.float() for n, g in u.grads.items()}, dtype=torch.float32)
        for u in view.updates
    ]
    return replace(view, updates=updates), images[:16]


@pytest.mark.parametrize(
    ("border", "mask", "batch"),
    by_day([("white", "image", 2), ("black", "image", 4), ("textured", "batch", 4)], {0}),
)
def test_no_picture_is_certain_that_is_none(border: str, mask: str, batch: int) -> None:
    view, images = framed(border, mask, batch)
    sure = certain(run(view))
    assert len(sure) >= 4
    quality = torch.stack([psnr(one.expand_as(images), images) for one in sure])
    assert quality.amax(1).min() > 60
    assert len(quality.argmax(1).unique()) == len(sure)


@pytest.mark.parametrize("border", ["white", "black", "textured"])
def test_uploads_of_one_round_are_not_asked(border: str) -> None:
    """Nor are they taken to share a picture where they are equal."""
    uploads = BatchUploads.of(framed(border, "image", 4)[0])
    pairs = Search(uploads.spans, uploads.rounds).agreeing
    assert all(uploads.rounds[one] != uploads.rounds[other] for one, other in pairs)
    first, second = uploads.spans[0], uploads.spans[4]
    assert Search([first, second]).agreeing
    assert not Search([first, second], [0, 0]).agreeing


def test_a_picture_of_equal_patches_alone_is_still_found() -> None:
    view, images = framed("white", "image", 2, "a")
    sure = certain(run(view))
    assert best(sure.float(), images[3:4]).max() > 60
    assert all(best(images, one[None]) > 60 for one in sure)
