"""A run goes on where it stopped, however it stopped, and never takes other images for its own."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image

from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core import files
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord, open_images
from mjp_privacy.experiment import store
from mjp_privacy.experiment.code import code_of_cells
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.plan import Finished, make_plan
from mjp_privacy.experiment.simulated import Simulated
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import Worker
from mjp_privacy.models import tensor_files
from tests.helpers.engines import attack_command
from tests.helpers.own_attacks import raised
from tests.helpers.runs import (
    attack,
    cells,
    names,
    one_cell,
    photograph,
    photographs,
    rows,
    said,
    same_results,
    same_rows,
    same_tensors,
    tensors,
    tiny,
    values,
    written,
)
from tests.helpers.trap import until

BOTH = ["float32", "float64"]
MASKED = [{"models": ["MJP"], "settings": ["b", "c"], "gammas": [0.5]}]
"""Four of the whole run's cells: eight files of rows."""


# killed -------------------------------------------------------------------------------------------


def same_as(whole: Path, out: Path) -> None:
    """The cells of a run are those of the whole one, to the last bit."""
    ids = [entry["run_id"] for entry in cells(out)]
    pd.testing.assert_frame_equal(rows(out), rows(whole, ids), check_exact=True)
    for run_id in ids:
        same_tensors(tensors(out, run_id), tensors(whole, run_id))


def test_a_process_killed_by_signal_9_goes_on(images: Path, whole: Path, tmp_path: Path) -> None:
    out, environment = tmp_path / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    options = ["--engine", "here"]
    with attack_command(
        tiny(dtypes=BOTH, grid=MASKED), images, out, options, environment
    ) as running:
        until(lambda: len(written(out)) >= 2 or running.process.poll() is not None)
        running.process.kill()
        assert running.wait() == -signal.SIGKILL, running.errors()
    kept = written(out)
    assert 2 <= len(kept) < 8
    assert attack(images, out, tiny(dtypes=BOTH, grid=MASKED)).exit_code == 0
    same_as(whole, out)
    assert kept.items() <= written(out).items(), "finished rows were written again"


class Killed(BaseException):
    """Stands in for the end of the process: nothing may catch it."""


def dying(at: int, *, before: bool) -> Callable[..., Path]:
    """`write_atomically` that dies at its k-th file, before or after that is in place."""
    write, calls = files.write_atomically, count(1)

    def mortal(path: Path, *arguments: Any, **options: Any) -> Path:
        number = next(calls)
        if number == at and before:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.1@elsewhere.tmp").write_bytes(b"half")
            raise Killed
        written = write(path, *arguments, **options)
        if number == at:
            raise Killed
        return written

    return mortal


@pytest.mark.parametrize(
    ("at", "before"),
    [(1, True), (4, False), (6, False), (8, True)],
)
def test_a_run_that_dies_at_any_file_goes_on(
    images: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    before: bool,
) -> None:
    config = tiny(dtypes=["float64"], grid=MASKED)
    with monkeypatch.context() as patch:
        mortal = dying(at, before=before)
        for module in (tensor_files, store):
            patch.setattr(module, "write_atomically", mortal)
        with pytest.raises(Killed):
            attack(images, tmp_path, config)
    finished = written(tmp_path)
    assert attack(images, tmp_path, config).exit_code == 0
    assert finished.items() <= written(tmp_path).items()
    same_as(whole, tmp_path)


