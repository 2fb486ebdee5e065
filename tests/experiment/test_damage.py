"""Whatever changes in a run folder is noticed, left out of reports, and made again by the run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from mjp_privacy.experiment.compaction import compact
from mjp_privacy.experiment.damage import find_damage
from mjp_privacy.experiment.mending import Examination

from mjp_privacy.core import sealed
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.loading import load_runs
from mjp_privacy.report.write import write_report
from tests.helpers.runs import attack, one_cell, rows, same_results

FLIPS = 250


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cell, six images in two blocks."""
    out = tmp_path_factory.mktemp("whole") / "run"
    attack(images, out, one_cell())
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def compacted(run: Path) -> Path:
    assert compact(RunStore(run), fewest_files=1) == 1
    return run


def said(run: Path) -> str:
    sealed._read_seal.cache_clear()  # two changes can share a tick of the clock
    return "\n".join(Examination.of(run).said)


@pytest.mark.parametrize("in_parts", [False, True])
def test_every_flipped_bit_is_noticed(run: Path, in_parts: bool) -> None:
    """In any file but the log, which no figure is read from."""
    run = compacted(run) if in_parts else run
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path for path in files if path.name != "log.jsonl"]
    assert len(files) >= 8
    assert not said(run)
    draws = random.Random(in_parts)
    for number in range(FLIPS):
        path = files[number % len(files)]
        content = path.read_bytes()
        changed, bit = bytearray(content), draws.randrange(8 * len(content))
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert said(run), f"bit {bit} of {path.relative_to(run)}"
        path.write_bytes(content)
    assert not said(run)


# what is damaged is made again --------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def unseal(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"mjp-seal", b"mjp-s_al"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


WAYS = (cut, flip, unseal, Path.unlink, folder, dangle)
ROWS, PICTURES = "rows/*/00001.parquet", "reconstructions/*/00001.safetensors"


