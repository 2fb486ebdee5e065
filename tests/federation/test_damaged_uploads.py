"""Recorded uploads are results like rows: the same command makes damaged ones again, bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.federation import rounds
from tests.helpers.federations import run
from tests.helpers.uploads import NAME, ONE, flip

FIRST, SECOND = NAME, NAME.replace("at00001", "at00002")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two images in rounds 1 and 2, whose uploads were attacked."""
    out = run(tmp_path_factory.mktemp("federation"))
    assert attack(out).exit_code == 0
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished.parent, tmp_path / "copy")
    return tmp_path / "copy" / "out"


def attack(out: Path) -> Any:
    experiment = load_experiment({"name": "attacks"} | ONE)
    return attack_uploads(experiment, out / "uploads", out / "attack", device="cpu")


def content(folder: Path) -> Mapping[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def weights(uploads: Path) -> Path:
    """The larger of the two files of weights by name; each is that of one round."""
    return max((uploads / "weights").iterdir())


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda u: flip(u / f"{FIRST}.safetensors", 80_003),
    "later tensors": lambda u: flip(u / f"{SECOND}.safetensors", 9),
    "header": lambda u: flip(u / f"{FIRST}.json", 8 * 200),
    "empty header": lambda u: (u / f"{SECOND}.json").write_bytes(b""),
    "no header": lambda u: (u / f"{FIRST}.json").unlink(),
    "truth": lambda u: flip(u / "truth" / f"{FIRST}.safetensors", 70_000),
    "no truth": lambda u: (u / "truth" / f"{FIRST}.safetensors").unlink(),
    "weights": lambda u: flip(weights(u), 500_000),
    "no weights": lambda u: weights(u).unlink(),
    "nothing left": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_uploads_are_made_again_and_nothing_is_attacked(
    out: Path, damage: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    uploads, rows = content(out / "uploads"), content(out / "attack" / "rows")
    damage(out / "uploads")
    assert content(out / "uploads") != uploads
    run(out.parent)
    assert content(out / "uploads") == uploads
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "uploads" in line]
    assert any(name in line for name in (FIRST, SECOND))
    assert attack(out).exit_code == 0
    assert content(out / "attack" / "rows") == rows
    run(out.parent)
    assert "uploads" not in capsys.readouterr().err.split("\n", 1)[0]


def test_what_cannot_be_made_again_is_named_and_refused(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rounds, "REPLAY_SECONDS", -1.0)
    for path in (out / "uploads" / "weights").iterdir():
        flip(path, 500_000)
    flip(out / "uploads" / f"{FIRST}.safetensors", 80_003)
    damaged = content(out / "uploads")
    run(out.parent)
    assert content(out / "uploads") == damaged
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "uploads" in line]
    assert FIRST in line


def test_other_weights_than_those_of_the_federation_make_no_upload(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that are computed again and end elsewhere, as other threads make them."""
    shutil.rmtree(out / "uploads")
    step = rounds.Task.server_step

    def other(*arguments: Any) -> Any:
        weights, state = step(*arguments)
        return {name: weight * 1.001 for name, weight in weights.items()}, state

    monkeypatch.setattr(rounds.Task, "server_step", other)
    run(out.parent)
    assert not (out / "uploads").exists()


def test_more_images_than_there_are_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"rounds": [1], "images": 600, "probes": [{"uploads": 1}]}
    out = run(tmp_path, rounds=2, record=record)
    recorded = len(list((out / "uploads").glob("*.json")))
    assert recorded == 24
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "600" in line]
    assert str(recorded) in line
