"""A run goes on where it stopped, however it stopped, and never takes other images for its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

from mjp_privacy.core import checked_lines, files, sealed
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import execution
from mjp_privacy.experiment.store import RunStore
from tests.helpers.runs import (
    KEYS,
    attack,
    cell,
    cells,
    names,
    one_cell,
    photograph,
    photographs,
    rows,
    same_rows,
    tensors,
    tiny,
    values,
    written,
)

ROOT = Path(__file__).parents[2]
BOTH = ["float32", "float64"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of `tiny` in both precisions."""
    out = tmp_path_factory.mktemp("whole")
    attack(images, out, tiny(dtypes=BOTH))
    return out


def same_tensors(one: Path, other: Path) -> None:
    for entry in cells(one):
        left, right = tensors(one, entry["run_id"]), tensors(other, entry["run_id"])
        assert left.keys() == right.keys()
        for image_id, stored in left.items():
            assert all(stored[name].equal(right[image_id][name]) for name in stored)


# killed -------------------------------------------------------------------------------------------


def test_a_process_killed_by_signal_9_goes_on(images: Path, whole: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny(dtypes=BOTH)))
    out = tmp_path / "run"
    command = [sys.executable, "run_attack.py", str(config), "--images", str(images)]
    command += ["--out", str(out), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    quiet: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **quiet)
    deadline = time.monotonic() + 60
    while len(list(out.glob("rows/*/*.parquet"))) < 4 and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = written(out)
    parts = list(out.glob("rows/*/*.parquet"))
    assert 4 <= len(parts) < 20
    again = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **quiet)
    assert again.returncode == 0, again.stderr
    same_rows(whole, out)
    same_tensors(whole, out)
    finished = {name: kept[name] for name in kept if name.startswith("rows")}
    assert finished.items() <= written(out).items(), "finished rows were written again"


class Killed(BaseException):
    """Stands in for the end of the process: nothing may catch it."""


def killing(at: int, *, before: bool) -> Callable[..., None]:
    """`write_atomically` that dies at its k-th call, before or after the file is in place."""
    write, calls = files.write_atomically, [0]

    def mortal(path: Path, content: Callable[[Path], object], *, lasting: bool = False) -> None:
        calls[0] += 1
        if calls[0] == at and before:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.1.tmp").write_bytes(b"half")
            raise Killed
        write(path, content, durable=lasting)
        if calls[0] == at:
            raise Killed

    return mortal


@pytest.mark.parametrize(
    ("at", "before"),
    [
        *((at, before) for at in (1, 2, 3, 4, 12) for before in (True, False)),
        *((11, True), (20, True), (21, True), (22, True)),
    ],
)
def test_a_run_that_dies_at_any_file_goes_on(
    images: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    before: bool,
) -> None:
    """Four of the whole run's cells: 22 files are written, each is a place to die."""
    grid = [{"models": ["MJP"], "settings": ["b", "c"], "gammas": [0.5]}]
    with monkeypatch.context() as patch:
        mortal = killing(at, before=before)
        for module in (files, sealed, checked_lines):
            patch.setattr(module, "write_atomically", mortal)
        with pytest.raises(Killed):
            attack(images, tmp_path, tiny(dtypes=BOTH, grid=grid))
    assert attack(images, tmp_path, tiny(dtypes=BOTH, grid=grid)).exit_code == 0
    ids = [entry["run_id"] for entry in cells(tmp_path)]
    pd.testing.assert_frame_equal(rows(tmp_path), rows(whole, ids), check_exact=True)
    same_tensors(tmp_path, whole)


