"""A tiny model saved in the authors' layout, with their code's logits and localization outputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mjp_privacy.models import LoadedModel, load_model

ARCHITECTURE: dict[str, Any] = {
    "img_size": 64,
    "patch_size": 16,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 10,
}
NORMALISATION = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="module")
def path(shared_data: Path) -> Path:
    return shared_data / "reference" / "official_layout_tiny.safetensors"


@pytest.fixture(scope="module")
def stored(path: Path) -> dict[str, Tensor]:
    found = load_file(path)
    return {name.removeprefix("io."): t for name, t in found.items() if name.startswith("io.")}


@pytest.fixture(scope="module", params=["safetensors", "pth", "model. in pth"])
def model(request: pytest.FixtureRequest, path: Path, tmp_path_factory: Any) -> LoadedModel:
    """The file itself, and its weights as the authors' trainer would have saved them."""
    if request.param != "safetensors":
        weights = {n: t for n, t in load_file(path).items() if n.startswith("model.")}
        if request.param == "pth":
            bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
            weights = {"model": bare, "epoch": 299, "max_accuracy": 80.5}
        path = tmp_path_factory.mktemp("official") / "weights.pth"
        torch.save(weights, path)
    return load_model(checkpoint=path, **ARCHITECTURE, **NORMALISATION)


def test_the_report(model: LoadedModel, path: Path) -> None:
    report = model.card.checkpoint
    assert report.layout == "official_mjp"
    assert report.missing == report.unexpected == report.notes == ()
    assert (model.dal_kind, model.unk_embed is not None) == ("nonlinear", True)
    assert model.card.architecture == "vit d48 l2 h3 p16@64"
    if report.source == path.name:
        assert [name[:3] for name in report.beside] == ["io."] * 7


def assert_within(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5


def test_the_logits(model: LoadedModel, stored: dict[str, Tensor]) -> None:
    with torch.no_grad():
        assert_within(model(stored["plain"]), stored["logits_plain"])
        mask = stored["mask_with_cls"][:, 1:].bool()  # the authors' mask counts the class token
        assert not stored["mask_with_cls"][:, 0].any()
        for form in (mask, mask[0], mask.expand(2, -1)):
            assert_within(model(stored["shuffled"], mask=form), stored["logits_shuffled"])
        unmasked = model(stored["shuffled"])
        assert (unmasked - stored["logits_shuffled"]).abs().max() > 1e-3  # the mask does matter


def test_the_localization(model: LoadedModel, stored: dict[str, Tensor]) -> None:
    mask = stored["mask_with_cls"][:, 1:].bool()
    with torch.no_grad():
        target, prediction = model.dal(mask)
        assert_within(target, stored["dal_target"])
        assert_within(prediction, stored["dal_pred"])
        target, prediction = model.dal(mask[0])
        assert_within(target, stored["dal_target"][0])
        assert_within(prediction, stored["dal_pred"][0])
        expected = (stored["dal_target"] - stored["dal_pred"]).abs().mean()
        assert_within(model.dal_loss(mask), expected)
