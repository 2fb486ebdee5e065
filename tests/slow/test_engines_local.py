"""Workers of this machine when their command is killed, changed or read while they work."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from safetensors.torch import save_file

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.models import load_model
from tests.helpers.background import Background
from tests.helpers.command import Command, attack_command
from tests.helpers.runs import (
    TINY,
    attack,
    cell,
    one_cell,
    photographs,
    picture_files,
    rows,
    same_results,
    same_rows,
    tiny,
    values,
    written,
)
from tests.helpers.trap import Trap, children_of, is_running, planted, until

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("one_thread")]

TWO = EngineConfig("local", workers=2, threads=1)
BOTH = ["float32", "float64"]
TRAPPED = one_cell(attacks=[{"name": "trap"}, {"name": "april"}], dtypes=BOTH)
OPTIONS = ["--engine", "local", "--workers", "2", "--threads", "1"]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    with planted(tmp_path / "trap", monkeypatch) as made:
        yield made


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_nothing(
    nine_photographs: Path, tmp_path: Path, workers: int
) -> None:
    attack(nine_photographs, tmp_path / "here", tiny(dtypes=BOTH))
    engine = EngineConfig("local", workers=workers, threads=1)
    attack(nine_photographs, tmp_path / "there", tiny(dtypes=BOTH), engine=engine)
    same_results(tmp_path / "here", tmp_path / "there")


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGKILL, -9, ""),
        (signal.SIGINT, 130, "stopped by Ctrl-C; the same command goes on from here"),
        (signal.SIGTERM, 143, "stopped by SIGTERM; the same command goes on from here"),
    ],
)
def test_workers_end_with_their_command(
    nine_photographs: Path,
    tmp_path: Path,
    trap: Trap,
    number: signal.Signals,
    code: int,
    line: str,
) -> None:
    out = tmp_path / "run"
    trap.hold()
    with attack_command(TRAPPED, nine_photographs, out, OPTIONS, trap.environment) as running:
        workers = trap.victims(2)
        assert {*workers} <= {*children_of(running.pid)}
        os.kill(running.pid, number)
        assert running.wait(20) == code
        until(lambda: not any(map(is_running, workers)), 10)
        assert "Traceback" not in running.errors()
        assert line in running.errors().splitlines() or not line
    trap.release()
    assert attack(nine_photographs, out, TRAPPED, engine=TWO).exit_code == 0
    attack(nine_photographs, tmp_path / "here", TRAPPED)
    same_results(tmp_path / "here", out)
    assert not (out / "work").exists()


def test_images_that_move_between_blocks_stand_in_one(
    nine_photographs: Path, tmp_path: Path
) -> None:
    """New images come between those that were attacked, whose blocks are others then. Their rows
    leave a file that another worker may be writing."""
    some = tmp_path / "some"
    some.mkdir()
    for number in (2, 3, 5):
        shutil.copy(nine_photographs / f"{number}.png", some)
    (some / "labels.csv").write_text("file,label\n2.png,2\n3.png,3\n5.png,5\n")
    config = tiny(dtypes=BOTH)
    attack(some, tmp_path / "grown", config, engine=TWO)
    before = blocks(tmp_path / "grown")
    attack(nine_photographs, tmp_path / "grown", config, engine=TWO)
    attack(nine_photographs, tmp_path / "fresh", config)
    after = blocks(tmp_path / "grown")
    assert any(before[image] != after[image] for image in before)
    assert after == blocks(tmp_path / "fresh")
    same_rows(tmp_path / "fresh", tmp_path / "grown")
    stored = picture_files(tmp_path / "fresh"), picture_files(tmp_path / "grown")
    assert stored[0].keys() == stored[1].keys()


def blocks(out: Path) -> dict[str, list[str]]:
    """The files that hold each image's rows, of one cell."""
    run_id = cell(out, model="ViT", setting="a", attack="april", dtype="float64")["run_id"]
    files: dict[str, list[str]] = {}
    for path in sorted((out / "rows" / run_id).glob("[0-9]*")):
        for image in pd.read_parquet(path)["image_id"].unique():
            files.setdefault(image, []).append(path.name)
    return files


def test_a_larger_limit_ends_with_the_rows_of_a_fresh_run(
    nine_photographs: Path, tmp_path: Path
) -> None:
    config = tiny(dtypes=BOTH, block=4)
    attack(nine_photographs, tmp_path / "grown", config, limit=5, engine=TWO)
    attack(nine_photographs, tmp_path / "grown", config, limit=9, engine=TWO)
    attack(nine_photographs, tmp_path / "fresh", config, limit=9)
    same_rows(tmp_path / "fresh", tmp_path / "grown")


def test_results_of_other_code_are_kept_or_made_again(
    nine_photographs: Path, tmp_path: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    out, config = tmp_path / "run", one_cell(attacks=[{"name": "trap"}, {"name": "grey"}])
    attack(nine_photographs, out, config, limit=3, engine=TWO)
    grey, before = values(out, attack="trap"), written(out)
    trap.edit("0.5)", "0.25)")
    with pytest.raises(UserError, match="trap_attack"):
        attack(nine_photographs, out, config, engine=TWO)
    assert written(out) == before

    attack(nine_photographs, out, config, stale="keep", engine=TWO)
    assert values(out, attack="trap")[grey.index].equals(grey)
    kept = rows(out).query("attack == 'trap'")
    assert set(kept.groupby("code")["image_id"].nunique()) == {3, 6}

    attack(nine_photographs, out, config, stale="fresh", engine=TWO)
    assert rows(out).query("attack == 'trap'")["code"].nunique() == 1
    attack(nine_photographs, tmp_path / "here", config)
    same_results(tmp_path / "here", out)


def test_the_report_works_while_workers_do(
    nine_photographs: Path, tmp_path: Path, trap: Trap, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    attack(nine_photographs, out, TRAPPED, limit=3)
    trap.hold()
    with Background(lambda: attack(nine_photographs, out, TRAPPED, engine=TWO)) as run:
        trap.victims(2)
        assert main(["report", str(out), "--out", str(tmp_path / "report")]) == 0
        trap.release()
        assert run.result().exit_code == 0
    assert (tmp_path / "report" / "index.html").is_file()


def test_relative_paths_are_those_of_the_command(tmp_path: Path) -> None:
    photographs(tmp_path / "pictures", 3)
    fields: dict[str, Any] = {k: v for k, v in TINY.items() if k != "checkpoint"}
    model = load_model(checkpoint="random", **fields)
    save_file(dict(model.state_dict()), tmp_path / "weights.safetensors")
    config = one_cell(models={"ViT": {"num_heads": 3, "mean": 0.5, "std": 0.5}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    places = ["--images", "pictures", "--weights", "weights.safetensors", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, options in (("here", []), ("there", OPTIONS)):
        words = ["attack", "config.yaml", *places, "--out", name, *options]
        with Command(words, tmp_path / f"{name}.log", environment, tmp_path) as running:
            assert running.wait() == 0, running.errors()
    same_results(tmp_path / "here", tmp_path / "there")
