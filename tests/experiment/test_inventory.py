"""Which images a run folder knows: directly, without a run around it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mjp_privacy.experiment.block import Block, ImageNote
from mjp_privacy.experiment.finished import Finished
from mjp_privacy.experiment.inventory import Inventory, check_labels, pixel_sha256
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord, open_images
from mjp_privacy.experiment.store import RunStore
from tests.helpers.models import tiny
from tests.helpers.runs import attack, cell, one_cell, photographs


def notes_of(folder: Path) -> list[ImageNote]:
    source = open_images(folder)
    return [
        ImageNote(record, "file", pixel_sha256(source.decode(record))) for record in source.records
    ]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return photographs(tmp_path / "images", 3)


@pytest.fixture
def inventory(images: Path, tmp_path: Path) -> Inventory:
    """Knows the three images."""
    inventory = Inventory(RunStore(tmp_path / "run"))
    inventory.note(notes_of(images))
    return inventory


def checked(inventory: Inventory, folder: Path) -> list[str]:
    """By a later command, which reads images.csv anew."""
    source = open_images(folder)
    return Inventory(inventory.store).check_known(source, source.records)


def test_the_same_images_are_known_again(inventory: Inventory, images: Path) -> None:
    assert checked(inventory, images) == []


def test_an_image_encoded_anew_is_the_same(inventory: Inventory, images: Path) -> None:
    path = images / "0.png"
    before = path.read_bytes()
    Image.open(path).save(path, compress_level=1)
    assert path.read_bytes() != before
    assert checked(inventory, images) == []


def test_other_pixels_and_labels_are_refused(inventory: Inventory, images: Path) -> None:
    shutil.copy(images / "1.png", images / "0.png")
    with pytest.raises(UserError, match=r"1 image\(s\) .* had other pixels: 0\.png"):
        checked(inventory, images)
    labels = images / "labels.csv"
    labels.write_text(labels.read_text().replace("2.png,2", "2.png,7"))
    with pytest.raises(UserError, match=r"had another label: 2\.png"):
        checked(inventory, images)


def test_images_that_are_gone_are_named(inventory: Inventory, images: Path) -> None:
    (images / "0.png").unlink()
    labels = images / "labels.csv"
    labels.write_text(labels.read_text().replace("0.png,0\n", ""))
    assert checked(inventory, images) == ["0.png"]


def test_other_images_altogether_are_refused(inventory: Inventory, tmp_path: Path) -> None:
    others = photographs(tmp_path / "others", 2, first=5)
    with pytest.raises(UserError, match=r"3 image\(s\) .* are not among these images"):
        checked(inventory, others)


def test_an_image_that_one_model_takes_stays_known(inventory: Inventory) -> None:
    record = ImageRecord("0.png", 0, "csv")
    inventory.note([ImageNote(record, "file", "", "too small for this model")])
    known = inventory.known["0.png"]
    assert (known["status"], known["reason"]) == ("ok", "")


def test_a_label_stays_known_when_the_image_comes_without(inventory: Inventory) -> None:
    inventory.note([ImageNote(ImageRecord("1.png"), "file", "pixels")])
    assert inventory.known["1.png"]["label"] == 1
    inventory.note([ImageNote(ImageRecord("new.png"), "file", "", "cut off")])
    assert inventory.known["new.png"]["status"] == "failed"
    read_again = Inventory(inventory.store).known
    assert read_again["new.png"]["reason"] == "cut off"


def test_labels_must_be_classes_of_the_model() -> None:
    model = tiny()
    check_labels([ImageRecord("a", 4, "csv"), ImageRecord("b")], model)
    with pytest.raises(UserError, match=r"Image c has label 5, .* 5 classes, 0 to 4"):
        check_labels([ImageRecord("c", 5, "csv")], model)


def test_a_unit_is_finished_when_none_of_its_rows_failed(images: Path, tmp_path: Path) -> None:
    (images / "1.png").write_bytes(b"")
    out = tmp_path / "attacked"
    assert attack(images, out, one_cell()).exit_code == 3
    records = open_images(images).records
    finished, block = Finished(RunStore(out)), Block(0, records)
    run_id = cell(out)["run_id"]
    assert [record.image_id for record in finished.left(run_id, block)] == ["1.png"]
    assert finished.left("nobody", block) == list(records)
