"""Results that an earlier version of an attack or a defence made are never taken for today's."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from mjp_privacy.experiment.other_code import code_of_cells, differences

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import expand
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.run import attack_uploads
from tests.helpers.edited_code import TWO, Workbench, refusal
from tests.helpers.federations import run as federation
from tests.helpers.runs import (
    attack,
    one_cell,
    written,
)

DEFENDED = {**TWO, "client": {"defenses": ["dimmed"]}}


# stop ---------------------------------------------------------------------------------------------


def test_an_edited_attack_stops_the_command_before_anything_is_written(
    bench: Workbench, run: Path, images: Path
) -> None:
    bench.edit("tone", "shade())", "1 - shade() / 2)")
    assert refusal(images, run) == (
        "1 of 2 cells holds results made by other code (workbench/tone.py changed): --fresh makes "
        'these again, --keep keeps them. From Python: stale="fresh" or stale="keep".'
    )


def test_every_changed_added_and_removed_file_is_named(
    bench: Workbench, run: Path, images: Path
) -> None:
    """The helper is two imports away from the attack."""
    bench.edit("levels", "0.5", "0.25")
    assert "(workbench/levels.py changed)" in refusal(images, run)
    bench.edit("light", "", "LEVEL = 0.75\n")
    bench.edit("shade", "from .levels", "from .light")
    assert (
        "(workbench/levels.py removed, workbench/light.py added, workbench/shade.py changed)"
        in refusal(images, run)
    )


def test_comments_docstrings_and_formatting_are_no_other_code(
    bench: Workbench, run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(run)
    bench.edit("tone", "    def run(self, view", "    # how\n    def run(self,\n            view")
    bench.edit("levels", "LEVEL = 0.5", '"""Levels."""\n\nLEVEL = (0.5)  # grey')
    attack(images, run, TWO)
    assert written(run) == before
    assert "all 12 units are finished already; nothing to do" in capsys.readouterr().err


def test_undoing_the_edit_finishes_the_run_again(
    bench: Workbench, run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.edit("levels", "0.5", "0.25")
    refusal(images, run)
    bench.edit("levels", "0.25", "0.5")
    attack(images, run, TWO)
    assert "all 12 units are finished already; nothing to do" in capsys.readouterr().err


def test_an_edited_defence_stops_every_cell_of_its_clients(
    bench: Workbench, images: Path, tmp_path: Path
) -> None:
    attack(images, tmp_path / "run", DEFENDED)
    bench.edit("dimmed", "g * 0.5", "g * 0.25")
    said = refusal(images, tmp_path / "run", DEFENDED)
    assert said.startswith(
        "2 of 2 cells hold results made by other code (workbench/dimmed.py changed): --fresh"
    )


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


def test_attacks_on_recorded_uploads_stop_too(bench: Workbench, tmp_path: Path) -> None:
    uploads = federation(tmp_path / "federation") / "uploads"
    experiment = load_experiment({"name": "named", "attacks": [{"name": "tone"}]})
    attack_uploads(experiment, uploads, tmp_path / "run", device="cpu")
    bench.edit("levels", "0.5", "0.25")
    with pytest.raises(UserError, match=r"1 of 1 cells holds .*workbench/levels\.py changed"):
        attack_uploads(experiment, uploads, tmp_path / "run", device="cpu")
    kept = attack_uploads(experiment, uploads, tmp_path / "run", device="cpu", stale="keep")
    fresh = attack_uploads(experiment, uploads, tmp_path / "run", device="cpu", stale="fresh")
    assert (kept.of_other_code, fresh.of_other_code) == (1, 0)


def test_only_cells_of_this_command_are_asked_about(
    bench: Workbench, run: Path, images: Path
) -> None:
    bench.edit("levels", "0.5", "0.25")
    assert attack(images, run, one_cell(attacks=[{"name": "grey"}])).exit_code == 0


def test_without_code_json_the_files_are_not_known(
    bench: Workbench, run: Path, images: Path
) -> None:
    (run / "code.json").write_text("[half")
    bench.edit("levels", "0.5", "0.25")
    assert "other code (which files is not known: code.json lacks them)" in refusal(images, run)


def test_differences_are_told_in_words() -> None:
    made = {"a.py": "1", "b.py": "2", "d.py": "4"}
    now = {"a.py": "3", "c.py": "2", "d.py": "4"}
    assert differences(made, now) == ["a.py changed", "b.py removed", "c.py added"]


# the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["attack", "federate"])
def test_both_options_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    config = tmp_path / "two.yaml"
    config.write_text(yaml.safe_dump(one_cell()))
    data = "--images" if command == "attack" else "--data"
    argv = [command, str(config), data, "embedded", "--out", str(tmp_path / "run")]
    assert main([*argv, "--fresh", "--keep"]) == 2
    assert (
        "Expected one of --fresh and --keep, got both: --fresh makes results of other code again, "
        "--keep keeps them. Leave one out."
    ) in " ".join(capsys.readouterr().err.split())


def test_the_options_reach_the_run(
    bench: Workbench, run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "two.yaml"
    config.write_text(yaml.safe_dump(TWO))
    argv = ["attack", str(config), "--images", str(images), "--out", str(run), "--device", "cpu"]
    bench.edit("levels", "0.5", "0.25")
    assert main(argv) == 2
    assert "(workbench/levels.py changed): --fresh makes" in capsys.readouterr().err
    assert main([*argv, "--keep"]) == 0
    assert main([*argv, "--fresh"]) == 0
    assert main(argv) == 0


def test_another_word_is_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stale to be one of 'ask', 'fresh', 'keep', got 'all'\."):
        attack(images, tmp_path, TWO, stale="all")
