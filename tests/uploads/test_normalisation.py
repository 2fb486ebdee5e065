"""A client that normalises otherwise than declared: no picture is called certain, and it is said
with what it normalised."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.shared_picture import CERTAIN
from mjp_privacy import attack_gradients
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.zoo import IMAGENET_MEAN, IMAGENET_STD
from mjp_privacy.uploads.checks import MISNORMALISED, declared_wrongly, of_unscored
from mjp_privacy.uploads.memory import own_uploads
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images
from tests.uploads.test_attack_gradients import gradient_of

HALF: dict[str, Any] = {"mean": 0.5, "std": 0.5}
IMAGENET: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
REVERSED: dict[str, Any] = {"mean": IMAGENET_MEAN[::-1], "std": IMAGENET_STD[::-1]}
NONE: dict[str, Any] = {"mean": 0.0, "std": 1.0}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return planted_model()


@pytest.fixture(scope="module")
def picture() -> Tensor:
    return (planted_images(1) * 255).round() / 255


def channels(values: Any) -> Tensor:
    return torch.tensor(values).expand(3).reshape(3, 1, 1)


def fed(picture: Tensor, normalised: dict[str, Any]) -> Tensor:
    return (picture - channels(normalised["mean"])) / channels(normalised["std"])


def declaring(model: LoadedModel, normalised: dict[str, Any]) -> LoadedModel:
    """The model with another mean and std on its card."""
    other = copy.deepcopy(model)
    facts = {n: tuple(channels(v).flatten().tolist()) for n, v in normalised.items()}
    other.card = replace(model.card, **facts)
    return other


def gradients(model: LoadedModel, pixels: Tensor) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(model(pixels.to(model.like)), torch.tensor([3]))
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: g for n, g in zip(names, values, strict=True) if g is not None}


@pytest.mark.parametrize(
    ("done", "declared", "fits"),
    [
        (NONE, HALF, "none (mean 0, std 1)"),
        (HALF, NONE, "one half"),
        (IMAGENET, HALF, "ImageNet's"),
        (HALF, IMAGENET, "one half"),
        (REVERSED, IMAGENET, "other order of channels"),
        ({"mean": 0.5, "std": 1.0}, IMAGENET, "std 1"),
    ],
)
def test_another_normalisation_is_said_and_nothing_is_certain(
    model: LoadedModel, picture: Tensor, done: Any, declared: Any, fits: str
) -> None:
    upload = gradients(model, fed(picture, done))
    leak = attack_gradients(declaring(model, declared), upload, attacks=["patch_gradient"])
    assert fits in leak.verdict
    assert not leak.best.is_certain
    right = attack_gradients(declaring(model, done), upload, attacks=["patch_gradient"])
    assert right.best.is_certain
    assert right.doubt == ""
    assert (right.best.image.double() - picture[0]).abs().max() < 1e-3


@pytest.mark.parametrize("normalised", [HALF, IMAGENET, NONE])
def test_pictures_as_declared_stay_certain(
    model: LoadedModel, picture: Tensor, normalised: Any
) -> None:
    for image in (picture, planted_images(1), torch.ones_like(picture), picture.round()):
        upload = gradients(model, fed(image, normalised))
        leak = attack_gradients(declaring(model, normalised), upload, attacks=["patch_gradient"])
        assert leak.doubt == ""


def test_a_picture_altered_beyond_its_range_is_doubted() -> None:
    strange = fed(planted_images(1) * 2 - 0.5, HALF)[0]
    assert "leave [0, 1]" in declared_wrongly(strange, (0.5,) * 3, (0.5,) * 3)


def test_declared_noise_is_not_taken_for_another_normalisation(
    model: LoadedModel, picture: Tensor
) -> None:
    upload = gradients(model, fed(picture, HALF))
    generator = torch.Generator().manual_seed(0)
    spread = 0.05 * float(upload["patch_embed.proj.weight"].std())
    noisy = {
        name: g + spread * torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for name, g in upload.items()
    }
    known = declaring(model, HALF)
    assert attack_gradients(known, noisy, attacks=["patch_gradient"], noise=spread).doubt == ""


def test_rounding_of_float32_is_no_fault(picture: Tensor) -> None:
    noise = torch.randn(picture.shape, generator=torch.Generator().manual_seed(0)) * 0.1 / 255
    assert declared_wrongly(fed(picture + noise, HALF)[0], (0.5,) * 3, (0.5,) * 3) == ""
    assert declared_wrongly(fed(picture + noise, NONE)[0], (0.5,) * 3, (0.5,) * 3)


def test_what_an_attack_itself_calls_certain_of_a_picture_is_doubted_too(
    model: LoadedModel, picture: Tensor
) -> None:
    told, found = declaring(model, HALF), {CERTAIN: torch.ones(1)}
    for way, certain in ((HALF, 1.0), (NONE, 0.0)):
        view = own_uploads(told, gradients(model, fed(picture, way)), {}).view()
        made = of_unscored(view, picture, found)
        assert (float(made[CERTAIN]), float(made[MISNORMALISED])) == (certain, 1 - certain)


def test_certain_pictures_of_a_batch_are_looked_at_too() -> None:
    """`layer_span` finds both pictures, of a client that fed [0, 1] where .5 and .25 are told."""
    model = planted_model(img_size=8, depth=3)
    told = (model.card.mean, model.card.std)
    model.card = replace(model.card, mean=(0.0,) * 3, std=(1.0,) * 3)
    images, labels = (planted_images(2, 8) * 255).round() / 255, torch.tensor([3, 5])
    sent = gradient_of(model, images, labels)
    chosen = {"layer_span": {"prior": "stationary"}}
    right = attack_gradients(model, sent, labels=labels, attacks=chosen)
    assert (right.best.verified, right.doubt) == (2, "")
    model.card = replace(model.card, mean=told[0], std=told[1])
    leak = attack_gradients(model, sent, labels=labels, attacks=chosen)
    assert leak.best.verified == 0
    assert "none (mean 0, std 1)" in leak.verdict
    assert leak.best.images is not None
    view = own_uploads(model, sent, {}, labels=labels).view()  # and in the rows of a run
    found = of_unscored(view, leak.best.images, {CERTAIN: torch.ones(2)})
    assert found[CERTAIN].tolist() == [0, 0]
    assert found[MISNORMALISED].tolist() == [1, 1]
