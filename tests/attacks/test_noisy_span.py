"""Attacks that know a defence's noise against the same attacks that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations import noisy as noisy_span
from attacks.equations.noisy import LEAK, NoisyUpload, most_probable, noisy_upload
from attacks.equations.patch_system import located, patch_system
from attacks.prior import find_prior
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.metrics.pictures import psnr
from tests.helpers.models import planted_model
from tests.helpers.night import nightly
from tests.helpers.planted import planted_images, planted_view


# At 0.03 some visible rows are weaker than the noise, and nobody can tell them from masked ones.
@pytest.mark.parametrize("defense", [{"gaussian_noise": 0.01}, {"dp_sgd": 0.00003}])
def test_knowing_the_noise_helps(defense: dict[str, float]) -> None:
    attack = find_attack("masked_span", {"prior": "stationary"})
    model = planted_model(unknown_embedding=True)
    view, inputs = planted_view(model, attack, "c")  # type: ignore[arg-type]
    names = [*view.updates[0].grads]
    client = ClientConfig(defenses=(defense,))  # type: ignore[arg-type]
    update = make_upload(model, [inputs], client, names=names)
    scores = {}
    for told in (True, False):
        sent = update if told else replace(update, noise={})
        known = replace(view, updates=[sent])
        found = attack.run(known, generator=torch.Generator())  # type: ignore[call-arg]
        scores[told] = psnr(found.images, planted_images()).mean()  # type: ignore[arg-type]
        assert located(known, sent).equal(inputs.mask) == told  # type: ignore[arg-type]
    assert scores[True] > scores[False] + 1


LEVEL = 0.03


def noisy_uploads(setting: str) -> tuple[NoisyUpload, Tensor, Tensor]:
    """One upload of a planted image, and the patch prior."""
    attack = find_attack("masked_span", {"prior": "stationary"})
    model = planted_model(unknown_embedding=setting != "a")
    view, inputs = planted_view(model, attack, setting)  # type: ignore[arg-type]
    client = ClientConfig(defenses=({"gaussian_noise": LEVEL},))  # type: ignore[arg-type]
    update = make_upload(model, [inputs], client, names=[*view.updates[0].grads])
    system = patch_system(view, update)
    prior = find_prior("stationary", patch=model.patch_size, size=view.pixels.size)
    mean, covariance = (part.double() for part in prior.patch(model.patch_size, view.pixels))
    return noisy_upload(update, system, 0, mean, covariance), mean, covariance


@pytest.mark.parametrize(
    ("setting", "contrast"), [nightly("a", 1.0), nightly("c", 1.0), ("c", 1e-4)]
)
def test_the_solution_is_that_of_the_dense_system(
    setting: str, contrast: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noisy_span, "PASSES", 0)
    monkeypatch.setattr(noisy_span, "TOLERANCE", 1e-12)
    upload, mean, covariance = noisy_uploads(setting)
    covariance = contrast * covariance
    found = most_probable([upload], mean, covariance, None)
    patches, length = found.shape
    weight = covariance + noisy_span.JITTER * covariance.diagonal().mean() * torch.eye(length)
    eye = torch.eye(patches * length, dtype=torch.float64).view(-1, patches, length)
    forces = [upload.force(one) + one @ torch.linalg.inv(weight) for one in eye]
    dense = torch.stack([force.flatten() for force in forces], dim=1)
    right = upload.pull() + mean.expand_as(found) @ torch.linalg.inv(weight)
    wanted = torch.linalg.solve(dense, right.flatten()).view_as(found)
    assert torch.allclose(found, wanted, atol=1e-5 * contrast**0.5)


def test_rows_beside_a_guess_are_those_of_dense_conditioning() -> None:
    """g_1 ... g_N and G = A^T X jointly Gaussian around what was sent, a column of D at a time."""
    upload, mean, covariance = noisy_uploads("a")
    guess = most_probable([upload], mean, covariance, None)
    found = upload.with_rows(guess).rows
    length = guess.shape[1]
    a, g, sent = upload.error.rows, upload.error.total, upload.error.sent
    joint = a * guess.mT @ guess + g * torch.eye(length)  # of G's row, given the rows sent
    gain = a * guess @ torch.linalg.inv(joint)
    wanted = sent + gain @ (upload.total - sent.mT @ guess).mT
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-7 * float(sent.abs().max()))
    assert not torch.allclose(found, sent, rtol=1e-2)


@pytest.mark.parametrize("name", ["masked_span", "multi_round"])
def test_knowing_the_rows_better_helps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain client, whose noise is drawn anew in every round."""
    attack = find_attack(name, {"prior": "stationary"})
    model = planted_model()
    view, inputs = planted_view(model, attack, "a")  # type: ignore[arg-type]
    client = ClientConfig(defenses=({"gaussian_noise": LEVEL},))  # type: ignore[arg-type]
    names = [*view.updates[0].grads]
    rounds = range(len(view.updates))
    updates = [make_upload(model, [inputs], client, names=names, round=r) for r in rounds]
    known = replace(view, updates=updates)
    scores = {}
    for passes in (0, noisy_span.PASSES):
        monkeypatch.setattr(noisy_span, "PASSES", passes)
        found = attack.run(known, generator=torch.Generator())  # type: ignore[call-arg]
        scores[passes] = float(psnr(found.images, planted_images()).mean())  # type: ignore[arg-type]
    assert scores[noisy_span.PASSES] > scores[0] + 0.2


