"""APRIL and its ceiling on real weights: expected dB per image, and both engines beside."""

from __future__ import annotations

import io
import itertools
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from attacks import find_attack
from attacks.controls import oracle_inverse
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.data import Preprocessing
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block
from tests.helpers.night import by_day


@dataclass(frozen=True)
class Stored:
    model: LoadedModel
    inputs: ClientInput
    expected: dict[str, dict[str, float]]

    def values(self, key: str) -> Tensor:
        return torch.tensor([self.expected[i][key] for i in self.inputs.image_ids]).double()


@pytest.fixture(scope="module")
def stored(shared_data: Path) -> Stored:
    model = load_model(
        "vit_tiny_patch16_224",
        checkpoint=shared_data / "weights" / "vit_tiny_patch16_224_timm.safetensors",
        img_size=192,
        mean=0.5,
        std=0.5,
    )
    folder = shared_data / "reference"
    expected = json.loads((folder / "april_images_192.json").read_text())["images"]
    with zipfile.ZipFile(folder / "april_images_192.zip") as file:
        pictures = [Image.open(io.BytesIO(file.read(name))) for name in expected]
        images = torch.stack([Preprocessing(192)(picture) for picture in pictures])
    labels = torch.tensor([entry["label"] for entry in expected.values()])
    return Stored(model, ClientInput(images, labels, tuple(expected)), expected)


def attack(stored: Stored, dtype: torch.dtype, engine: str, inputs: ClientInput) -> Reconstruction:
    april = find_attack("april", {"engine": engine})
    victim = with_closed_form_block(stored.model).to(dtype)
    update = FedSGDClient(victim).update(inputs, names=april.needs(victim))
    view = AttackerView(victim, [update], Pixels(192, (0.5,) * 3, (0.5,) * 3))
    assert april.unsupported(view) is None
    return april.run(view, generator=torch.Generator())


def test_ceiling_per_image(stored: Stored) -> None:
    found = psnr(oracle_inverse(stored.model, stored.inputs.images), stored.inputs.images)
    assert (found - stored.values("ceiling")).abs().max() <= 0.05


@pytest.mark.parametrize("engine", ["batched", "breaching"])
def test_float64_per_image(stored: Stored, engine: str) -> None:
    found = attack(stored, torch.float64, engine, stored.inputs)
    scores = psnr(found.images, stored.inputs.images)
    assert (scores - stored.values("april_fp64")).abs().max() <= 0.05
    ratio = found.diagnostics["cond_a"] / stored.values("cond_fp64")
    assert (ratio - 1).abs().max() <= 1e-3
    assert found.diagnostics["rank_a"].tolist() == [145.0] * 6


@pytest.mark.parametrize("engine", ["batched", "breaching"])
def test_float32_mean(stored: Stored, engine: str) -> None:
    found = attack(stored, torch.float32, engine, stored.inputs)
    scores = psnr(found.images, stored.inputs.images)
    assert abs(scores.mean() - stored.values("april_fp32").mean()) <= 2.0
    assert (found.diagnostics["rank_a"] < 145).all()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("gamma", "unknown"),
    by_day(itertools.product([0.0, 0.27, 0.9], [False, True]), {3, 4}),
)
def test_engines_agree_per_image(stored: Stored, gamma: float, unknown: bool) -> None:
    """Also under MJP: zero rows kept, the table subtracted everywhere."""
    if unknown:
        mean = stored.model.table.detach()[:, 1:].mean(1, keepdim=True)
        stored.model.unk_embed = torch.nn.Parameter(mean)
    try:
        inputs = SETTINGS["b"].prepare(
            stored.inputs.images,
            stored.inputs.labels,
            stored.inputs.image_ids,
            patch_size=16,
            gamma=gamma,
            round=0,
            seed=0,
        )
        ours, theirs = (
            attack(stored, torch.float64, engine, inputs) for engine in ("batched", "breaching")
        )
    finally:
        stored.model.unk_embed = None
    one, other = psnr(ours.images, inputs.images), psnr(theirs.images, inputs.images)
    assert (one - other).abs().max() <= 0.01
    hidden = ours.diagnostics["zero_rows"].sum()
    assert (hidden > 0) == (unknown and gamma > 0)
    assert inputs.mask is not None
    if unknown:
        assert ours.diagnostics["zero_rows"].tolist() == inputs.mask.sum(-1).tolist()
