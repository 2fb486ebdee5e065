"""Accuracy and consistency as the authors' scripts measure them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from mjp_privacy.cli import main
from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.models.jigsaw import draw_masks
from mjp_privacy.training.evaluation import Protocol, measure, protocols
from tests.helpers.models import tiny
from tests.helpers.training import class_folders
from tests.training.test_evaluation import saved, undecided


def wide_picture() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 90, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_pictures_are_cut_and_squashed_as_torchvision_does() -> None:
    picture, model = wide_picture(), tiny(torch.float32)
    accuracy, consistency = (one.preparation(model) for one in protocols("authors_code"))
    size = model.card.img_size
    cut = v2.Compose(
        [
            v2.Resize(size * 256 // 224, interpolation=v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(size),
            v2.PILToTensor(),
        ]
    )
    squash = v2.Compose(
        [v2.Resize((size, size), interpolation=v2.InterpolationMode.BICUBIC), v2.PILToTensor()]
    )
    assert torch.equal(accuracy(picture), cut(picture) / 255)
    assert torch.equal(consistency(picture), squash(picture) / 255)
    assert not torch.equal(Preprocessing(size)(picture), consistency(picture))


def test_one_mask_serves_a_batch_of_the_authors_and_each_image_its_own_here(tmp_path: Path) -> None:
    images = open_images(class_folders(tmp_path / "data", images=3, classes=4, side=32))
    model = undecided(tiny(torch.float32, unknown_embedding=True, resize=32))
    ours = measure(model, images, images.records, Protocol(gammas=(0.9,)))
    shared = measure(model, images, images.records, Protocol(gammas=(0.9,), mask_per="batch"))
    ids = [record.image_id for record in images.records]
    mask, _ = draw_masks(ids, grid=4, gamma=0.9, round=0, seed=0)
    assert ours["masked_patches"].tolist() == mask.sum(-1).tolist()
    assert set(shared["masked_patches"]) == {int(mask[0].sum())}
    assert shared["diff_norm"].iloc[0] == pytest.approx(ours["diff_norm"].iloc[0])


def test_the_command_measures_each_group_at_its_own_gamma(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", images=3, classes=5, side=40)
    file = saved(tmp_path / "model.safetensors", undecided(tiny(torch.float32)))
    more = ["--preset", "authors_code", "--out", str(tmp_path / "out")]
    assert main(["evaluate", "--checkpoint", str(file), "--data", str(data), *more]) == 0
    table = pd.read_csv(tmp_path / "out" / "summary.csv").set_index("gamma")
    assert table.index.tolist() == [0.5, 0.9]
    assert table["top1_shuffled"].notna().tolist() == [False, True]
    assert table["consistency"].notna().tolist() == [True, False]


def test_an_image_that_is_measured_twice_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accuracy and consistency are measured on different pictures of each image."""
    data = class_folders(tmp_path / "data", images=3, classes=5, side=40)
    (data / "class_0" / "001.png").write_bytes(b"no image")
    file = saved(tmp_path / "model.safetensors", undecided(tiny(torch.float32)))
    more = ["--preset", "authors_code", "--gamma", "0.1", "0.5", "--out", str(tmp_path / "out")]
    assert main(["evaluate", "--checkpoint", str(file), "--data", str(data), *more]) == 3
    assert len(pd.read_csv(tmp_path / "out" / "per_image.csv")) == 2 * 2 * 15
    table = pd.read_csv(tmp_path / "out" / "summary.csv")
    assert table["n"].tolist() == [14, 14]
    assert table["failed"].tolist() == [1, 1]
    said = capsys.readouterr().err
    assert "1 not read, and in no figure:\n  class_0/001.png: not an image" in said


def test_given_gammas_and_means_replace_the_presets() -> None:
    assert [one.gammas for one in protocols("authors_code", (0.3, 0.1))] == [(0.1, 0.3)] * 2
    assert protocols("paper") == protocols("ours") == (Protocol(),)


def test_the_authors_normalise_every_model_with_imagenets_figures(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", images=2, classes=5, side=40)
    file = saved(tmp_path / "model.safetensors", undecided(tiny(torch.float32)))
    figures = {}
    for name, more in {
        "ours": [],
        "authors": ["--preset", "authors_code"],
        "ours again": ["--preset", "authors_code", "--mean", "0.5", "--std", "0.25"],
    }.items():
        out = tmp_path / name
        line = ["--checkpoint", str(file), "--data", str(data), "--gamma", "0.5", *more]
        assert main(["evaluate", *line, "--out", str(out)]) == 0
        rows = pd.read_csv(out / "per_image.csv")
        figures[name] = json.dumps(rows["diff_norm"].dropna().round(6).tolist())
    assert figures["authors"] != figures["ours again"]
