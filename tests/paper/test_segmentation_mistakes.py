"""Mistakes in a segmentation's pictures and label maps: seen before training, named with a count,
and never a reason to score a part of the pictures silently."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError
from mjp_privacy.paper.segmentation_data import find_pairs, splits_of
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.trainer import train
from tests.helpers.segmentation import CLASSES, pair_folder, save_pair, small

SQUARE = np.zeros((20, 20, 3), np.uint8)


@pytest.fixture
def ade(tmp_path: Path) -> Path:
    return pair_folder(tmp_path / "ade")


def trained(config: TrainingConfig, ade: Path, out: Path) -> Path:
    return train(config, data=ade, out=out, device="cpu", workers=0)


def evaluated(path: Path, ade: Path, *words: str) -> int:
    own = ["--checkpoint", str(path), "--ade20k", str(ade), "--device", "cpu"]
    return main(["evaluate", *own, *words])


@pytest.mark.parametrize("split", ["training", "validation"])
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("label", r"annotations/{}/001.png: a label 7: expected 0 \(no label\) to 3"),
        ("size", r"annotations/{}/001.png: a label map of 20×24 px, its picture 20×20"),
        ("unreadable map", r"annotations/{}/001.png: not an image in a format"),
        ("unreadable picture", r"images/{}/001.jpg: not an image in a format"),
        ("turned", r"images/{}/001.jpg: its EXIF orientation is 3 and that of its label map 1"),
    ],
)
def test_two_mistakes_are_counted_before_a_step_is_trained(
    ade: Path, tmp_path: Path, split: str, mistake: str, said: str
) -> None:
    for name in (f"{split}/001", f"{split}/002"):
        labels = np.full((24 if mistake == "size" else 20, 20), 1, np.uint8)
        labels[3, 3] = 7 if mistake == "label" else 1
        save_pair(ade, name, SQUARE, labels)
        if mistake == "unreadable map":
            (ade / "annotations" / f"{name}.png").write_bytes(b"no image")
        if mistake == "unreadable picture":
            (ade / "images" / f"{name}.jpg").write_bytes(b"no image")
        if mistake == "turned":
            turn(ade / "images" / f"{name}.jpg", 3)
    number = {"training": 8, "validation": 3}[split]
    words = f"--data: of {number} pictures under images/{split}, 2 cannot be used; the first: "
    with pytest.raises(UserError, match=words + said.format(split)):
        trained(small(), ade, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def turn(path: Path, orientation: int) -> None:
    """Write a picture again with an EXIF orientation."""
    with Image.open(path) as picture:
        exif = picture.getexif()
        exif[0x0112] = orientation
        picture.copy().save(path, exif=exif)


def test_a_picture_and_its_map_are_turned_together_or_not_at_all(ade: Path) -> None:
    pairs = find_pairs(small(), ade, None)[0]
    picture, labels = pairs.read(0)
    turn(ade / pairs.pictures[0], 6)
    with pytest.raises(ImageError, match="orientation is 6 and that of its label map 1, so that"):
        pairs.read(0)
    turn(ade / pairs.maps[0], 6)
    turned, turned_labels = pairs.read(0)
    assert turned.size == picture.size[::-1]
    assert np.array_equal(turned_labels, np.rot90(labels, -1))
    pairs.check()
    for path in (pairs.pictures[0], pairs.maps[0]):
        turn(ade / path, 1)
    assert np.array_equal(pairs.read(0)[1], labels)


def test_a_picture_that_is_damaged_further_on_is_named_with_its_split(
    ade: Path, tmp_path: Path
) -> None:
    path = ade / "images" / "validation" / "001.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match="Expected every validation image to be readable"):
        trained(small(), ade, tmp_path / "run")


def test_labels_above_the_models_classes_stop_an_evaluation(
    ade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained(small(recipe={"epochs": 1}), ade, tmp_path / "run")
    out = tmp_path / "scores"
    save_pair(ade, "validation/001", SQUARE, np.full((20, 20), 9, np.uint8))
    assert evaluated(path, ade, "--out", str(out)) == 2
    said = capsys.readouterr().err
    assert f"--ade20k: run: labels up to 9, the model has {CLASSES} classes. Expected" in said
    assert not list(out.iterdir())


def test_an_evaluation_without_any_picture_that_can_be_scored_stops(
    ade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained(small(recipe={"epochs": 1}), ade, tmp_path / "run")
    for picture in (ade / "images" / "validation").iterdir():
        picture.write_bytes(b"no image")
    assert evaluated(path, ade) == 2
    said = capsys.readouterr().err
    assert "--ade20k: run: expected pictures that can be scored, got none of 3; the first:" in said
    assert "not an image in a format" in said


def test_two_data_sets_under_one_folder_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two", "two/deeper"):
        pair_folder(tmp_path / name)
    with pytest.raises(UserError) as caught:
        splits_of(tmp_path, CLASSES, "--data")
    said = str(caught.value)
    assert "expected one data set, got 3, each with its own images folder" in said
    assert f"{tmp_path / 'one'} and {tmp_path / 'two'}" in said
    with pytest.raises(UserError, match="got 2, each with its own"):
        splits_of(tmp_path / "two", CLASSES, "--ade20k")


def test_a_misnamed_validation_split_is_said(
    ade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config: Any = small(recipe={"epochs": 1})
    trained(config, ade, tmp_path / "scored")
    line = "no images/validation: nothing is scored\n"
    assert line not in capsys.readouterr().err
    for kind in ("images", "annotations"):
        (ade / kind / "validation").rename(ade / kind / "val")
    trained(config, ade, tmp_path / "unscored")
    assert line in capsys.readouterr().err
