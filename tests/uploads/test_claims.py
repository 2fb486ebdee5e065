"""That what is said of a picture is so: of its levels, of masked patches, of its gradient."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients, load_images, load_model
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.zoo import IMAGENET_MEAN, IMAGENET_STD
from mjp_privacy.uploads.leak import Leak, Reconstructed
from mjp_privacy.uploads.normalisation import declared_wrongly
from tests.helpers.planted import gradient_of

LABEL = torch.tensor([5])
BATCH, PEELING, MATCHING = "batch_span", "token_peeling", "inverting_gradients"
HALF = (0.5,) * 3, (0.5,) * 3
NOTHING, UNIT = (0.0,) * 3, (1.0,) * 3
PHOTOGRAPHS = torch.stack([image for image, *_ in load_images("embedded", size=64, limit=5)])


def as_fed(pixels: Tensor) -> Tensor:
    return (pixels - 0.5) / 0.5


def unknown(pixels: Tensor) -> Tensor:
    """Of no pixel all channels are known, as at the ends of the range."""
    pixels = pixels.clone()
    pixels[0, ::2], pixels[1, 1::2] = torch.nan, torch.nan
    return pixels


# levels -------------------------------------------------------------------------------------------

ONE, OTHER = PHOTOGRAPHS[0], PHOTOGRAPHS[1]
HALVED = nn.functional.avg_pool2d(ONE, 2)  # parts of levels
TURNED = ONE - torch.tensor(IMAGENET_MEAN[::-1]).view(3, 1, 1)
IMAGENET = IMAGENET_MEAN, IMAGENET_STD
LEVELS: list[tuple[Tensor, tuple[tuple[float, ...], tuple[float, ...]], str]] = [
    # means of pixels have halves, thirds and tenths of levels, which speak for nothing
    (as_fed(HALVED), HALF, ""),
    (as_fed(ONE.mean(0, keepdim=True).expand(3, -1, -1)), HALF, ""),
    *((as_fed(share * ONE + (1 - share) * OTHER), HALF, "") for share in (0.5, 0.6, 0.7)),
    (as_fed(unknown(0.8 * ONE)), HALF, ""),
    # another contrast, or one of the usual normalisations with coarser parts than the declared one
    (as_fed(0.8 * ONE), HALF, "1.25 times"),
    *((pixels, HALF, "mean 0, std 1") for pixels in (ONE, HALVED)),
    *((as_fed(pixels), IMAGENET, "mean 0.5, std 0.5") for pixels in (ONE, HALVED)),
    (TURNED, (IMAGENET_MEAN, (1.0,) * 3), "other order"),
    # pixels beyond their range, and between levels
    (as_fed(2 * HALVED - 0.5), HALF, "leave [0, 1]"),
    (as_fed(ONE + 0.1 / 255 * torch.randn(ONE.shape)), HALF, ""),
    # one colour has levels of any normalisation
    (as_fed(torch.full((3, 32, 32), 0.3)), HALF, "no 8-bit levels|!std 0.2"),
    # numbers from 0 to 255, and those of a dark picture, which are nearly whole and no levels
    *((255 * ONE, (mean, std), "0 to 255") for mean, std in ((NOTHING, UNIT), HALF)),
    (as_fed(0.05 * nn.functional.avg_pool2d(ONE, 3)), HALF, ""),
]
"""What was fed, the declared mean and std, and what is said, or after a `!` is not."""


@pytest.mark.parametrize(("fed", "declared", "said"), LEVELS)
def test_levels_tell_another_normalisation(fed: Tensor, declared: Any, said: str) -> None:
    found = declared_wrongly(fed, *declared)
    assert (found == "") == (said == "")
    for word in said.split("|"):
        assert (word.removeprefix("!") in found) != word.startswith("!"), found


# masked patches -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masking() -> LoadedModel:
    """A client's network that can mask, untrained."""
    shape = {"img_size": 64, "num_classes": 20, "mean": 0.5, "std": 0.5}
    return load_model(
        "vit_tiny_patch16_224", checkpoint="random", unknown_embedding=True, depth=3, **shape
    )


def of_masked(
    masking: LoadedModel, mask: Tensor | None, kept: Sequence[str] = (), **facts: Any
) -> Leak:
    """Attacks on a step of the first photographs, masked by (B, N); kept: what is not sent."""
    count = 2 if mask is None else len(mask)
    sent = gradient_of(masking, PHOTOGRAPHS[:count], torch.arange(count) + 5, mask)
    sent = {name: grad for name, grad in sent.items() if name not in kept}
    return attack_gradients(masking, sent, batch=count, **facts)


@pytest.mark.parametrize(("masked", "kept"), [(0, ()), (4, ()), (4, ("unk_embed",))])
def test_the_gradient_of_a_masked_batch_is_compared_with_the_masks_that_are_found(
    masking: LoadedModel, masked: int, kept: tuple[str, ...]
) -> None:
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, :masked] = mask[1, 2 : 2 + masked] = True
    attacks = ["token_peeling", "batch_span"]
    leak = of_masked(masking, mask if masked else None, kept, attacks=attacks)
    assert leak.best.attack == "token_peeling"
    assert leak.best.residual < 1e-4
    assert sorted(leak.best.labels.tolist()) == [5, 6]
    if masked and not kept:  # those of others are guesses
        assert math.isnan(leak["batch_span"].residual)
        assert "labels" not in leak["batch_span"].uncompared != ""
        alone = Leak({"batch_span": leak["batch_span"]}, {}, None, "given", batch=2)
        assert leak["batch_span"].uncompared in alone.verdict
        assert "labels=" not in alone.verdict


