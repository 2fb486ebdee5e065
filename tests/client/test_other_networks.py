"""Gradients of a Swin and a ResNet: each image its own, the true picture at no distance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import load_model
from mjp_privacy.uploads.header import UploadHeader
from mjp_privacy.uploads.record import Upload
from tests.helpers.families import SIDE, checkpoint


@pytest.fixture(params=["swin", "resnet"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_true_picture_has_no_distance(tmp_path: Path) -> None:
    """The gradient that the attacker computes of the true picture is the uploaded one."""
    from attacks.breaching import UploadedParameters

    model = load_model(checkpoint=checkpoint(tmp_path, "swin"))
    x, labels = torch.rand(1, 3, SIDE, SIDE), torch.tensor([3])
    mask = torch.rand(1, 64) < 0.3
    inputs = ClientInput(x, labels, ["x"], mask)
    sent = FedSGDClient(model).update(inputs).grads
    names = [name for name in sent if not name.startswith("dal_regressor")]
    victim = UploadedParameters(model, names, mask)
    loss = F.cross_entropy(victim(model.normalize(x)), labels)
    for name, mine in zip(names, torch.autograd.grad(loss, list(victim.parameters())), strict=True):
        assert torch.allclose(mine, sent[name][0], atol=1e-6), name
    hidden = (sent["absolute_pos_embed"][0, 0] == 0).all(-1)
    assert torch.equal(hidden, mask[0])


def test_the_pixels_gradient_is_found_beside_localization(tmp_path: Path) -> None:
    from attacks.gradient_matching import _gradients_of_pixels

    model = load_model(checkpoint=checkpoint(tmp_path, "swin"))
    mask = torch.rand(1, 64) < 0.3
    inputs = ClientInput(torch.rand(1, 3, SIDE, SIDE), torch.tensor([3]), ["x"], mask)
    both = FedSGDClient(model, ClientConfig(dal=True, dal_lambda=100.0)).update(inputs)
    alone = FedSGDClient(model).update(inputs).grads["absolute_pos_embed"][0]
    grads = {name: gradient[0] for name, gradient in both.grads.items()}
    assert not torch.allclose(grads["absolute_pos_embed"], alone, atol=1e-4)
    found = _gradients_of_pixels(model, grads, both, mask)["absolute_pos_embed"]
    assert torch.allclose(found, alone, atol=1e-6)


def test_gradients_of_several_images_are_each_its_own(tmp_path: Path, family: str) -> None:
    model = load_model(checkpoint=checkpoint(tmp_path, family))
    x, labels = torch.rand(4, 3, SIDE, SIDE), torch.tensor([0, 1, 2, 3])
    client = FedSGDClient(model, ClientConfig(batch=2))
    sent = client.update(ClientInput(x, labels, list("abcd"))).grads
    parameters = [p for n, p in model.named_parameters() if not n.startswith(("dal", "unk"))]
    names = [n for n, _ in model.named_parameters() if not n.startswith(("dal", "unk"))]
    for step in range(2):
        part = slice(2 * step, 2 * step + 2)
        loss = F.cross_entropy(model(model.normalize(x[part])), labels[part])
        for name, mine in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            assert torch.allclose(mine, sent[name][step], atol=1e-5), name


def test_recorded_uploads_are_of_plain_vits(tmp_path: Path) -> None:
    half = (0.5, 0.5, 0.5)
    weights = checkpoint(tmp_path, "swin")
    upload = Upload(weights.parent, "one", UploadHeader("one", weights.name, half, half))
    for load in (Upload.model, Upload.outline):
        with pytest.raises(UserError, match="swin"):
            load(upload)