def test_a_run_that_ended_early_lists_the_cells_it_owes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of a half-finished run must not look like that of a whole one."""
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "work_block", lambda *_: raised(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            attack(images, tmp_path, tiny(), limit=3)
    planned = cells(tmp_path)
    attack(images, tmp_path, tiny(), limit=3)
    assert [c["cell_key"] for c in planned] == [c["cell_key"] for c in cells(tmp_path)]
    assert {c["status"] for c in planned if c["model"] == "MJP"} == {"failed"}
    assert all(c["reason"] for c in planned if c["model"] == "MJP")
    assert {(c["status"], c["reason"]) for c in cells(tmp_path)} == {("ok", "")}


def test_a_damaged_and_a_missing_file_are_named_and_made_again(
    images: Path, whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    missing, flipped, *_ = sorted(out.glob("rows/*/00001.*.parquet"))
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    missing.unlink()
    flipped.write_bytes(content)
    assert attack(images, out, tiny(dtypes=BOTH)).exit_code == 0
    assert str(flipped.relative_to(out)) in said(out)
    assert (out / "damaged" / flipped.relative_to(out)).read_bytes() == content
    same_results(whole, out)


def test_the_same_command_again_does_nothing(
    images: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    before = written(out)
    monkeypatch.setattr(FedSGDClient, "update", lambda *_, **__: pytest.fail("computed again"))
    assert attack(images, out, tiny(dtypes=BOTH)).exit_code == 0
    assert cells(out) == cells(whole)
    assert "all 60 units" in said(out)
    assert attack(images, out, tiny(dtypes=BOTH), limit=2).images == 2
    assert written(out) == before
    pd.testing.assert_frame_equal(rows(whole), rows(out), check_exact=True)


# limits -------------------------------------------------------------------------------------------


def test_a_larger_limit_adds_blocks_to_a_smaller_one(images: Path, tmp_path: Path) -> None:
    attack(images, tmp_path / "grown", one_cell(), limit=3)
    first, files = rows(tmp_path / "grown"), written(tmp_path / "grown")
    assert attack(images, tmp_path / "grown", one_cell(), limit=6).images == 6
    assert files.items() <= written(tmp_path / "grown").items()
    attack(images, tmp_path / "fresh", one_cell(), limit=6)
    same_rows(tmp_path / "grown", tmp_path / "fresh")
    kept = rows(tmp_path / "grown")
    kept = kept[kept["image_id"].isin(set(first["image_id"]))].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, first, check_exact=True)


def test_a_limit_inside_a_block_ends_with_the_rows_of_a_fresh_run(
    images: Path, tmp_path: Path
) -> None:
    """The block is done again as a whole, for its numbers move with the batch."""
    config = one_cell(dtypes=BOTH, block=6)
    for limit in (2, 6):
        attack(images, tmp_path / "grown", config, limit=limit)
    attack(images, tmp_path / "fresh", config, limit=6)
    same_results(tmp_path / "grown", tmp_path / "fresh")


# other images -------------------------------------------------------------------------------------


@pytest.fixture
def own(images: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the images, and a finished run on it."""
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    attack(folder, tmp_path / "run", one_cell())
    return folder, tmp_path / "run"


def test_images_may_come_and_go(own: tuple[Path, Path]) -> None:
    folder, run = own
    before = values(run)
    (folder / "0.png").unlink()
    for label in (6, 7):
        photograph(label).save(folder / f"{label}.png")
    lines = [f"{at}.png,{at}" for at in range(1, 8)]
    (folder / "labels.csv").write_text("\n".join(["file,label", *lines]) + "\n")
    assert attack(folder, run, one_cell()).exit_code == 0
    assert "0.png" in said(run)  # its rows stay
    after = values(run)
    assert set(after.index.get_level_values("image_id")) == set(names(8))
    pd.testing.assert_series_equal(after[before.index], before, check_exact=True)


def test_a_run_refuses_other_pixels_and_labels_under_the_same_names(
    own: tuple[Path, Path],
) -> None:
    folder, run = own
    files, image, labels = written(run), folder / "2.png", folder / "labels.csv"
    for path, spoil in (
        (image, photograph(99).save),
        (image, lambda path: path.write_bytes(b"no image")),
        (labels, lambda path: path.write_text(path.read_text().replace("2.png,2", "2.png,3"))),
    ):
        content = path.read_bytes()
        spoil(path)
        with pytest.raises(UserError, match=r"2\.png"):
            attack(folder, run, one_cell())
        path.write_bytes(content)
        assert written(run) == files
    photograph(2).save(image, compress_level=0)  # the same pixels in other bytes
    assert attack(folder, run, one_cell()).exit_code == 0
    assert written(run) == files
    with pytest.raises(UserError, match="6 image"):  # others altogether
        attack(photographs(folder.parent / "others", 2, first=7), run, one_cell())


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
