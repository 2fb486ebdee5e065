"""Results that other code made are never taken for today's: stop, make again, or keep and say."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.code import code_of_cells
from mjp_privacy.experiment.config import expand, load_experiment
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from tests.helpers.edited_code import TWO, Workbench, refusal
from tests.helpers.runs import (
    KEYS,
    attack,
    cell,
    one_cell,
    outcome,
    photographs,
    rows,
    said,
    same_results,
    tensors,
    values,
    written,
)
from tests.helpers.uploads import edit, edit_all

DEFENDED = {**TWO, "client": {"defenses": ["dimmed"]}}


def codes(out: Path, name: str = "tone") -> dict[str, str]:
    """The digest of the code that made each image of an attack."""
    of_images = RunStore(out).read(cell(out, attack=name)["run_id"], ["image_id", "code"])
    return dict(zip(of_images["image_id"], of_images["code"], strict=True))


def levels(out: Path) -> dict[str, float]:
    """How bright the stored picture of each image is; the edited attack makes darker ones."""
    stored = tensors(out, cell(out, attack="tone")["run_id"])
    return {name: float(parts["images"].mean()) for name, parts in stored.items()}


# stop ---------------------------------------------------------------------------------------------


def test_an_edited_attack_stops_the_command_before_anything_is_written(
    bench: Workbench, bench_run: Path, images: Path
) -> None:
    bench.edit("tone", "shade())", "1 - shade() / 2)")
    told = refusal(images, bench_run)
    assert all(n in told for n in ("1 of 2 cells", "workbench/tone.py", "--fresh", "--keep"))
    assert "levels.py" not in told


def test_every_changed_added_and_removed_file_is_named(
    bench: Workbench, bench_run: Path, images: Path
) -> None:
    """The helper is two imports away from the attack."""
    bench.edit("levels", "0.5", "0.25")
    assert "workbench/levels.py changed" in refusal(images, bench_run)
    bench.edit("light", "", "LEVEL = 0.75\n")
    bench.edit("shade", "from .levels", "from .light")
    told = refusal(images, bench_run)
    for words in ("levels.py removed", "light.py added", "shade.py changed"):
        assert f"workbench/{words}" in told


def test_comments_and_an_edit_that_was_undone_are_no_other_code(
    bench: Workbench, bench_run: Path, images: Path
) -> None:
    before = written(bench_run)
    bench.edit("tone", "    def run(self, view", "    # how\n    def run(self,\n            view")
    bench.edit("levels", "LEVEL = 0.5", '"""Levels."""\n\nLEVEL = (0.5)  # grey')
    attack(images, bench_run, TWO)
    bench.edit("levels", "0.5", "0.25")
    refusal(images, bench_run)
    bench.edit("levels", "0.25", "0.5")
    attack(images, bench_run, TWO)
    assert written(bench_run) == before


def test_an_edited_defence_stops_every_cell_of_its_clients(
    bench: Workbench, images: Path, tmp_path: Path
) -> None:
    attack(images, tmp_path / "run", DEFENDED)
    bench.edit("dimmed", "g * 0.5", "g * 0.25")
    told = refusal(images, tmp_path / "run", DEFENDED)
    assert "2 of 2 cells" in told
    assert "workbench/dimmed.py changed" in told


def test_recorded_uploads_were_defended_before(bench: Workbench) -> None:
    experiment = load_experiment(DEFENDED)
    plan = Plan(experiment, expand(experiment), {}, {})
    files = [
        {
            file
            for code in code_of_cells(plan, with_defenses=simulated).values()
            for file in code.files
        }
        for simulated in (True, False)
    ]
    assert files[0] - files[1] == {
        "workbench/dimmed.py",
        "mjp_privacy/client/defenses/registry.py (dimmed)",
        "mjp_privacy/client/defenses/disturbance.py",
    }


def test_attacks_on_recorded_uploads_stop_too(
    bench: Workbench, folder: Path, tmp_path: Path
) -> None:
    """Before anything is taken from the folder, as rows of refused uploads are."""
    edit_all(folder, series=None)
    edit(folder, gamma=2)
    experiment = load_experiment({"name": "named", "attacks": [{"name": "tone"}]})
    again = partial(attack_uploads, experiment, folder, tmp_path / "run", device="cpu")
    again()
    before = written(tmp_path / "run")
    bench.edit("levels", "0.5", "0.25")
    with pytest.raises(UserError, match=r"workbench/levels\.py changed"):
        again()
    assert written(tmp_path / "run") == before
    assert again(stale="keep").of_other_code == 2
    assert again(stale="fresh").of_other_code == 0


def test_only_cells_of_this_command_are_asked_about(
    bench: Workbench, bench_run: Path, images: Path
) -> None:
    bench.edit("levels", "0.5", "0.25")
    assert attack(images, bench_run, one_cell(attacks=[{"name": "grey"}])).exit_code == 0


@pytest.mark.parametrize("command", ["attack", "federate"])
def test_both_options_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    config = tmp_path / "two.yaml"
    config.write_text(yaml.safe_dump(one_cell()))
    data = "--images" if command == "attack" else "--data"
    words = [command, str(config), data, "embedded", "--out", str(tmp_path / "run")]
    assert main([*words, "--fresh", "--keep"]) == 2
    assert "--keep" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_from_python_a_choice_that_is_none_is_named(three: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'frsh'"):
        attack(three, tmp_path / "run", TWO, stale="frsh")
    assert not (tmp_path / "run").exists()


# make again ---------------------------------------------------------------------------------------


def test_fresh_makes_stale_cells_again_and_no_others(
    bench: Workbench, bench_run: Path, images: Path, tmp_path: Path
) -> None:
    run_id, grey = (cell(bench_run, attack=name)["run_id"] for name in ("tone", "grey"))
    before, old = written(bench_run), codes(bench_run)
    bench.edit("levels", "0.5", "0.25")
    assert attack(images, bench_run, TWO, stale="fresh").exit_code == 0
    attack(images, tmp_path / "other", TWO)
    same_results(bench_run, tmp_path / "other")
    new = written(bench_run).keys() - before.keys()
    assert len(new) == 2  # two blocks
    assert all(run_id in name for name in new)
    assert {n: t for n, t in before.items() if grey in n}.items() <= written(bench_run).items()
    assert {*old.values()}.isdisjoint(codes(bench_run).values())
    attack(images, bench_run, TWO)  # nothing is stale any more


def test_a_killed_fresh_run_goes_on(
    bench: Workbench,
    bench_run: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its second block has the old rows in place, its first the new ones."""
    bench.edit("levels", "0.5", "0.25")
    write, calls = RunStore.write, count(1)

    def mortal(self: RunStore, *arguments: Any, **named: Any) -> Path:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return write(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "write", mortal)
        with pytest.raises(KeyboardInterrupt):
            attack(images, bench_run, TWO, stale="fresh")
    assert sorted(levels(bench_run).values()) == [0.25] * 3 + [0.5] * 3
    assert "1 of 2 cells" in refusal(images, bench_run)
    kept = [n for n in written(bench_run) if "/00000." in n]
    attack(images, bench_run, TWO, stale="fresh")
    assert {*kept} <= written(bench_run).keys()
    attack(images, tmp_path / "other", TWO)
    same_results(bench_run, tmp_path / "other")


