"""The exact attack on one upload: photographs through a small model, and when it falls back."""

from __future__ import annotations

import pytest
import torch

from attacks.masked_span import MaskedSpan
from attacks.pixel_lattice import PixelLattice
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.data import load_images
from mjp_privacy.interfaces import Attack, AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from tests.helpers.models import tiny_model

SIDE, PATCH = 96, 16
CROPS = 4


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """36 patches of 16×16, float64."""
    shape = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": 96, "num_heads": 4}
    return tiny_model(
        shape | {"depth": 1, "num_classes": 10, "mean": 0.5, "std": 0.5},
        weights="drawn",
        unknown_embedding=True,
    )


@pytest.fixture(scope="module")
def photographs() -> torch.Tensor:
    return torch.stack([i.image for i in load_images("embedded", size=SIDE, limit=CROPS)])


def attacked(
    attack: Attack, model: LoadedModel, images: torch.Tensor, setting: str
) -> tuple[Reconstruction, ClientInput]:
    ids = [str(index) for index in range(len(images))]
    labels = torch.zeros(len(images), dtype=torch.long)
    inputs = SETTINGS[setting].prepare(
        images, labels, ids, patch_size=PATCH, gamma=0.2, round=0, seed=0
    )
    update = FedSGDClient(model, ClientConfig()).update(inputs, names=list(attack.needs(model)))
    pixels = Pixels(SIDE, model.card.mean, model.card.std)
    view = AttackerView(model, [update], pixels, labels, SETTINGS[setting].against)
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator()), inputs


def test_one_upload_gives_photographs_back_bit_by_bit(
    model: LoadedModel, photographs: torch.Tensor
) -> None:
    found, inputs = attacked(PixelLattice(prior="stationary"), model, photographs, "c")
    assert inputs.mask is not None
    assert inputs.mask.any(-1).all()
    assert found.images is not None
    exact = psnr(found.images.float(), photographs).isinf()
    assert int(exact.sum()) >= 3
    before, _ = attacked(MaskedSpan(prior="stationary"), model, photographs, "c")
    assert before.images is not None
    assert not psnr(before.images.float(), photographs).isinf().any()


def test_as_fed_the_unmasked_patches_are_exact_and_the_others_their_mean(
    model: LoadedModel, photographs: torch.Tensor
) -> None:
    from mjp_privacy.models.jigsaw import to_patches

    found, inputs = attacked(PixelLattice(prior="stationary"), model, photographs[:1], "b")
    assert inputs.mask is not None
    assert found.images is not None
    ours, fed = (to_patches(i.double(), PATCH)[0] for i in (found.images, inputs.images))
    hidden = inputs.mask[0]
    assert torch.allclose(ours[~hidden], fed[~hidden], atol=1e-6)
    assert torch.allclose(ours[hidden], fed[hidden].mean(0).expand(int(hidden.sum()), -1))
    assert found.permutation is None


def test_pixels_that_are_no_grey_levels_fall_back_to_the_span(
    model: LoadedModel, photographs: torch.Tensor
) -> None:
    """A client that mixes or resamples after decoding."""
    mixed = 0.7 * photographs[:1] + 0.3 * photographs[1:2]
    found, _ = attacked(PixelLattice(prior="stationary"), model, mixed, "c")
    before, _ = attacked(MaskedSpan(prior="stationary"), model, mixed, "c")
    assert found.diagnostics["lattice_found"].tolist() == [0]
    assert found.images is not None
    assert before.images is not None
    assert torch.allclose(found.images, before.images)


def test_more_masked_patches_than_allowed_are_left_to_the_span(
    model: LoadedModel, photographs: torch.Tensor
) -> None:
    found, _ = attacked(PixelLattice(prior="stationary", most=3), model, photographs[:1], "c")
    assert found.diagnostics["lattice_found"].tolist() == [0]


def test_it_says_what_it_needs(model: LoadedModel, photographs: torch.Tensor) -> None:
    view, _ = _view(model, photographs[:1])
    update = view.updates[0]
    grads = {name: g for name, g in update.grads.items() if name != "unk_embed"}
    import dataclasses

    lacking = dataclasses.replace(view, updates=[dataclasses.replace(update, grads=grads)])
    assert "no gradient of unk_embed" in str(PixelLattice().unsupported(lacking))


def _view(model: LoadedModel, images: torch.Tensor) -> tuple[AttackerView, ClientInput]:
    labels = torch.zeros(len(images), dtype=torch.long)
    inputs = SETTINGS["c"].prepare(
        images, labels, ["0"], patch_size=PATCH, gamma=0.2, round=0, seed=0
    )
    update = FedSGDClient(model).update(inputs, names=list(PixelLattice().needs(model)))
    return AttackerView(model, [update], Pixels(SIDE, (0.5,) * 3, (0.5,) * 3), labels), inputs
