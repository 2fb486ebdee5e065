"""A user's own gradients written as a recorded upload, checked and attacked from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy import attack_gradients, save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.uploads.folder import UploadFolder
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images
from tests.helpers.uploads import check_uploads
from tests.uploads.test_attack_gradients import gradient_of

ATTACKS = {"name": "uploads", "attacks": [{"name": "patch_gradient"}]}


def test_what_is_saved_is_attacked_like_the_gradients(tmp_path: Path) -> None:
    model = planted_model()
    images, label = planted_images(1).float(), torch.tensor([3])
    gradients = gradient_of(model, images.double(), label)
    folder = tmp_path / "uploads"
    path = save_upload(folder, model, gradients, name="round_3", images=images, round=3)
    assert path == folder / "round_3.safetensors"
    (upload,) = UploadFolder(folder).entries()
    assert upload.header.round == 3
    assert upload.header.labels is None  # nobody gave it: the attacker reads it off the gradient
    text, usable = check_uploads(folder)
    assert usable
    assert "private images known" in text
    summary = attack_uploads(load_experiment(ATTACKS), folder, tmp_path / "run")
    assert summary.exit_code == 0
    (cell,) = RunStore(tmp_path / "run").read_cells()
    psnr = RunStore(tmp_path / "run").read(cell["run_id"])["psnr.standard"].item()
    direct = attack_gradients(model, gradients, images=images, attacks="patch_gradient").scores
    assert direct is not None
    assert min(psnr, 100) == pytest.approx(min(direct["psnr"].item(), 100), abs=0.5)


def test_without_images_there_is_no_truth(tmp_path: Path) -> None:
    model = planted_model()
    gradients = gradient_of(model, planted_images(1), torch.tensor([3]))
    save_upload(tmp_path, model, gradients, series="cat", label="my client", labels=3)
    (upload,) = UploadFolder(tmp_path).entries()
    assert upload.header.labels == (3,)
    assert upload.truth() is None
    assert (upload.header.series, upload.header.label) == ("cat", "my client")


def test_a_batch_whose_labels_nobody_knows_keeps_its_images(tmp_path: Path) -> None:
    model = planted_model()
    images = planted_images(2)
    gradients = gradient_of(model, images, torch.tensor([3, 4]))
    save_upload(tmp_path, model, gradients, images=images)
    (upload,) = UploadFolder(tmp_path).entries()
    assert upload.header.labels is None
    assert upload.header.batch == 2
    truth = upload.truth()
    assert truth is not None
    assert truth.image_ids == ("upload 0", "upload 1")


def test_mistakes_are_named(tmp_path: Path) -> None:
    model = planted_model()
    gradients = gradient_of(model, planted_images(1), torch.tensor([3]))
    save_upload(tmp_path, model, gradients)
    two = {name: torch.stack([g, g]) for name, g in gradients.items()}
    mistakes: list[tuple[Any, dict[str, Any], str]] = [
        (gradients, {}, "upload.json"),
        (gradients, {"name": "../x"}, "name: .*../x"),
        ([gradients, gradients], {"name": "b"}, r"2 upload\(s\)"),
        (two, {"name": "b"}, r"2 independent step\(s\)"),
        (gradients, {"name": "b", "gamma": 27}, "gamma"),
        (gradients, {"name": "b", "round": -1}, "round"),
        (gradients, {"name": "b", "labels": 99}, "labels: .*99"),
        (gradients, {"name": "b", "recipe": {"dall": True}}, "mean dal"),
    ]
    for sent, arguments, named in mistakes:
        with pytest.raises(UserError, match=named):
            save_upload(tmp_path, model, sent, **arguments)
    with pytest.raises(UserError, match="folder"):
        save_upload(tmp_path / "upload.json", model, gradients, name="b")


def test_a_model_without_a_classifier_is_attacked_but_not_saved(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, depth=2, num_classes=0
    )
    image = planted_images(1, 64).float()
    model((image - 0.5) / 0.5).square().sum().backward()
    leak = attack_gradients(model, mean=0.5, std=0.5, images=image, attacks="patch_gradient")
    assert leak.best.is_certain
    with pytest.raises(UserError, match="classifier"):
        save_upload(tmp_path, model, mean=0.5, std=0.5)
