"""Accuracy of trained models on real images: a public ViT, and the zoo on data it never saw."""

import json
from pathlib import Path

import pytest

from mjp_privacy.data import open_images, spread_subset
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.training.evaluation import Protocol, measure


@pytest.mark.nightly
def test_a_public_vit_has_its_known_accuracy(shared_data: Path) -> None:
    """ViT-Ti/16 on 600 ImageNet images: 0.83 ± 0.03 top-1; shuffled, it often changes its mind."""
    model = load_model(
        "vit_tiny_patch16_224",
        checkpoint=shared_data / "weights" / "vit_tiny_patch16_224_timm.safetensors",
        mean=0.5,
        std=0.5,
    )
    source = open_images(shared_data / "data" / "imagenet-sample-600.zip")
    rows = measure(model, source, source.records, Protocol(gammas=(0.27,)))
    assert len(rows) == 600
    assert rows["top1"].astype(float).mean() == pytest.approx(0.83, abs=0.03)
    assert rows["top5"].astype(float).mean() > 0.93
    assert 0.6 < rows["consistency"].mean() < 0.95


@pytest.mark.nightly
@pytest.mark.parametrize("row", ["vit", "vit_no_pe", "vit_mjp", "vit_closed_form"])
def test_the_zoo_is_as_accurate_as_its_files_say(shared_data: Path, row: str) -> None:
    """On 800 of CIFAR-10's 10,000 test images: within three standard errors."""
    model = load_model(f"cifar_{row}")
    said = json.loads(read_metadata(f"packaged:cifar_{row}")["val_top1"]) / 100
    source = open_images(shared_data / "data" / "cifar10-test.zip")
    rows = measure(model, source, spread_subset(source.records, 800, 0), Protocol(gammas=(0.27,)))
    found = rows["top1"].astype(float).mean()
    assert found == pytest.approx(said, abs=3 * (said * (1 - said) / 800) ** 0.5)
    if row == "vit_no_pe":
        assert (rows["consistency"] == 1).all()
