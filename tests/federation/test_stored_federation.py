"""Damaged files of a federation: named, and made again bit by bit where that can be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import json_line
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.federation import rounds
from mjp_privacy.federation.rounds import evaluations, stored_config
from tests.helpers.federations import run
from tests.helpers.uploads import NAME, ONE, flip
from tests.inputs.tensors import with_state


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


FIRST, SECOND = NAME, NAME.replace("at00001", "at00002")
Damage = Callable[[Path], Any]


def content(folder: Path) -> Mapping[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def metadata_bit(path: Path) -> None:
    """A bit of what the file says of its model: the ratio that it was trained with."""
    path.write_bytes(path.read_bytes().replace(b'"trained_gamma":"0', b'"trained_gamma":"8', 1))


@pytest.mark.parametrize("damage", [metadata_bit, lambda p: flip(p, 4002), Path.unlink])
def test_damaged_final_weights_are_written_again(
    out: Path, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    path = out / "model.safetensors"
    before = path.read_bytes()
    damage(path)
    for nothing_to_do in (False, True):
        run(out.parent)
        assert path.read_bytes() == before
        assert ("nothing to do" in capsys.readouterr().err) == nothing_to_do


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'{"name": "x", "nmae": "y"}'])
def test_a_damaged_config_is_named(out: Path, content: bytes) -> None:
    (out / "federation.json").write_bytes(content)
    with pytest.raises(UserError, match=r"federation\.json"):
        stored_config(out)
    assert main(["compare", str(out), "--out", str(out / "compared")]) == 2
    if content:
        assert run(out.parent) == out  # its checkpoint says what was trained
        assert stored_config(out).name == "small"


def test_a_damaged_evaluation_is_named(out: Path) -> None:
    """A line of something else, a flipped bit, a line that nobody wrote."""
    path = out / "metrics.jsonl"
    before = path.read_bytes()
    wrong = json_line({"step": 2, "round": 2, "val_top1": 101}).encode()
    for named, content in (
        ("val_top1", before + wrong),
        ("line 4", before + b"\x00\n"),
        ("line 3", before.replace(b'"val_top1": 100.0', b'"val_top1": 101.0', 1)),
    ):
        path.write_bytes(content)
        for reads, place in ((evaluations, out), (run, out.parent)):
            with pytest.raises(UserError, match=rf"(?s)metrics\.jsonl.*{named}"):
                reads(place)
    path.write_bytes(b"".join(before.splitlines(keepends=True)[1:]))
    assert len(evaluations(out)) == 2  # the others still hold


MOMENTS = {"step": 1, "first": 5, "second": {}}


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("5", lambda s: s.update(step=5)),
        ("seconds", lambda s: s.update(seconds=float("nan"))),
        ("first", lambda s: s.update(optimizer=MOMENTS)),
        ("", lambda s: s["model"].clear()),
        ("head.bias", lambda s: s["model"].update({"head.bias": torch.zeros(1)})),
        ("head.bias", lambda s: s["model"].update({"head.bias": torch.full((3,), torch.nan)})),
    ],
)
def test_a_checkpoint_of_something_else_is_named(
    out: Path, named: str, change: Callable[[dict[str, Any]], object]
) -> None:
    with_state(change)(out / "checkpoint.pt")
    with pytest.raises(UserError) as caught:
        run(out.parent)
    assert "checkpoint.pt" in str(caught.value)
    assert named in str(caught.value)


# uploads ------------------------------------------------------------------------------------------


def weights(uploads: Path) -> Path:
    """The larger of the two files of weights by name; each is that of one round."""
    return max((uploads / "weights").iterdir())


DAMAGE: dict[str, Damage] = {
    "tensors": lambda u: flip(u / f"{FIRST}.safetensors", 80_003),
    "empty header": lambda u: (u / f"{SECOND}.json").write_bytes(b""),
    "no header": lambda u: (u / f"{FIRST}.json").unlink(),
    "truth": lambda u: flip(u / "truth" / f"{FIRST}.safetensors", 70_000),
    "weights": lambda u: flip(weights(u), 500_000),
    "no weights": lambda u: weights(u).unlink(),
    "nothing left": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_uploads_are_made_again_and_nothing_is_attacked(
    out: Path, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    uploads, rows = content(out / "uploads"), content(out / "attack" / "rows")
    damage(out / "uploads")
    assert content(out / "uploads") != uploads
    run(out.parent)
    assert content(out / "uploads") == uploads
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "uploads" in line]
    assert FIRST in line or SECOND in line
    assert attack(out).exit_code == 0
    assert content(out / "attack" / "rows") == rows


def test_what_cannot_be_made_again_is_named_and_refused(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "REPLAY_SECONDS", -1.0)
        for path in (out / "uploads" / "weights").iterdir():
            flip(path, 500_000)
        flip(out / "uploads" / f"{FIRST}.safetensors", 80_003)
        damaged = content(out / "uploads")
        run(out.parent)
    assert content(out / "uploads") == damaged
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "uploads" in line]
    assert FIRST in line
    shutil.rmtree(out / "uploads")
    step = rounds.Task.server_step

    def other(*arguments: Any) -> Any:
        weights, state = step(*arguments)
        return {name: weight * 1.001 for name, weight in weights.items()}, state

    monkeypatch.setattr(rounds.Task, "server_step", other)
    run(out.parent)  # rounds that end elsewhere, as other threads make them
    assert not (out / "uploads").exists()
