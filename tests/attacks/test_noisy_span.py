"""Attacks that know a defence's noise against the same attacks that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations import noisy_span
from attacks.equations.noisy_span import most_probable
from attacks.equations.noisy_upload import NoisyUpload, noisy_upload
from attacks.equations.patch_system import located, patch_system
from attacks.prior import find_prior
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.metrics.pixel import psnr
from tests.helpers.models import planted_model
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


@pytest.mark.parametrize("setting", ["a", "c"])
def test_the_solution_is_that_of_the_dense_system(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noisy_span, "PASSES", 0)
    monkeypatch.setattr(noisy_span, "TOLERANCE", 1e-12)
    upload, mean, covariance = noisy_uploads(setting)
    found = most_probable([upload], mean, covariance, None)
    patches, length = found.shape
    weight = covariance + noisy_span.JITTER * covariance.diagonal().mean() * torch.eye(length)
    eye = torch.eye(patches * length, dtype=torch.float64).view(-1, patches, length)
    forces = [upload.force(one) + one @ torch.linalg.inv(weight) for one in eye]
    dense = torch.stack([force.flatten() for force in forces], dim=1)
    right = upload.pull() + mean.expand_as(found) @ torch.linalg.inv(weight)
    wanted = torch.linalg.solve(dense, right.flatten()).view_as(found)
    assert torch.allclose(found, wanted, atol=1e-5)


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
