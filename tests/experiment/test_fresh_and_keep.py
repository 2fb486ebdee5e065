"""Results of other code are made again with --fresh, and kept with --keep."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.core import checked_lines, files, sealed
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.loading import load_runs
from mjp_privacy.report.notes import bounds
from tests.helpers.edited_code import TWO, Workbench, refusal
from tests.helpers.runs import (
    KEYS,
    attack,
    cell,
    photographs,
    rows,
    same_rows,
    tensors,
    values,
    written,
)


def codes(out: Path, name: str = "tone") -> dict[str, str]:
    """The digest in the rows of each image of an attack."""
    of_cell = rows(out, [cell(out, attack=name)["run_id"]])
    assert (of_cell.groupby("image_id")["code"].nunique(dropna=False) == 1).all()
    return dict(zip(of_cell["image_id"], of_cell["code"], strict=True))


# make again ---------------------------------------------------------------------------------------


def test_fresh_makes_stale_cells_again_and_no_others(
    bench: Workbench, run: Path, images: Path, tmp_path: Path
) -> None:
    before, old = written(run), codes(run)
    bench.edit("levels", "0.5", "0.25")
    assert attack(images, run, TWO, stale="fresh").exit_code == 0
    attack(images, tmp_path / "other", TWO)
    same_rows(run, tmp_path / "other")
    run_id, grey = (cell(run, attack=name)["run_id"] for name in ("tone", "grey"))
    for image_id, stored in tensors(tmp_path / "other", run_id).items():
        assert stored["images"].equal(tensors(run, run_id)[image_id]["images"])
    changed = {name for name, time in written(run).items() if before[name] != time}
    assert len(changed) == 4  # rows and pictures of two blocks
    assert not any(grey in name for name in changed)
    assert {*old.values()}.isdisjoint(codes(run).values())
    attack(images, run, TWO)  # nothing is stale any more


class Killed(BaseException):
    """Stands in for the end of the process."""


def dying(at: int) -> Callable[..., None]:
    """`write_atomically` that dies at its k-th call, before the file is in place."""
    write, calls = files.write_atomically, [0]

    def mortal(path: Path, content: Callable[[Path], object], *, lasting: bool = False) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise Killed
        write(path, content, durable=lasting)

    return mortal


@pytest.mark.parametrize("suffix", [".safetensors", ".parquet"])
def test_a_killed_fresh_run_goes_on(
    bench: Workbench,
    run: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:
    """Its second block has the old rows in place, its first the new ones. Where the second has its
    old pictures too, it is stale; new pictures beside old rows are damaged, and finished no more.
    """
    run_id, old = cell(run, attack="tone")["run_id"], codes(run)
    bench.edit("levels", "0.5", "0.25")
    first, second = (run / "rows" / run_id / f"0000{block}.parquet" for block in (0, 1))
    with monkeypatch.context() as patch:
        mortal = dying(at=second_block(images, run, tmp_path, suffix))
        for module in (files, sealed, checked_lines):
            patch.setattr(module, "write_atomically", mortal)
        with pytest.raises(Killed):
            attack(images, run, TWO, stale="fresh")
    made = {path: {*pd.read_parquet(path)["code"]} for path in (first, second)}
    assert made[second] == {*old.values()} != made[first]
    if suffix == ".safetensors":
        assert "1 of 2 cells holds results" in refusal(images, run)
    kept = first.stat().st_mtime_ns
    attack(images, run, TWO, stale="fresh" if suffix == ".safetensors" else "ask")
    assert first.stat().st_mtime_ns == kept
    attack(images, tmp_path / "other", TWO)
    same_rows(run, tmp_path / "other")


def second_block(images: Path, run: Path, tmp_path: Path, suffix: str) -> int:
    """Which call of `write_atomically` writes the second block's file in a --fresh run."""
    paths: list[Path] = []
    write = files.write_atomically
    copy = Path(shutil.copytree(run, tmp_path / "counted"))
    with pytest.MonkeyPatch.context() as patch:

        def noted(path: Path, content: Callable[[Path], object], *, lasting: bool = False) -> None:
            paths.append(path)
            write(path, content, durable=lasting)

        for module in (files, sealed, checked_lines):
            patch.setattr(module, "write_atomically", noted)
        attack(images, copy, TWO, stale="fresh")
    return [path.name for path in paths].index(f"00001{suffix}") + 1