def test_the_order_that_borders_told_is_named_beside_the_gradient(masking: LoadedModel) -> None:
    """Of several masked patches; one alone has its place."""
    for masked in (5, 1):
        mask = (torch.arange(16) < masked)[None]
        leak = of_masked(masking, mask, attacks=["token_peeling"])
        assert leak.best.residual < 1e-4
        assert leak.best.ordered == (masked if masked > 1 else 0)
        assert ("5 patches" in leak.verdict) == (masked == 5)
    assert not leak.best.is_certain


# the uploaded gradient ----------------------------------------------------------------------------


def explaining(residual: float, rolled: float, **facts: Any) -> str:
    """The verdict on a picture with this residual, and with that where its patches are moved."""
    left = torch.tensor([residual])
    made = Reconstructed("april", PHOTOGRAPHS[:1], left, 1.0, residual, rolled=rolled, labels=LABEL)
    return Leak({"april": made}, {}, LABEL, "given", **facts).verdict


def test_a_residual_that_moved_patches_leave_as_well_explains_nothing() -> None:
    for residual, rolled, has in (
        (2e-3, 3e-3, False),
        (2e-3, 0.3, True),
        (1e-6, 1e-6, True),  # order is not in the gradient
        (0.02, math.nan, False),
    ):
        said = explaining(residual, rolled)
        assert ("has the uploaded gradient" in said) == has
        assert (f"{rolled:.2g}" in said) == (not has and rolled < 1)


def test_a_step_whose_examples_were_clipped_is_read_by_the_masks_that_were_found(
    masking: LoadedModel,
) -> None:
    """Each picture's gradient has a factor of its own: no batch explains the whole."""
    mask, sent = torch.zeros(2, 16, dtype=torch.bool), dict[str, Tensor]()
    mask[0, :4] = mask[1, 2:6] = True
    for place, share in enumerate((0.8, 0.2)):
        own = gradient_of(masking, PHOTOGRAPHS[[place]], torch.tensor([place + 5]), mask[[place]])
        sent = {name: g * share + sent.get(name, 0.0) for name, g in own.items()}
    attacks = ["batch_span", "token_peeling"]
    leak = attack_gradients(masking, sent, batch=2, attacks=attacks, images=PHOTOGRAPHS[:2])
    assert leak.best.attack == "token_peeling"
    assert leak.best.solved == 2
    assert leak.best.psnr > 40


SENT, MOVED = "patch_gradient", "patch_jigsaw"
MISFITS = {SENT: 0.53, MOVED: 0.51}
RANKED: list[tuple[int, dict[str, float], dict[str, float], str]] = [
    # that next to everything is left is no reason against a smaller misfit
    (1, {SENT: 0.98, "masked_span": 1.0}, {SENT: 0.7, "masked_span": 0.01}, "masked_span"),
    # patches as they were sent are before those that borders moved, whatever the misfit, unless
    # another order has clearly less left
    (1, {SENT: 0.1249, MOVED: 0.1251}, MISFITS, SENT),
    (1, {SENT: 0.1251, MOVED: 0.1249}, MISFITS, SENT),
    (1, {SENT: 0.12, MOVED: 0.10}, MISFITS, MOVED),
    # of batches the nearest that is made for them, unless another explains the gradient
    (2, {BATCH: math.nan, "layer_span": 0.99, PEELING: 0.6}, {}, PEELING),
    (2, {BATCH: 0.089, PEELING: 0.013}, {}, PEELING),
    (2, {BATCH: 1.5, SENT: 1.2, MATCHING: 0.1}, {}, BATCH),
    (2, {BATCH: 0.5, SENT: 0.3, MATCHING: 0.005}, {}, MATCHING),
]
"""Pictures in the step, residuals and misfits by attack, and the attack that is the best."""


@pytest.mark.parametrize(("batch", "residuals", "misfits", "best"), RANKED)
def test_which_attack_is_the_best(
    batch: int, residuals: dict[str, float], misfits: dict[str, float], best: str
) -> None:
    made = {}
    for name, residual in residuals.items():
        left = torch.full((batch,), residual)
        misfit = torch.full((batch,), misfits.get(name, math.nan))
        pictures = PHOTOGRAPHS[:batch]
        made[name] = Reconstructed(name, pictures, left, 1.0, residual, misfits=misfit)
    assert Leak(made, {}, None, "unknown", batch=batch).best.attack == best


def test_a_square_picture_of_a_step_on_another_shape_has_not_its_gradient() -> None:
    torch.manual_seed(0)
    shape = {"img_size": 64, "depth": 3, "num_classes": 20, "dynamic_img_size": True}
    network = timm.create_model("vit_tiny_patch16_224", **shape)
    fed = as_fed(PHOTOGRAPHS[:1].unflatten(2, (2, 32)).transpose(2, 3).flatten(3))
    nn.functional.cross_entropy(network(fed.reshape(1, 3, 32, 128)), LABEL).backward()
    leak = attack_gradients(network, mean=0.5, std=0.5, attacks=["patch_lattice"])
    assert leak.best.residual < 1e-2
    assert leak.best.rolled < 2 * leak.best.residual
    assert "has the uploaded gradient" not in leak.verdict
    assert "32×128" in leak.verdict


@pytest.mark.parametrize(("told", "named"), [(3, True), (4, False)])
def test_a_batch_of_more_pictures_than_told_shows_its_classes(told: int, named: bool) -> None:
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
    loss = nn.functional.cross_entropy(network(as_fed(PHOTOGRAPHS[:4])), torch.arange(4))
    sent = torch.autograd.grad(loss, list(network.parameters()))
    leak = attack_gradients(network, sent, mean=0.5, std=0.5, batch=told, attacks="patch_gradient")
    assert any("4 classes" in note and "batch=" in note for note in leak.notes) == named
