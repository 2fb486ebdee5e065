"""Folders of versions that knew no seals are reported, resumed, and from then on checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from mjp_privacy.experiment.cell_list import SEALED, UNSEALED
from mjp_privacy.experiment.compaction import compact
from mjp_privacy.experiment.mending import Examination
from safetensors import safe_open
from safetensors.torch import save_file

from mjp_privacy.core.sealed import read_seal
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.loading import load_runs
from tests.helpers.runs import attack, one_cell, rows, same_rows, written


def as_before(run: Path) -> Path:
    """The folder as an earlier version wrote it: no seal and no checksum in any file."""
    for path in run.glob("rows/*/*.parquet"):
        pd.read_parquet(path).to_parquet(path, index=False)
    for path in run.glob("reconstructions/*/*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = {key: v for key, v in file.metadata().items() if key != "mjp-seal"}
        save_file(tensors, path, metadata)
    for name in ("cells.json", "code.json"):
        content = json.loads((run / name).read_text(encoding="utf-8"))
        del content["seal"]
        (run / name).write_text(json.dumps(content | ({"format": 1} if "cells" in content else {})))
    for path in (run / "experiment.yaml", *run.glob("experiments/*")):
        path.write_text(path.read_text(encoding="utf-8").partition("\n")[2])
    images = pd.read_csv(run / "images.csv", dtype=str, keep_default_na=False)
    images.drop(columns="check").to_csv(run / "images.csv", index=False)
    lines = map(json.loads, (run / "timings.jsonl").read_text().splitlines())
    text = "".join(
        json.dumps({k: v for k, v in line.items() if k != "check"}) + "\n" for line in lines
    )
    (run / "timings.jsonl").write_text(text)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [path.name for path in files if b"mjp-seal" in path.read_bytes()]
    return run


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    attack(images, out, one_cell())
    return out


@pytest.fixture
def old(whole: Path, tmp_path: Path) -> Path:
    return as_before(Path(shutil.copytree(whole, tmp_path / "old")))


def test_an_old_folder_is_reported_and_resumed(images: Path, whole: Path, old: Path) -> None:
    assert RunStore(old).format == UNSEALED
    (line,), (other,) = load_runs([old]).lines, load_runs([whole]).lines
    pd.testing.assert_series_equal(
        line.scored("psnr", "standard"), other.scored("psnr", "standard")
    )
    files = written(old)
    assert attack(images, old, one_cell()).exit_code == 0
    assert written(old) == files  # nothing is done or written again
    same_rows(old, whole)
    assert RunStore(old).format == SEALED
    assert read_seal(old / "cells.json").whole
    assert read_seal(old / "code.json").whole
    assert read_seal(old / "experiments" / "tiny.yaml").whole
    assert RunStore(old).timings().unchecked == RunStore(old).image_list().unchecked == 0
    assert len(RunStore(old).read_timings()) == len(RunStore(whole).read_timings())
    assert not Examination.of(old).said


@pytest.mark.parametrize("pattern", ["rows/*/00000.parquet", "reconstructions/*/00000.safetens*"])
def test_a_file_that_was_adopted_may_no_more_change(
    images: Path, whole: Path, old: Path, pattern: str
) -> None:
    attack(images, old, one_cell())
    path = next(old.glob(pattern))
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    assert any(f"damaged: {path.relative_to(old)}" in line for line in Examination.of(old).said)
    (line,) = load_runs([old]).lines
    assert len(line.images) == 3
    attack(images, old, one_cell())
    same_rows(old, whole)
    assert not Examination.of(old).said


@pytest.mark.parametrize("pattern", ["rows/*/00000.parquet", "reconstructions/*/00000.safetens*"])
def test_what_cannot_be_read_of_an_old_folder_is_made_again(
    images: Path, whole: Path, old: Path, pattern: str
) -> None:
    path = next(old.glob(pattern))
    path.write_bytes(path.read_bytes()[:-300])
    (line,) = load_runs([old]).lines
    assert len(line.images) == 3
    attack(images, old, one_cell())
    same_rows(old, whole)
    assert not Examination.of(old).said


def test_where_the_list_of_adopted_files_is_damaged_nothing_is_lost(
    images: Path, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attack(images, old, one_cell())
    files, before = written(old), rows(old)
    path = old / "adopted.json"
    path.write_bytes(path.read_bytes()[:-9])
    capsys.readouterr()
    attack(images, old, one_cell())
    assert "adopted.json is damaged" in capsys.readouterr().err
    assert written(old) == files
    pd.testing.assert_frame_equal(rows(old), before)
    assert not Examination.of(old).said


@pytest.mark.parametrize("packed", [False, True])
def test_where_the_list_of_adopted_files_is_gone_nothing_is_lost(
    images: Path, whole: Path, old: Path, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if packed:
        assert compact(RunStore(old), fewest_files=1) == 1
        (run_id,) = RunStore(old).stored_cells()
        (part,) = RunStore(old).row_files(run_id)
        _write_unsealed_part(part)
    attack(images, old, one_cell())
    files, before = written(old), rows(old)
    listed = json.loads((old / "adopted.json").read_text())["files"]
    (old / "adopted.json").unlink()
    (line,) = load_runs([old]).lines
    assert len(line.images) == 6
    remark = f"{len(listed)} file(s) without a seal can be read, and count as they are"
    assert any(remark in said for said in load_runs([old]).remarks)
    capsys.readouterr()
    attack(images, old, one_cell())
    assert remark in capsys.readouterr().err
    assert written(old) == files
    pd.testing.assert_frame_equal(rows(old), before)
    assert json.loads((old / "adopted.json").read_text())["files"] == listed
    assert not Examination.of(old).said


def _write_unsealed_part(path: Path) -> None:
    """The same part as an earlier version wrote it: it names neither its seal nor its pictures."""
    from pyarrow.parquet import ParquetFile, ParquetWriter

    with ParquetFile(path) as file:
        pieces = [file.read_row_group(at) for at in range(file.num_row_groups)]
        listed = file.metadata.metadata[b"mjp_privacy.part"]
    with ParquetWriter(path, pieces[0].schema, store_schema=False) as writer:
        for piece in pieces:
            writer.write_table(piece, row_group_size=len(piece))
        writer.add_key_value_metadata({"mjp_privacy.part": listed.decode()})


@pytest.mark.parametrize("pattern", ["rows/*/00000.parquet", "reconstructions/*/00000.safetens*"])
def test_what_cannot_be_read_of_unlisted_files_is_made_again(
    images: Path, whole: Path, old: Path, pattern: str
) -> None:
    attack(images, old, one_cell())
    (old / "adopted.json").unlink()
    path = next(old.glob(pattern))
    path.write_bytes(path.read_bytes()[:-300])
    (line,) = load_runs([old]).lines
    assert len(line.images) == 3
    attack(images, old, one_cell())
    same_rows(old, whole)
    assert not Examination.of(old).said


@pytest.mark.parametrize("pattern", ["rows/*/00000.parquet", "reconstructions/*/00000.safetens*"])
def test_a_seal_that_is_damaged_itself_is_no_file_of_an_earlier_version(
    images: Path, whole: Path, tmp_path: Path, pattern: str
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "sealed"))
    assert not (run / "adopted.json").exists()
    path = next(run.glob(pattern))
    path.write_bytes(path.read_bytes().replace(b"mjp-seal:", b"mjp-seam:"))
    assert any(f"damaged: {path.relative_to(run)}" in line for line in Examination.of(run).said)
    assert RunStore(run).changed(path)
    attack(images, run, one_cell())
    same_rows(run, whole)
    assert not (run / "adopted.json").exists()


def test_old_blocks_become_a_sealed_part_that_names_their_pictures(
    images: Path, whole: Path, old: Path
) -> None:
    attack(images, old, one_cell())
    assert compact(RunStore(old), fewest_files=1) == 1
    (run_id,) = RunStore(old).stored_cells()
    (part,) = RunStore(old).row_files(run_id)
    assert read_seal(part).whole
    assert set(RunStore(old).named_pictures(run_id, part)) == {0, 1}
    assert not Examination.of(old).said
    pictures = next(old.glob("reconstructions/*/00001.safetensors"))
    pictures.unlink()
    attack(images, old, one_cell())
    same_rows(old, whole)


def test_an_old_part_is_adopted_with_its_pictures(images: Path, whole: Path, old: Path) -> None:
    store = RunStore(old)
    (run_id,) = store.stored_cells()
    compact(store, fewest_files=1)
    (part,) = store.row_files(run_id)
    content = part.read_bytes().replace(b"mjp_privacy.pictures", b"mjp_privacy.pictur_s")
    part.write_bytes(content.replace(b"mjp-seal", b"mjp-s__l"))
    assert attack(images, old, one_cell()).exit_code == 0
    assert set(RunStore(old).named_pictures(run_id, part)) == {0, 1}
    next(old.glob("reconstructions/*/00001.safetensors")).write_bytes(b"half")
    (line,) = load_runs([old]).lines
    assert len(line.images) == 3
    attack(images, old, one_cell())
    same_rows(old, whole)
    assert not Examination.of(old).said