def test_pictures_go_where_the_attack_makes_none_any_more(
    bench: Workbench, bench_run: Path, images: Path
) -> None:
    assert len(levels(bench_run)) == 6
    bench.edit(
        "tone",
        "return None",
        "from mjp_privacy.interfaces import Refusal as R\n        return R('model', 'no')",
    )
    attack(images, bench_run, TWO, stale="fresh")
    assert set(outcome(bench_run, attack="tone").values()) == {("unsupported", "no")}
    assert levels(bench_run) == {}


# keep ---------------------------------------------------------------------------------------------


def test_kept_results_stay_and_are_said_at_the_end(
    bench: Workbench, bench_run: Path, images: Path
) -> None:
    before, old = written(bench_run), codes(bench_run)
    bench.edit("levels", "0.5", "0.25")
    summary = attack(images, bench_run, TWO, stale="keep")
    assert (summary.exit_code, summary.of_other_code, summary.unrecorded) == (0, 1, 0)
    assert (written(bench_run), codes(bench_run)) == (before, old)
    assert "1 of 2 cells" in said(bench_run)
    assert "1 of 2 cells" in refusal(images, bench_run)


def test_a_grown_run_that_keeps_says_for_each_image_which_code_made_it(
    bench: Workbench, images: Path, tmp_path: Path
) -> None:
    """Also in a block that is done as a whole: the images that were there keep their rows."""
    out = tmp_path / "run"
    attack(images, out, TWO, limit=4)
    before, old = values(out, attack="tone"), codes(out)
    bench.edit("levels", "0.5", "0.25")
    summary = attack(images, out, TWO, limit=6, stale="keep")
    assert (summary.exit_code, summary.of_other_code) == (0, 1)
    now = codes(out)
    assert {name: now[name] for name in old} == old
    assert len({now[name] for name in now.keys() - old.keys()} - {*old.values()}) == 1
    after = values(out, attack="tone")
    pd.testing.assert_series_equal(after[before.index], before, check_exact=True)
    assert levels(out) == {name: 0.5 if name in old else 0.25 for name in now}