@pytest.mark.nightly
@pytest.mark.parametrize("share", [0.01, 0.0001])
@pytest.mark.parametrize("name", ["masked_span", "multi_round", "pixel_lattice"])
def test_an_upload_of_next_to_nothing_gives_a_picture(name: str, share: float) -> None:
    """Fewer directions are left of G than patches are hidden."""
    attack = find_attack(name, {"prior": "stationary"})
    model = planted_model(unknown_embedding=True)
    view, inputs = planted_view(model, attack, "c")  # type: ignore[arg-type]
    client = ClientConfig(defenses=({"top_k": share},))  # type: ignore[arg-type]
    update = make_upload(model, [inputs], client, names=[*view.updates[0].grads])
    known = replace(view, updates=[update] * len(view.updates))
    found = attack.run(known, generator=torch.Generator())  # type: ignore[call-arg]
    assert psnr(found.images, planted_images()).min() > 8  # type: ignore[arg-type]
    if name != "pixel_lattice":
        assert found.diagnostics["open_directions"].isnan().all()


def test_a_leaks_weight_is_told_by_noise_in_the_directions_off_the_rows() -> None:
    upload, _, _ = noisy_uploads("c")
    width, length = upload.total.shape
    free = width - int((~upload.hidden).sum())
    assert 0 < free < width
    error = upload.error
    deviation = (error.total + error.rows * len(upload.hidden) * error.energy) ** 0.5
    edge = deviation * (free**0.5 + length**0.5)
    assert len(upload.leak.basis)
    wanted = 1 - LEAK * (edge / upload.leak.strengths).square()
    assert torch.allclose(upload.leak.weights, wanted, rtol=1e-6)


# conjugate gradients ------------------------------------------------------------------------------


def steps_and_residual(scale: float) -> tuple[int, float]:
    """How often the matrix was applied, and the share of the residual that is left."""
    draws = torch.Generator().manual_seed(4)
    square = torch.randn(40, 40, generator=draws).double()
    matrix = square @ square.mT + torch.eye(40)
    wanted = scale * torch.randn(40, 1, generator=draws).double()
    asked = []

    def apply(x: Tensor) -> Tensor:
        asked.append(x)
        return matrix @ x

    found = noisy_span._conjugate_gradients(apply, wanted, lambda x: x, None)
    return len(asked), float((matrix @ found - wanted).norm() / wanted.norm())


def test_it_stops_at_the_tolerance_whatever_the_scale() -> None:
    steps, left = steps_and_residual(1.0)
    assert noisy_span.TOLERANCE / 1e3 < left <= noisy_span.TOLERANCE
    for scale in (1e-5, 1e5):
        others, remaining = steps_and_residual(scale)
        assert abs(others - steps) <= 1  # rounding
        assert remaining <= noisy_span.TOLERANCE


def test_where_no_step_is_possible_the_last_guess_is_the_answer() -> None:
    wanted, guess = torch.ones(5, 2).double(), torch.full((5, 2), 3.0).double()
    for start, expected in ((None, 0.0), (guess, 3.0)):
        found = noisy_span._conjugate_gradients(torch.zeros_like, wanted, lambda x: x, start)
        assert torch.equal(found, torch.full_like(wanted, expected))


def test_a_guess_that_is_worse_than_nothing_is_not_begun_with() -> None:
    """Of x² / 2 - x, whose least value is at 1: at 1.9 it is below 0, at 2.1 above."""
    begun: list[float] = []

    def apply(x: Tensor) -> Tensor:
        begun.append(float(x[0, 0]))
        return x

    wanted = torch.ones(1, 1).double()
    for guess, first_direction in ((1.9, -0.9), (2.1, 1.0)):
        begun.clear()
        found = noisy_span._conjugate_gradients(
            apply, wanted, lambda x: x, torch.full((1, 1), guess).double()
        )
        assert found.item() == pytest.approx(1.0)
        assert begun[1] == pytest.approx(first_direction)
