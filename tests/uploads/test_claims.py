"""That what is said of a picture is so: of its levels, of masked patches, of its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from attacks.masked_span import PatchLattice
from mjp_privacy import attack_gradients, load_images, load_model
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.zoo import IMAGENET_MEAN, IMAGENET_STD
from mjp_privacy.uploads.checks import declared_wrongly
from mjp_privacy.uploads.leak import Leak, Reconstructed
from tests.helpers.planted import gradient_of

LABEL = torch.tensor([5])
HALF = (0.5,) * 3, (0.5,) * 3
PHOTOGRAPHS = torch.stack([image for image, *_ in load_images("embedded", size=64, limit=5)])


def as_fed(pixels: Tensor) -> Tensor:
    return (pixels - 0.5) / 0.5


# levels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 3])
def test_levels_that_no_contrast_within_the_range_explains_speak_for_nothing(place: int) -> None:
    """Halves, thirds and tenths of levels, as means of pixels have them."""
    one, other = PHOTOGRAPHS[place], PHOTOGRAPHS[place + 1]
    plain = [nn.functional.avg_pool2d(one, 2), one.mean(0, keepdim=True).expand(3, -1, -1)]
    for pixels in (*plain, *(share * one + (1 - share) * other for share in (0.5, 0.6, 0.7))):
        assert declared_wrongly(as_fed(pixels), *HALF) == ""
    assert "1.25 times" in declared_wrongly(as_fed(0.8 * one), *HALF)


@pytest.mark.parametrize("place", [0, 3])
def test_parts_of_levels_tell_another_normalisation(place: int) -> None:
    """Where one of the usual ones has coarser parts than the declared one."""
    for pixels in (nn.functional.avg_pool2d(PHOTOGRAPHS[place], 2), PHOTOGRAPHS[place]):
        assert "mean 0, std 1" in declared_wrongly(pixels, *HALF)
        assert "mean 0.5, std 0.5" in declared_wrongly(as_fed(pixels), IMAGENET_MEAN, IMAGENET_STD)
        turned = (pixels.movedim(0, -1) - torch.tensor(IMAGENET_MEAN[::-1])).movedim(-1, 0)
        assert "other order" in declared_wrongly(turned, IMAGENET_MEAN, (1.0,) * 3)


def test_one_colour_names_no_normalisation() -> None:
    said = declared_wrongly(as_fed(torch.full((3, 32, 32), 0.3)), *HALF)
    assert "no 8-bit levels" in said
    assert "std 0.2" not in said


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.5)])
def test_pixels_fed_from_0_to_255_are_named(mean: float, std: float) -> None:
    assert "0 to 255" in declared_wrongly(255 * PHOTOGRAPHS[0], (mean,) * 3, (std,) * 3)
    dark = as_fed(0.05 * nn.functional.avg_pool2d(PHOTOGRAPHS[0], 3))
    assert "255" not in declared_wrongly(dark, *HALF)  # nearly whole numbers, and no levels


def test_a_picture_of_which_no_pixel_is_known_in_all_channels_is_read_all_the_same() -> None:
    """Pixels at the ends of the range, as saturated colours have them, are not known."""
    pixels = 0.8 * PHOTOGRAPHS[0]
    pixels[0, ::2], pixels[1, 1::2] = torch.nan, torch.nan
    assert declared_wrongly(as_fed(pixels), *HALF) == ""


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
    fed, labels = masking.normalize(PHOTOGRAPHS[:count]), torch.arange(count) + 5
    loss = nn.functional.cross_entropy(masking(fed, mask), labels)
    names, parameters = zip(*masking.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    sent = {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}
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
    assert leak.best.labels is not None
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
    made = Reconstructed(
        "april", PHOTOGRAPHS[:1], left, torch.ones(1), left, rolled=rolled, labels=LABEL
    )
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
    for place, share in enumerate((0.9, 0.1)):
        own = gradient_of(masking, PHOTOGRAPHS[[place]], torch.tensor([place + 5]), mask[[place]])
        sent = {name: g * share + sent.get(name, 0.0) for name, g in own.items()}
    attacks = ["batch_span", "token_peeling"]
    leak = attack_gradients(masking, sent, batch=2, attacks=attacks, images=PHOTOGRAPHS[:2])
    assert leak.best.attack == "token_peeling"
    assert leak.best.solved == 2
    assert leak.best.psnr > 40


def test_a_residual_of_next_to_everything_is_no_reason_against_a_smaller_misfit() -> None:
    made = {}
    for name, left, misfit in (("patch_gradient", 0.98, 0.7), ("masked_span", 1.0, 0.01)):
        scaled = torch.tensor([left])
        more = {"misfits": torch.tensor([misfit])}
        made[name] = Reconstructed(name, PHOTOGRAPHS[:1], scaled, torch.ones(1), scaled, **more)
    assert Leak(made, {}, LABEL, "given").best.attack == "masked_span"


def test_of_batches_that_nothing_explains_the_nearest_is_shown() -> None:
    made = {}
    for name, left in (("batch_span", math.nan), ("layer_span", 0.99), ("token_peeling", 0.6)):
        scaled = torch.tensor([left] * 2)
        made[name] = Reconstructed(name, PHOTOGRAPHS[:2], scaled, torch.ones(2), scaled)
    leak = Leak(made, {}, None, "unknown", batch=2)
    assert [one.attack for one in leak.ranked] == ["token_peeling", "batch_span", "layer_span"]


def test_the_shape_that_pictures_may_have_as_well_is_named_where_nothing_is_certain() -> None:
    for residual in (1e-6, 0.5):
        assert "32×128" in explaining(residual, 0.7, other_size=(32, 128))
        assert "×" not in explaining(residual, 0.7)


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


@pytest.mark.parametrize(("sent", "moved"), [(0.1249, 0.1251), (0.1251, 0.1249), (0.12, 0.10)])
def test_patches_as_they_were_sent_are_before_those_that_borders_moved(
    sent: float, moved: float
) -> None:
    """Unless another order has clearly less of the gradient left; whatever the misfit."""

    def made(attack: str, residual: float, misfit: float) -> Reconstructed:
        left = torch.tensor([residual])
        more = {"misfits": torch.tensor([misfit]), "doubts": {0: "no levels"}}
        return Reconstructed(attack, PHOTOGRAPHS[:1], left, torch.ones(1), left, **more)

    one, other = made("patch_gradient", sent, 0.53), made("patch_jigsaw", moved, 0.51)
    leak = Leak({"patch_gradient": one, "patch_jigsaw": other}, {}, LABEL, "given")
    assert leak.best.attack == ("patch_gradient" if moved > 0.11 else "patch_jigsaw")
    assert ("colours" in leak.verdict) == (moved > 0.11)


def test_of_a_batch_the_nearest_made_for_batches_is_first_unless_another_explains_it() -> None:
    def best(**residuals: float) -> str:
        made = {
            name: Reconstructed(name, PHOTOGRAPHS[:2], *(left, torch.ones(2), left))
            for name, left in ((n, torch.full((2,), value)) for n, value in residuals.items())
        }
        return Leak(made, {}, None, "unknown", batch=2).best.attack

    assert best(batch_span=0.089, token_peeling=0.013) == "token_peeling"
    assert best(batch_span=1.5, patch_gradient=1.2, inverting_gradients=0.1) == "batch_span"
    assert best(batch_span=0.5, patch_gradient=0.3, inverting_gradients=0.005) != "batch_span"


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_an_order_that_attention_tells_is_not_laid_to_borders(
    masking: LoadedModel, monkeypatch: pytest.MonkeyPatch, found: float
) -> None:
    def told(self: object, view: object, index: int, exact: Any, hidden: Tensor) -> Any:
        placed, order = exact.placed(hidden, masking.grid, masking.patch_size)
        return placed, order, {"order_found": found}

    monkeypatch.setattr(PatchLattice, "_placed", told)
    leak = of_masked(masking, torch.zeros(1, 16, dtype=torch.bool), attacks=["patch_lattice"])
    assert leak.best.ordered == (0 if found else 16)


@pytest.mark.parametrize(("told", "named"), [(3, True), (4, False)])
def test_a_batch_of_more_pictures_than_told_shows_its_classes(told: int, named: bool) -> None:
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
    loss = nn.functional.cross_entropy(network(as_fed(PHOTOGRAPHS[:4])), torch.arange(4))
    sent = torch.autograd.grad(loss, list(network.parameters()))
    leak = attack_gradients(network, sent, mean=0.5, std=0.5, batch=told, attacks="patch_gradient")
    assert any("4 classes" in note and "batch=" in note for note in leak.notes) == named