@pytest.mark.nightly
@pytest.mark.parametrize("edited", [True, False])
def test_an_image_that_moved_to_another_block_has_its_rows_once(
    bench: Workbench, tmp_path: Path, edited: bool
) -> None:
    """Fewer images before it in the order, and a new one beside it: its block is done again."""
    folder, out = photographs(tmp_path / "images", labelled=False), tmp_path / "run"
    config = {**TWO, "block": 2}
    attack(folder, tmp_path / "order", config)
    first, second, *_, new, moving = list(codes(tmp_path / "order"))
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
    if edited:
        assert levels(out)[moving] == 0.25


# before code was recorded -------------------------------------------------------------------------


def old_run(images: Path, out: Path, limit: int) -> Path:
    """What an earlier version left: rows that do not say which code made them."""
    write = RunStore.write

    def without_code(
        self: RunStore, run_id: str, block: int, rows: Any, pictures: Any, _: Any
    ) -> Path:
        return write(self, run_id, block, rows.assign(code=None), pictures)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunStore, "write", without_code)
        attack(images, out, TWO, limit=limit)
    return out


def test_results_of_unrecorded_code_are_finished_and_the_end_says_what_they_are(
    bench: Workbench, images: Path, tmp_path: Path
) -> None:
    run = old_run(images, tmp_path / "run", 6)
    before = written(run)
    bench.edit("levels", "0.5", "0.25")
    for stale in ("ask", "keep"):
        summary = attack(images, run, TWO, stale=stale)
        assert (summary.unrecorded, summary.of_other_code) == (2, 0)
        assert said(run).count("2 of 2 cells") == 1 + (stale == "keep")
    assert written(run) == before
    assert attack(images, run, TWO, stale="fresh").unrecorded == 0
    attack(images, tmp_path / "other", TWO)
    same_results(run, tmp_path / "other")
    assert set(levels(run).values()) == {0.25}


def test_a_grown_run_keeps_them_and_an_edit_stops_for_the_recorded_ones_alone(
    bench: Workbench, images: Path, tmp_path: Path
) -> None:
    """Also in the second block, which is done as a whole: one of its images had rows."""
    run = old_run(images, tmp_path / "run", 4)
    before, old = values(run, attack="tone"), codes(run)
    attack(images, run, TWO, limit=6)
    after = values(run, attack="tone")
    pd.testing.assert_series_equal(after[before.index], before, check_exact=True)
    assert sorted(name for name, code in codes(run).items() if not code) == sorted(old)
    bench.edit("levels", "0.5", "0.25")
    assert "1 of 2 cells" in refusal(images, run)
    summary = attack(images, run, TWO, limit=6, stale="keep")
    assert (summary.unrecorded, summary.of_other_code) == (2, 1)