def test_reconstructions_without_their_rows_are_made_again(
    images: Path, whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    lost = sorted(out.glob("rows/*/00001.parquet"))[:2]
    for path in lost:
        path.unlink()
    attack(images, out, tiny(dtypes=BOTH))
    assert all(path.is_file() for path in lost)
    same_rows(whole, out)
    same_tensors(whole, out)


def test_an_image_with_rows_in_two_files_is_done_again(images: Path, tmp_path: Path) -> None:
    """As a run leaves it that is killed between writing rows and removing them elsewhere."""
    out = tmp_path / "run"
    attack(images, out, one_cell())
    before = rows(out)
    first, second = sorted(out.glob("rows/*/*.parquet"))
    both = [pd.read_parquet(path) for path in (first, second)]
    moved = both[1][both[1]["image_id"] == both[1]["image_id"].iloc[0]]
    RunStore(out).write_rows(first.parent.name, 0, pd.concat([both[0], moved]))
    attack(images, out, one_cell())
    pd.testing.assert_frame_equal(rows(out), before, check_exact=True)


def test_damaged_rows_are_named_and_made_again(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attack(images, tmp_path, one_cell())
    before = rows(tmp_path)
    damaged = next(tmp_path.glob("rows/*/00001.parquet"))
    damaged.write_bytes(b"half")
    capsys.readouterr()
    assert attack(images, tmp_path, one_cell()).exit_code == 0
    assert f"damaged: rows/{damaged.parent.name}/00001.parquet: " in capsys.readouterr().err
    pd.testing.assert_frame_equal(rows(tmp_path), before, check_exact=True)
    aside = tmp_path / "damaged" / "rows" / damaged.parent.name / "00001.parquet"
    assert aside.read_bytes() == b"half"


def test_a_killed_runs_half_table_can_be_reported(images: Path, tmp_path: Path) -> None:
    from mjp_privacy.report.write import write_report

    attack(images, tmp_path / "run", tiny())
    for path in (tmp_path / "run").glob("rows/*/00001.parquet"):
        path.unlink()
    shutil.rmtree(tmp_path / "run" / "rows" / cells(tmp_path / "run")[-1]["run_id"])
    summary = write_report([tmp_path / "run"], tmp_path / "report")
    assert (summary.lines, summary.failed_lines) == (5, 1)


# limits -------------------------------------------------------------------------------------------


def test_a_larger_limit_adds_blocks_to_a_smaller_one(images: Path, tmp_path: Path) -> None:
    attack(images, tmp_path / "grown", tiny(), limit=3)
    first, files = rows(tmp_path / "grown"), written(tmp_path / "grown")
    assert attack(images, tmp_path / "grown", tiny(), limit=6).images == 6
    assert files.items() <= written(tmp_path / "grown").items()
    attack(images, tmp_path / "fresh", tiny(), limit=6)
    same_rows(tmp_path / "grown", tmp_path / "fresh")
    kept = rows(tmp_path / "grown")
    kept = kept[kept["image_id"].isin(set(first["image_id"]))].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, first, check_exact=True)


def test_a_limit_inside_a_block_ends_with_the_rows_of_a_fresh_run(
    images: Path, tmp_path: Path
) -> None:
    """The block is done again as a whole, for its numbers move with the batch."""
    config = tiny(dtypes=BOTH, block=6)
    attack(images, tmp_path / "grown", config, limit=2)
    attack(images, tmp_path / "grown", config, limit=6)
    attack(images, tmp_path / "fresh", config, limit=6)
    same_rows(tmp_path / "grown", tmp_path / "fresh")


def test_a_smaller_limit_finds_everything_done(images: Path, whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    files = written(out)
    summary = attack(images, out, tiny(dtypes=BOTH), limit=2)
    assert (summary.images, summary.exit_code) == (2, 0)
    assert written(out) == files
    same_rows(whole, out)


# other images -------------------------------------------------------------------------------------


@pytest.fixture
def own(images: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the images, and a finished run on it."""
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    attack(folder, tmp_path / "run", one_cell())
    return folder, tmp_path / "run"


def test_other_pixels_under_the_same_name_are_refused(own: tuple[Path, Path]) -> None:
    folder, run = own
    before, files = rows(run), written(run)
    photograph(99).save(folder / "2.png")
    with pytest.raises(UserError, match=r"1 image\(s\).* had other pixels: 2\.png.*another --out"):
        attack(folder, run, one_cell())
    assert written(run) == files
    pd.testing.assert_frame_equal(rows(run), before)
    photograph(2).save(folder / "2.png")
    assert attack(folder, run, one_cell()).exit_code == 0


def test_an_image_that_was_read_and_is_damaged_now_is_refused(own: tuple[Path, Path]) -> None:
    folder, run = own
    (folder / "2.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"other pixels: 2\.png"):
        attack(folder, run, one_cell())


def test_equal_pixels_of_another_shape_are_other_pixels(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images", 1)
    Image.new("RGB", (40, 64), "red").save(folder / "1.png")
    (folder / "labels.csv").unlink()
    attack(folder, tmp_path / "run", one_cell())
    Image.new("RGB", (64, 40), "red").save(folder / "1.png")
    with pytest.raises(UserError, match=r"other pixels: 1\.png"):
        attack(folder, tmp_path / "run", one_cell())


def test_the_same_pixels_in_other_bytes_are_the_same_image(own: tuple[Path, Path]) -> None:
    folder, run = own
    files, old = written(run), (folder / "2.png").read_bytes()
    photograph(2).save(folder / "2.png", compress_level=0)
    assert (folder / "2.png").read_bytes() != old
    assert attack(folder, run, one_cell()).exit_code == 0
    assert written(run) == files


def test_other_labels_of_the_same_images_are_refused(own: tuple[Path, Path]) -> None:
    folder, run = own
    lines = (folder / "labels.csv").read_text().replace("3.png,3", "3.png,4")
    (folder / "labels.csv").write_text(lines)
    with pytest.raises(UserError, match=r"had another label: 3\.png.*another --out"):
        attack(folder, run, one_cell())
    (folder / "labels.csv").unlink()  # none: cells of their own
    assert attack(folder, run, one_cell()).exit_code == 0
    (folder / "labels.csv").write_text(lines)
    with pytest.raises(UserError, match=r"had another label: 3\.png"):
        attack(folder, run, one_cell())


def test_a_folder_of_wholly_other_images_is_refused(own: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = own
    other = photographs(tmp_path / "other", 2, first=50)
    with pytest.raises(UserError, match=r"6 image\(s\).*not among these images.*another --out"):
        attack(other, run, one_cell())


def test_images_may_come_and_go(own: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = own
    before = values(run)
    for label in (6, 7):
        photograph(label).save(folder / f"{label}.png")
        with (folder / "labels.csv").open("a") as file:
            file.write(f"{label}.png,{label}\n")
    (folder / "0.png").unlink()
    lines = (folder / "labels.csv").read_text().replace("0.png,0\n", "")
    (folder / "labels.csv").write_text(lines)
    capsys.readouterr()
    assert attack(folder, run, one_cell()).exit_code == 0
    assert "1 image(s) of this run folder are no longer among the images" in capsys.readouterr().err
    after = values(run)
    assert set(after.index.get_level_values("image_id")) == set(names(8))
    pd.testing.assert_series_equal(after[before.index], before, check_exact=True)


def test_a_failed_image_may_move_to_another_block(tmp_path: Path) -> None:
    """Fewer images before it in the order: the repaired image's rows stand in another file."""
    folder = photographs(tmp_path / "images")
    run = tmp_path / "run"
    config = one_cell(block=2)
    attack(folder, tmp_path / "order", config)
    order = pd.read_csv(tmp_path / "order" / "images.csv")["image_id"].tolist()
    first, moving = order[0], order[2]  # block 1; block 0 when the first is gone
    good = (folder / moving).read_bytes()
    (folder / moving).write_bytes(b"no image")
    assert attack(folder, run, config).exit_code == 3
    (folder / moving).write_bytes(good)
    (folder / first).unlink()
    labels = (folder / "labels.csv").read_text().splitlines()
    kept = [line for line in labels if not line.startswith(first)]
    (folder / "labels.csv").write_text("\n".join(kept) + "\n")
    assert attack(folder, run, config).exit_code == 0
    entry = cell(run)
    files = [run / "rows" / entry["run_id"] / f"{block:05d}.parquet" for block in (0, 1)]
    assert all(moving in set(pd.read_parquet(path)["image_id"]) for path in files)
    found = rows(run)
    assert not found.duplicated(KEYS).any()
    assert set(found["status"]) == {"ok"}
    files_before = written(run)
    assert attack(folder, run, config).exit_code == 0
    assert written(run) == files_before


# what is still to come ----------------------------------------------------------------------------


def test_a_killed_run_reports_the_cells_it_owes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of a half-finished run must not look like that of a whole one."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(execution, "work", stop)
        with pytest.raises(KeyboardInterrupt):
            attack(images, tmp_path / "run", tiny())
    planned = RunStore(tmp_path / "run").read_cells()
    attack(images, tmp_path / "run", tiny())
    done = RunStore(tmp_path / "run").read_cells()
    assert [cell["cell_key"] for cell in planned] == [cell["cell_key"] for cell in done]
    assert all("not run yet" in cell["reason"] for cell in planned)
    assert not any("not run yet" in cell["reason"] for cell in done)