@pytest.mark.parametrize("damage", WAYS)
@pytest.mark.parametrize("pattern", [ROWS, PICTURES])
def test_a_damaged_block_is_in_no_figure_and_made_again(
    images: Path,
    whole: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    pattern: str,
) -> None:
    path = next(run.glob(pattern))
    damage(path)
    lost_rows = damage is Path.unlink and pattern == ROWS  # as if the run had not come to them
    (line,) = load_runs([run]).lines
    assert len(line.images) == len(line.rows["image_id"].unique()) == 3
    summary = write_report([run], tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    place = path.relative_to(run).as_posix()
    sentence = "DAMAGED: 3 units of 6 are damaged and in no figure: run the attack again"
    assert (sentence in summary.console) is not lost_rows
    assert (f"{sentence} ({place})" in page) is not lost_rows
    capsys.readouterr()
    assert attack(images, run, one_cell()).exit_code == 0
    err = capsys.readouterr().err
    assert (f"damaged: {place}: " in err) is not lost_rows
    assert "attack: 3/6" not in err
    same_results(run, whole)
    assert not said(run)


@pytest.mark.parametrize("damage", WAYS)
def test_in_a_part_only_the_block_of_damaged_pictures_is_made_again(
    images: Path,
    whole: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    path = next(compacted(run).glob(PICTURES))
    damage(path)
    (line,) = load_runs([run]).lines
    assert len(line.images) == 3
    kept = RunStore(run).read_rows(line.run_id, line.left_out)["image_id"].unique()
    other = next(run.glob("reconstructions/*/00000.safetensors")).stat().st_mtime_ns
    capsys.readouterr()
    attack(images, run, one_cell())
    assert "3 units" not in capsys.readouterr().err
    same_results(run, whole)
    assert next(run.glob("reconstructions/*/00000.safetensors")).stat().st_mtime_ns == other
    made = pd.read_parquet(next(run.glob("rows/*/00001.parquet")))["image_id"].unique()
    assert {*made}.isdisjoint(kept)
    assert not said(run)


@pytest.mark.parametrize("damage", WAYS)
def test_a_damaged_part_is_made_again(
    images: Path, whole: Path, run: Path, damage: Callable[[Path], None]
) -> None:
    damage(next(compacted(run).glob("rows/*/part-*.parquet")))
    attack(images, run, one_cell())
    same_results(run, whole)


@pytest.mark.parametrize("damage", WAYS[:-1])
@pytest.mark.parametrize("name", ["cells.json", "code.json", "images.csv", "timings.jsonl"])
def test_damaged_lists_are_named_and_mended(
    images: Path,
    whole: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    name: str,
) -> None:
    if name == "cells.json" and damage is folder:
        pytest.skip("a folder of this name is the user's own")
    damage(run / name)
    capsys.readouterr()
    assert attack(images, run, one_cell()).exit_code == 0
    as_killed = Path.unlink, cut, unseal  # what is gone of these files nobody can know
    unnoticed = damage is Path.unlink and name in ("cells.json", "code.json")
    unnoticed |= damage in as_killed and name == "timings.jsonl"
    unnoticed |= damage is unseal and name == "images.csv"  # it has none
    assert (name in capsys.readouterr().err) is not unnoticed
    same_results(run, whole)
    assert not said(run)
    one, other = (RunStore(out).read_images().set_index("image_id") for out in (run, whole))
    pd.testing.assert_frame_equal(one.sort_index(), other.sort_index())
    before = rows(run)
    assert attack(images, run, one_cell()).exit_code == 0
    pd.testing.assert_frame_equal(rows(run), before)


def test_a_report_says_what_is_damaged_beside_the_rows(run: Path, tmp_path: Path) -> None:
    for name in ("code.json", "images.csv", "timings.jsonl", "experiment.yaml"):
        flip(run / name)
    summary = write_report([run], tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    for name in ("code.json (", "images.csv (1 damaged line", "timings.jsonl (1 damaged line"):
        assert f"DAMAGED: run: {name}" in page
        assert f"DAMAGED: run: {name}" in summary.console
    assert "experiment.yaml (a file that changed after it was written" in page


# pictures of other rows ---------------------------------------------------------------------------


def test_pictures_that_are_newer_than_their_rows_do_not_count(
    images: Path, whole: Path, run: Path
) -> None:
    """As a run leaves them that is killed between its pictures and its rows."""
    store = RunStore(run)
    (run_id,) = store.stored_cells()
    stored, ids = store.pictures.read(store.reconstruction_path(run_id, 0))
    store.write_reconstructions(run_id, 0, {**stored, "images": stored["images"] * 0.5}, ids)
    damage = find_damage(store)
    assert damage.left_out(run_id).blocks == {0}
    assert "pictures that are older or newer than its rows" in said(run)
    attack(images, run, one_cell())
    same_results(run, whole)


def test_of_pictures_in_two_files_those_of_the_rows_that_count_are_shown(run: Path) -> None:
    """An image moved to another block, its old one is in a part, and the run was killed."""
    store = RunStore(compacted(run))
    (run_id,) = store.stored_cells()
    everything = store.read_rows(run_id)
    image = store.pictures.read(store.reconstruction_path(run_id, 0))[1][0]
    old = store.find_reconstruction(run_id, image)
    assert old is not None
    moved = {name: tensor[None] * (0.5 if name == "images" else 1) for name, tensor in old.items()}
    store.write_reconstructions(run_id, 7, moved, [image])
    store.write_rows(run_id, 7, everything[everything["image_id"] == image])
    shown = store.find_reconstruction(run_id, image)
    assert shown is not None
    assert shown["images"].equal(old["images"] * 0.5)
    assert not find_damage(store).faults
    store.drop_images(run_id, 0, [image])  # in a part nothing is removed
    assert not find_damage(store).faults


def test_damage_is_listed_with_a_bound(run: Path) -> None:
    store = RunStore(run)
    (run_id,) = store.stored_cells()
    path = store.rows_path(run_id, 0)
    for block in range(10, 25):
        shutil.copy(path, store.rows_path(run_id, block))
        flip(store.rows_path(run_id, block))
    lines = said(run).splitlines()
    assert lines[0].startswith("15 file(s) of rows or pictures are damaged")
    assert lines[-1].endswith("and 5 further files")
    assert len(lines) == 12


def test_reading_a_large_folder_is_shown(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mjp_privacy.core import progress

    monkeypatch.setattr(progress, "PLAIN_INTERVAL", 0.0)
    store = RunStore(whole)
    find_damage(store)
    (run_id,) = store.stored_cells()
    files = len(store.row_files(run_id)) + len(store.pictures.files(run_id))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"reading what is stored: {files}/{files} · ")
    assert "files/s" in lines[-1]
