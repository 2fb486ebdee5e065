"""Images that a run folder knows may come again; others under their names may not."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord, open_images
from mjp_privacy.experiment.code import code_of_cells
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.plan import Finished, make_plan
from mjp_privacy.experiment.simulated import Simulated, check_labels, check_same_images
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import Worker
from tests.helpers.models import tiny
from tests.helpers.runs import attack, one_cell, photograph, photographs


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


@pytest.mark.parametrize("options", [{}, {"engine": EngineConfig("local", workers=1)}])
def test_turned_pictures_are_said_whoever_opens_them(
    tmp_path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    images = photographs(tmp_path / "images", 3)
    turned = Image.Exif()
    turned[0x0112] = 6
    photograph(1).save(images / "1.png", exif=turned)
    attack(images, tmp_path / "run", one_cell(attacks=[{"name": "grey"}]), **options)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "EXIF" in line]
    assert "1.png" in line
    assert "0.png" not in line


def test_an_image_without_a_label_takes_nothing_from_its_neighbours(tmp_path: Path) -> None:
    records = [ImageRecord("0.png", 0, "csv"), ImageRecord("1.png"), ImageRecord("2.png", 2, "csv")]
    source = open_images(photographs(tmp_path / "images", 3))
    source = dataclasses.replace(source, records=tuple(records))
    experiment = load_experiment(one_cell(attacks=[{"name": "april"}]))
    simulated = Simulated(experiment, source, records, torch.device("cpu"))
    plan = make_plan(experiment, simulated)
    worker = Worker(
        plan, simulated, code_of_cells(plan, with_defenses=True), Finished(RunStore(tmp_path)), {}
    )
    [block] = plan.blocks["ViT"]
    list(worker.work_block(worker.open("ViT"), block, plan.cells))
    [run_id] = RunStore(tmp_path).stored_cells()
    rows = RunStore(tmp_path).read(run_id)
    for variant in ("intact", "altered"):
        assert rows[f"top1.{variant}"].isna().tolist() == [False, True, False]