def test_pictures_go_where_the_attack_makes_none_any_more(
    bench: Workbench, run: Path, images: Path
) -> None:
    run_id = cell(run, attack="tone")["run_id"]
    assert len(RunStore(run).reconstructed(run_id)) == 6
    bench.edit(
        "tone",
        "return None",
        "from mjp_privacy.interfaces import Refusal as R\n        return R('model', 'no')",
    )
    attack(images, run, TWO, stale="fresh")
    assert set(rows(run, [run_id])["status"]) == {"unsupported"}
    assert RunStore(run).reconstructed(run_id) == []


# keep ---------------------------------------------------------------------------------------------


def test_kept_results_stay_and_are_said_at_the_end(
    bench: Workbench, run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, old = written(run), codes(run)
    bench.edit("levels", "0.5", "0.25")
    capsys.readouterr()
    assert attack(images, run, TWO, stale="keep").of_other_code == 1
    assert (written(run), codes(run)) == (before, old)
    said = capsys.readouterr().err
    assert (
        "1 of 2 cells holds results made by other code, which were kept; --fresh makes them again"
        in said
    )
    assert "all 12 units are finished already; nothing to do" in said
    assert "1 of 2 cells holds" in refusal(images, run)


def test_a_grown_run_that_keeps_says_for_each_image_which_code_made_it(
    bench: Workbench, images: Path, tmp_path: Path
) -> None:
    """Also in a block that is done as a whole: the images that were there keep their rows."""
    out = tmp_path / "run"
    attack(images, out, TWO, limit=4)
    before, old, picture = values(out, attack="tone"), codes(out), pictures(out)
    bench.edit("levels", "0.5", "0.25")
    summary = attack(images, out, TWO, limit=6, stale="keep")
    assert (summary.exit_code, summary.of_other_code) == (0, 1)
    now = codes(out)
    assert {name: now[name] for name in old} == old
    assert len({now[name] for name in now.keys() - old.keys()} - {*old.values()}) == 1
    after = values(out, attack="tone")
    pd.testing.assert_series_equal(after[before.index], before, check_exact=True)
    levels = {name: level for name, level in pictures(out).items() if name not in old}
    assert {name: level for name, level in pictures(out).items() if name in old} == picture
    assert set(levels.values()) == {0.25}
    assert (
        "MIXED CODE: its images were made by 2 versions of the attack's or the defence's code (4, "
        "2 images). `mjp attack … --fresh` makes those of earlier versions again. (line 1)"
    ) in bounds(load_runs([out]).lines)


def pictures(out: Path) -> dict[str, float]:
    stored = tensors(out, cell(out, attack="tone")["run_id"])
    return {name: float(parts["images"].mean()) for name, parts in stored.items()}


# images that moved --------------------------------------------------------------------------------


@pytest.mark.parametrize("edited", [True, False])
def test_an_image_that_moved_to_another_block_has_its_rows_once(
    bench: Workbench, tmp_path: Path, edited: bool
) -> None:
    """Fewer images before it in the order, and a new one beside it: its block is done again."""
    folder, out = photographs(tmp_path / "images", labelled=False), tmp_path / "run"
    config = {**TWO, "block": 2}
    attack(folder, tmp_path / "order", config)
    first, second, *_, new, moving = RunStore(tmp_path / "order").read_images()["image_id"]
    (folder / new).rename(tmp_path / new)
    attack(folder, out, config)
    for name in (first, second):
        (folder / name).unlink()
    (tmp_path / new).rename(folder / new)
    if edited:
        bench.edit("levels", "0.5", "0.25")
    attack(folder, out, config, stale="fresh")
    found = rows(out)
    assert moving in set(found["image_id"])
    assert not found.duplicated(KEYS).any()
    assert load_runs([out]).lines[0].scored("psnr", "standard").index.is_unique
    if edited:
        assert pictures(out)[moving] == 0.25
