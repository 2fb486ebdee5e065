"""The ladder on the GPU: the same pictures as on the CPU, to what float32 gradients allow."""

from __future__ import annotations

import pytest
import torch

from attacks import find_attack
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import AttackerView, Pixels
from mjp_privacy.metrics.pictures import psnr
from tests.helpers.models import planted_model
from tests.helpers.planted import PATCH, SIDE, planted_images

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
STATIONARY = {"prior": "stationary"}


def attacked(name: str, options: dict[str, object], device: str) -> torch.Tensor:
    attack = find_attack(name, options)
    model = planted_model(unknown_embedding=True, embed_dim=160).to(device)
    images = planted_images()
    labels = torch.arange(len(images))
    ids = [str(index) for index in range(len(images))]
    rounds = [
        SETTINGS["c"].prepare(images, labels, ids, patch_size=PATCH, gamma=0.27, round=r, seed=0)
        for r in range(attack.uploads)
    ]
    client = FedSGDClient(model)
    updates = [client.update(inputs, names=list(attack.needs(model))) for inputs in rounds]
    pixels = Pixels(SIDE, model.card.mean, model.card.std)
    view = AttackerView(model, updates, pixels, labels, "plain")
    assert attack.unsupported(view) is None
    found = attack.run(view, generator=torch.Generator())
    assert found.images is not None
    return found.images.cpu()


@cuda
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("patch_gradient", {}),
        ("patch_prior", STATIONARY),
        ("masked_span", STATIONARY),
        ("masked_span", {"completion": "patch", **STATIONARY}),
        ("multi_round", {"uploads": 6, **STATIONARY}),
        ("token_span", STATIONARY),
        ("pixel_lattice", STATIONARY),
    ],
)
def test_the_device_does_not_matter(name: str, options: dict[str, object]) -> None:
    on_cpu, on_gpu = (attacked(name, options, device) for device in ("cpu", "cuda"))
    assert psnr(on_gpu, on_cpu).min() > 60
