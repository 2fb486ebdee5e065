"""What a training keeps is verified before it is used: its checkpoint, its journal, its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.tensor_files import save_tensors
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.trainer import train
from tests.helpers.training import class_folders, curve, small
from tests.helpers.uploads import flip
from tests.inputs.tensors import with_state

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a finished training, by name."""
    root = tmp_path_factory.mktemp("finished")
    train(small(), data=class_folders(root / "data"), out=root / "run", device="cpu", workers=0)
    return {file.name: file.read_bytes() for file in (root / "run").iterdir() if file.is_file()}


@pytest.fixture
def run(tmp_path: Path, finished: dict[str, bytes]) -> Path:
    """A folder with these files."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name, content in finished.items():
        (folder / name).write_bytes(content)
    return folder


def again(run: Path, data: Path) -> Path:
    return train(small(), data=data, out=run, device="cpu", workers=0)


def flipped(path: Path) -> None:
    flip(path, 4 * path.stat().st_size)


def other_weights(path: Path) -> None:
    tensors = {name: p + 1 for name, p in load_model(checkpoint=path).state_dict().items()}
    save_tensors(path, tensors, {}, digest=True)


def test_finished_weights_that_are_lost_are_made_again(
    data: Path, run: Path, finished: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    changes: list[tuple[str, Change]] = [
        ("model.safetensors", Path.unlink),
        ("model.safetensors", other_weights),
        ("model_float16.safetensors", flipped),
    ]
    for name, change in changes:
        change(run / name)
        for said in (True, False):
            again(run, data)
            assert (f"{name}: " in capsys.readouterr().err) == said
            assert (run / name).read_bytes() == finished[name]


def test_another_config_or_other_images_are_not_mixed_into_a_run(run: Path, data: Path) -> None:
    def refused(named: str, config: TrainingConfig, **options: Any) -> None:
        with pytest.raises(UserError, match=named):
            train(config, data=data, out=run, device="cpu", workers=0, **options)

    refused(r"jigsaw\.gamma .*0\.5.*0\.25", small(jigsaw={"gamma": 0.25}))
    refused("--val", small(), val=data)
    (data / "class_1" / "003.png").unlink()
    refused("--data", small())


NAN = float("nan")


def spoil(tensors: dict[str, Any], name: str) -> None:
    tensors[name].fill_(NAN)


WRONG: dict[str, tuple[str, Change]] = {
    "a bit": ("", flipped),
    "a list": ("", lambda path: torch.save([1], path)),
    "no config": ("config", lambda path: torch.save({}, path)),
    "half a config": ("", with_state(lambda s: s.update(config="{"))),
    "no number": ("step", with_state(lambda s: s.update(step=True))),
    "too far": ("13", with_state(lambda s: s.update(step=13))),
    "a score": ("val_top1", with_state(lambda s: s.update(val_top1=NAN))),
    "half a line": ("unvalidated", with_state(lambda s: s.update(unvalidated={"step": 6}))),
    "a shape": ("cls_token", with_state(lambda s: s["model"].update(cls_token=torch.zeros(1)))),
    "a value": ("cls_token", with_state(lambda s: spoil(s["model"], "cls_token"))),
    "no tensors": ("", with_state(lambda s: s["model"].clear())),
    "no moments": ("", with_state(lambda s: s["optimizer"].clear())),
    "a moment": ("optimizer", with_state(lambda s: spoil(s["optimizer"]["state"][0], "exp_avg"))),
}


@pytest.mark.parametrize(("named", "change"), WRONG.values(), ids=WRONG)
def test_a_checkpoint_that_is_wrong_is_named(
    data: Path, run: Path, named: str, change: Change
) -> None:
    """Any bit of one: tests/inputs/test_readers.py."""
    change(run / "checkpoint.pt")
    with pytest.raises(UserError) as caught:
        again(run, data)
    assert named in str(caught.value)
    assert "checkpoint.pt" in str(caught.value)
    assert (run / "model.safetensors").is_file()


# the journal --------------------------------------------------------------------------------------

NOISE = b'\xff\xfe\n[1]\n5\n{}\n{"step": true}\n{"step": -1}\n' + b"[" * 5000 + b"\n"


def test_damaged_lines_of_the_journal_are_left_out_and_said(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit, what is no line, an unfinished last one: in no curve."""
    lines, path = curve(run), run / "metrics.jsonl"
    content = path.read_bytes()
    at = content.index(b'"cross_entropy": ') + len(b'"cross_entropy": ')
    changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    path.write_bytes(NOISE + changed + b'{"step": 1')
    assert curve(run) == lines[1:]
    assert main(["curves", str(run), "--out", str(tmp_path / "out")]) == 0
    assert "metrics.jsonl: 8 " in capsys.readouterr().err
    again(run, data)
    assert "metrics.jsonl: 8 " in capsys.readouterr().err
    assert curve(run) == lines[1:]
    assert b"\xff" not in path.read_bytes()


@pytest.mark.parametrize("content", [None, b"", NOISE, b'{"step": 1, "epoch": 1}\n'])
def test_curves_of_nothing_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    if content is not None:
        (run / "metrics.jsonl").write_bytes(content)
    runs = [str(run)] if content is not None else []
    assert main(["curves", *runs, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert "metrics.jsonl" in printed or content is None
    assert printed.count("\n") == 1
    assert not (tmp_path / "out" / "curves.png").exists()
