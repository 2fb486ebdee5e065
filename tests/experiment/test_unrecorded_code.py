"""Results from before code was recorded: finished, and never silently mixed with others."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.loading import load_runs
from mjp_privacy.report.notes import bounds
from tests.helpers.edited_code import TWO, Workbench
from tests.helpers.runs import attack, cell, rows, tensors, values, written

AT_THE_END = "2 of 2 cells hold results made before code was recorded; --fresh makes them again"


def old_run(images: Path, out: Path, limit: int) -> Path:
    """What an earlier version left: no code.json, and rows without the column `code`."""
    attack(images, out, TWO, limit=limit)
    (out / "code.json").unlink()
    for path in out.glob("rows/*/*.parquet"):
        rows = pd.read_parquet(path).drop(columns="code")
        RunStore(out).write_rows(path.parent.name, int(path.stem), rows)
    return out


def levels(out: Path) -> dict[str, float]:
    """How bright the stored picture of each image is; the edited attack makes darker ones."""
    stored = tensors(out, cell(out, attack="tone")["run_id"])
    return {name: float(parts["images"].mean()) for name, parts in stored.items()}


def test_they_are_finished_and_the_end_says_what_they_are(
    bench: Workbench, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = old_run(images, tmp_path / "run", 6)
    before = written(run)
    bench.edit("levels", "0.5", "0.25")
    capsys.readouterr()
    for stale in ("ask", "keep"):
        summary = attack(images, run, TWO, stale=stale)
        assert (summary.unrecorded, summary.of_other_code) == (2, 0)
        said = capsys.readouterr().err
        assert AT_THE_END in said
        assert "all 12 units are finished already" in said
    assert written(run) == before
    assert not any("MIXED" in note for note in bounds(load_runs([run]).lines))


def test_fresh_makes_them_again(
    bench: Workbench, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = old_run(images, tmp_path / "run", 6)
    bench.edit("levels", "0.5", "0.25")
    assert attack(images, run, TWO, stale="fresh").unrecorded == 0
    attack(images, tmp_path / "other", TWO)
    pd.testing.assert_frame_equal(rows(run), rows(tmp_path / "other"), check_like=True)
    assert set(levels(run).values()) == {0.25}
    capsys.readouterr()
    attack(images, run, TWO)
    assert "all 12 units are finished already; nothing to do" in capsys.readouterr().err


def test_a_grown_run_keeps_them_and_its_lines_say_that_code_is_mixed(
    bench: Workbench, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the second block, which is done as a whole: one of its images had rows."""
    run = old_run(images, tmp_path / "run", 4)
    before, old = values(run, attack="tone"), levels(run)
    bench.edit("levels", "0.5", "0.25")
    capsys.readouterr()
    attack(images, run, TWO, limit=6)
    assert AT_THE_END in capsys.readouterr().err
    after, now = values(run, attack="tone"), levels(run)
    pd.testing.assert_series_equal(after[before.index], before, check_exact=True)
    assert {name: now[name] for name in old} == old
    assert {level for name, level in now.items() if name not in old} == {0.25}
    of_images = rows(run).drop_duplicates(["attack", "image_id"])
    assert list(of_images["code"].fillna("").eq("").groupby(of_images["attack"]).sum()) == [4, 4]
    assert (
        "MIXED CODE: its images were made by 2 versions of the attack's or the defence's code (2 "
        "images, and 4 from before code was recorded). `mjp attack … --fresh` makes those of "
        "earlier versions again. (all lines)"
    ) in bounds(load_runs([run]).lines)
    attack(images, run, TWO, limit=6, stale="fresh")
    assert set(levels(run).values()) == {0.25}
    assert not any("MIXED" in note for note in bounds(load_runs([run]).lines))


def test_an_edit_after_that_stops_the_command_for_the_recorded_ones_alone(
    bench: Workbench, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = old_run(images, tmp_path / "run", 4)
    attack(images, run, TWO, limit=6)
    bench.edit("levels", "0.5", "0.25")
    capsys.readouterr()
    attack(images, run, TWO, limit=6, stale="keep")
    assert (
        "1 of 2 cells holds results made by other code, which were kept; 2 of 2 cells hold results "
        "made before code was recorded; --fresh makes them again"
    ) in capsys.readouterr().err
