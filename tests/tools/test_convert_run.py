"""tools/convert_run.py: an older run folder, whole or damaged, becomes one of now."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import read_frame
from tests.helpers.runs import flip, long_rows
from tools.convert_run import main

OLD_RUN = Path(__file__).parents[1] / "golden" / "oracle" / "old_run.zip"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    zipfile.ZipFile(OLD_RUN).extractall(tmp_path / "old")
    return tmp_path / "old"


def test_what_stands_in_it(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values and pictures are compared with a run of now in tests/golden/test_oracle.py."""
    new = RunStore(tmp_path / "new")
    assert main([str(old), str(new.root)]) == 0
    assert capsys.readouterr().err == ""
    cells = json.loads((old / "cells.json").read_text())["cells"]
    assert new.read_cells() == cells
    assert new.damaged() == []
    assert new.stored_cells() == sorted(path.name for path in (old / "rows").iterdir())
    codes = json.loads((old / "code.json").read_text())
    listed = (old / "images.csv").read_text()
    for cell in cells:
        rows = new.read(cell["run_id"])
        assert long_rows(read_frame(new, cell["run_id"]), cell)["image_id"].nunique() == 3
        assert {*rows["status"]} <= {"ok", "failed", "unreadable"}
        assert all(digest in listed for digest in rows["pixel_sha256"] if digest)
        for about in new.about(cell["run_id"]):
            assert about["cell"] == cell
            assert about["made_with"]["torch"]
            assert all(codes[digest] == files for digest, files in about["code"].items())
    assert "stage_seconds.attack" in rows
    assert (new.root / "experiments" / "old_run.yaml").is_file()


@pytest.mark.parametrize("kind", ["rows/*/00000.parquet", "reconstructions/*/*", "images.csv"])
def test_what_is_damaged_is_left_out_and_named(
    old: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted(old.glob(kind))[0]
    flip(path, 0.6)
    new = RunStore(tmp_path / "new")
    assert main([str(old), str(new.root)]) == 3
    assert path.relative_to(old).as_posix() in capsys.readouterr().err
    if path.suffix != ".csv":
        assert len(new.read(path.parent.name)) == 1  # of the other block
        assert new.pictured(path.parent.name) == []


@pytest.mark.parametrize("how", ["no run", "new run", "flipped", "taken", "no format"])
def test_other_folders_are_refused_in_one_line(
    old: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = old / "cells.json"
    if how == "no run":
        shutil.rmtree(old)
    elif how == "new run":
        listed.unlink()
    elif how == "flipped":
        listed.write_bytes(listed.read_bytes().replace(b"grey", b"grex", 1))
    elif how == "no format":
        listed.write_text(listed.read_text().replace('"format": 2', '"format": 3'))
    else:
        (tmp_path / "new").write_text("taken")
    assert main([str(old), str(tmp_path / "new")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "new").is_dir()
