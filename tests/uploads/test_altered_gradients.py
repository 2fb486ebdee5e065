"""What the verdict says of a client that clips its gradient, adds noise, or trains another loss."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients, load_images, load_model
from mjp_privacy.models import LoadedModel
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images

Gradients = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return planted_model()


def gradients(
    model: LoadedModel, smoothing: float = 0.0, picture: Tensor | None = None
) -> dict[str, Tensor]:
    logits = model(model.normalize(planted_images(1) if picture is None else picture))
    loss = nn.functional.cross_entropy(logits, torch.tensor([3]), label_smoothing=smoothing)
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: g for n, g in zip(names, values, strict=True) if g is not None}


def clipped(sent: Gradients, norm: float) -> dict[str, Tensor]:
    size = float(torch.stack([g.norm() for g in sent.values()]).norm())
    return {name: g * norm / size for name, g in sent.items()}


def noisy(sent: Gradients, spread: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: g + spread * torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for name, g in sent.items()
    }


@pytest.mark.parametrize("norm", [1.0, 1e-3])
def test_the_clip_factor_is_found_and_said(model: LoadedModel, norm: float) -> None:
    sent = gradients(model)
    size = float(torch.stack([g.norm() for g in sent.values()]).norm())
    leak = attack_gradients(model, clipped(sent, norm), labels=[3], attacks=["patch_gradient"])
    assert leak.best.factor == pytest.approx(norm / size, rel=1e-6)
    assert leak.best.scaled_residual < 1e-6
    found = re.search(r"times (?:1/)?([0-9.e+]+)", leak.verdict)
    assert found is not None
    said = float(found[1].rstrip("."))
    assert said == pytest.approx(max(norm / size, size / norm), rel=0.01)
    assert (leak.best.image.double() - planted_images(1)[0]).abs().max() < 1e-5


def test_what_is_not_clipped_has_the_gradient_itself(model: LoadedModel) -> None:
    leak = attack_gradients(model, gradients(model), attacks=["patch_gradient"])
    assert leak.best.factor == pytest.approx(1)
    assert "times" not in leak.verdict


def test_a_factor_does_not_make_a_wrong_picture_right(model: LoadedModel) -> None:
    leak = attack_gradients(model, clipped(gradients(model), 1.0), labels=[3], attacks=["april"])
    if len(leak):
        assert leak.best.scaled_residual > 0.1
        assert "explains the uploaded gradient" not in leak.verdict


def test_declared_noise_is_weighed(model: LoadedModel) -> None:
    sent = gradients(model)
    patch = sent["patch_embed.proj.weight"]
    spread = 0.05 * float(patch.norm()) / patch.numel() ** 0.5
    leak = attack_gradients(
        model, noisy(sent, spread), labels=[3], noise=spread, attacks=["patch_gradient"]
    )
    assert leak.declared == pytest.approx(0.05, rel=0.1)
    undeclared = attack_gradients(
        model, noisy(sent, spread), labels=[3], attacks=["patch_gradient"]
    )
    assert undeclared.declared == 0
    assert "noise=" in undeclared.verdict or undeclared.best.is_certain


def test_the_choice_uses_the_scale(model: LoadedModel) -> None:
    attacks = ["april", "patch_gradient", "masked_span"]
    leak = attack_gradients(model, clipped(gradients(model), 1e-2), labels=[3], attacks=attacks)
    assert leak.best.attack == "patch_gradient"


def test_another_loss_is_no_multiple(model: LoadedModel) -> None:
    sent = gradients(copy.deepcopy(model), smoothing=0.5)
    leak = attack_gradients(model, sent, labels=[3], attacks=["patch_gradient"])
    assert "explains the uploaded gradient" not in leak.verdict
    assert leak.best.is_certain  # whatever the loss


@pytest.mark.parametrize("share", [1e-3, 1e-2])
def test_declared_noise_beside_a_clip_is_named(model: LoadedModel, share: float) -> None:
    """The noise moves the picture, and so leaves more of the gradient than it is itself."""
    sent = clipped(gradients(model), 1.0)
    spread = share / sum(g.numel() for g in sent.values()) ** 0.5
    leak = attack_gradients(
        model, noisy(sent, spread), labels=[3], noise=spread, attacks=["patch_gradient"]
    )
    assert leak.best.scaled_residual > 0.01
    assert f"{leak.declared:.2g}" in leak.verdict
    assert "times 1/2" in leak.verdict
    assert "explains" not in leak.verdict


def test_a_scale_of_a_part_is_not_called_clipping() -> None:
    """Label smoothing scales most of the gradient of a classifier that knows nothing yet."""
    shape = {"img_size": 64, "patch_size": 8, "depth": 3, "num_classes": 10}
    vit = load_model("vit_tiny_patch16_224", checkpoint="random", mean=0.5, std=0.5, **shape)
    picture = next(iter(load_images("embedded", size=64)))[0][None]
    for smoothing in (0.1, 0.0):
        sent = gradients(vit, smoothing, picture)
        sent = {name: g / (1 if smoothing else 30) for name, g in sent.items()}
        leak = attack_gradients(vit, sent, labels=[3], attacks=["patch_gradient"])
        assert leak.best.is_certain
        assert leak.best.scaled_residual < 0.01
        assert ("was it clipped" in leak.verdict) == (smoothing == 0)
        assert ("label smoothing" in leak.verdict) == (smoothing > 0)


@pytest.mark.parametrize("error", ["noise", "fp16"])
def test_what_rounding_and_noise_leave_is_not_laid_to_the_loss_alone(
    model: LoadedModel, error: str
) -> None:
    """A clipped gradient with small errors leaves a part, too: it may have been clipped."""
    whole = gradients(model)
    size = float(torch.stack([g.norm() for g in whole.values()]).norm())
    sent = clipped(whole, 0.7 * size)
    spread = 1e-4 * 0.7 * size / sum(g.numel() for g in sent.values()) ** 0.5
    sent = noisy(sent, spread) if error == "noise" else {n: g.half() for n, g in sent.items()}
    spread = spread if error == "noise" else 0.0
    leak = attack_gradients(model, sent, labels=[3], noise=spread, attacks=["patch_gradient"])
    assert 1e-3 < leak.best.scaled_residual < 1e-2
    assert leak.best.factor == pytest.approx(0.7, abs=0.01)
    assert ("clipped" if error == "noise" else "half precision") in leak.verdict
