"""Images that a run folder knows may come again; others under their names may not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord, open_images
from mjp_privacy.experiment.simulated import check_labels, check_same_images
from mjp_privacy.experiment.store import RunStore
from tests.helpers.models import tiny
from tests.helpers.runs import attack, one_cell, photographs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three images and the run on them, one of which is no picture."""
    place = tmp_path_factory.mktemp("made")
    (photographs(place / "images", 4) / "3.png").write_bytes(b"")
    assert attack(place / "images", place / "run", one_cell()).exit_code == 3
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "place"))


def checked(place: Path, images: str = "images") -> list[str]:
    source = open_images(place / images)
    return check_same_images(RunStore(place / "run"), source, source.records)


def test_the_same_images_are_known_also_encoded_anew_or_mended(place: Path) -> None:
    assert checked(place) == []
    Image.open(place / "images" / "0.png").save(place / "images" / "0.png", compress_level=1)
    shutil.copy(place / "images" / "1.png", place / "images" / "3.png")
    assert checked(place) == []


def test_other_pixels_and_labels_are_refused(place: Path) -> None:
    labels = place / "images" / "labels.csv"
    labels.write_text(labels.read_text().replace("2.png,2", "2.png,3"))
    with pytest.raises(UserError, match=r"2\.png"):
        checked(place)
    labels.write_text(labels.read_text().replace("2.png,3", "2.png,2"))
    shutil.copy(place / "images" / "1.png", place / "images" / "0.png")
    with pytest.raises(UserError, match=r"0\.png"):
        checked(place)


def test_images_that_are_gone_are_named_and_others_altogether_refused(place: Path) -> None:
    (place / "images" / "0.png").unlink()
    labels = place / "images" / "labels.csv"
    labels.write_text(labels.read_text().replace("0.png,0\n", ""))
    assert checked(place) == ["0.png"]
    photographs(place / "others", 2, first=5)
    with pytest.raises(UserError, match="3 image"):
        checked(place, "others")


def test_labels_must_be_classes_of_the_model() -> None:
    model = tiny()
    check_labels([ImageRecord("a", 4, "csv"), ImageRecord("b")], model)
    with pytest.raises(UserError, match=r"Image c .* 5"):
        check_labels([ImageRecord("c", 5, "csv")], model)
