"""What a federation recorded is attacked by the same engines as any run."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.files import write_json
from tests.helpers.federations import content, images
from tests.helpers.runs import same_rows
from tests.helpers.trap import planted

ATTACKS = [{"name": "patch_gradient"}, {"name": "multi_round"}, {"name": "grey"}]
ENGINE = ["--attack.engine", "local", "--attack.workers", "2"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """`--threads 1` below is for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def command(root: Path, out: str, *options: str, attacks: Sequence[Mapping[str, str]]) -> int:
    """`mjp federate` of a small federation with these attacks; its exit code."""
    write_json(root / "config.yaml", content(attacks=attacks))  # JSON is YAML
    argv = [str(root / "config.yaml"), "--data", str(images(root / "data"))]
    argv += ["--out", str(root / out), "--device", "cpu", "--threads", "1", *options]
    return main(["federate", *argv])


@pytest.mark.nightly
def test_workers_attack_what_was_recorded(tmp_path: Path) -> None:
    assert command(tmp_path, "here", attacks=ATTACKS) == 0
    shutil.copytree(tmp_path / "here", tmp_path / "two", ignore=shutil.ignore_patterns("attack"))
    (tmp_path / "two" / "rounds.png").unlink()
    assert command(tmp_path, "two", *ENGINE, attacks=ATTACKS) == 0
    same_rows(tmp_path / "here" / "attack", tmp_path / "two" / "attack")
    log = (tmp_path / "two" / "attack" / "log.jsonl").read_text()
    assert "engine local, 2 worker(s)" in log
    assert (tmp_path / "two" / "rounds.png").is_file()


def test_a_mistake_in_the_engine_is_told_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--attack.engine", "local", "--attack.partition", "gpu"]
    assert command(tmp_path, "out", *options, attacks=ATTACKS) == 2
    assert "`partition` says nothing to the engine `local`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_blocks_that_no_worker_did_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers do not know an attack that only this process has."""
    with planted(tmp_path / "trap", monkeypatch):
        monkeypatch.delenv("PYTHONPATH")
        assert command(tmp_path, "out", *ENGINE, attacks=[{"name": "trap"}]) == 3
    said = capsys.readouterr()
    assert "Not attacked, and nothing drawn; the same command goes on:" in said.err
    assert "block 0: Unknown attack 'trap'" in said.err
    assert not (tmp_path / "out" / "rounds.png").exists()
