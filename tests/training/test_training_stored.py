"""What a training keeps is verified before it is used: its checkpoint, its journal, its weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.tensor_files import save_tensors
from mjp_privacy.training.trainer import train
from tests.helpers.night import nightly
from tests.helpers.training import class_folders, curve, small

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


def flipped(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def other_weights(path: Path) -> None:
    model = load_model(checkpoint=path)
    tensors = {name: p.detach() + 1 for name, p in model.named_parameters()}
    save_tensors(path, tensors, {}, digest=True)


LOST: list[Change] = [
    lambda path: path.unlink(),
    lambda path: path.write_bytes(path.read_bytes()[:-9]),
    lambda path: flipped(path, 0.5),
    lambda path: flipped(path, 0.05),
    other_weights,
]


@pytest.mark.parametrize("change", LOST)
@pytest.mark.parametrize("name", ["model.safetensors", nightly("model_float16.safetensors")])
def test_finished_weights_that_are_lost_are_made_again(
    data: Path,
    run: Path,
    finished: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
    change: Change,
    name: str,
) -> None:
    change(run / name)
    again(run, data)
    assert f"{name}: " in capsys.readouterr().err
    assert (run / name).read_bytes() == finished[name]
    again(run, data)
    assert f"{name}: " not in capsys.readouterr().err


def edited(change: Callable[[dict[str, Any]], object]) -> Change:
    """A checkpoint with one thing changed in it, and whole otherwise."""

    def edit(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return edit


def moments(state: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = state["optimizer"]["state"][0]
    return first


NAN = float("nan")
WRONG: list[tuple[Change, str]] = [
    (lambda path: path.write_bytes(path.read_bytes()[:3000]), ""),
    (lambda path: flipped(path, 0.5), ""),
    (lambda path: torch.save([1], path), ""),
    (lambda path: torch.save({}, path), "config"),
    (edited(lambda s: s.update(config="{")), ""),
    (edited(lambda s: s.update(step=True)), "step"),
    (edited(lambda s: s.update(step=13)), "13"),
    (edited(lambda s: s.update(val_top1=NAN)), "val_top1"),
    (edited(lambda s: s.update(unvalidated={"step": 6})), "unvalidated"),
    (edited(lambda s: s["model"].update(cls_token=1)), "cls_token"),
    (edited(lambda s: s["model"].update(cls_token=torch.zeros(1))), "cls_token"),
    (edited(lambda s: s["model"]["cls_token"].fill_(NAN)), "cls_token"),
    (edited(lambda s: s["model"].clear()), ""),
    (edited(lambda s: s["optimizer"].clear()), ""),
    (edited(lambda s: moments(s).update(exp_avg=torch.zeros(1))), "optimizer"),
    (edited(lambda s: moments(s)["exp_avg"].fill_(NAN)), "optimizer"),
]


@pytest.mark.parametrize(("change", "named"), WRONG)
def test_a_checkpoint_that_is_wrong_is_named(
    data: Path, run: Path, change: Change, named: str
) -> None:
    change(run / "checkpoint.pt")
    with pytest.raises(UserError) as caught:
        again(run, data)
    assert named in str(caught.value)
    assert "checkpoint.pt" in str(caught.value)
    assert (run / "model.safetensors").is_file()


def test_a_bit_anywhere_in_a_checkpoint_is_found_or_has_no_part(data: Path, run: Path) -> None:
    """What stands between the entries of the zip is no content."""
    path, draw = run / "checkpoint.pt", random.Random(0)
    good = path.read_bytes()
    expected = torch.load(path, weights_only=True)["model"]["cls_token"]
    refused = 0
    for _ in range(40):
        changed = bytearray(good)
        changed[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            again(run, data)
        except UserError:
            refused += 1
            continue
        assert torch.equal(torch.load(path, weights_only=True)["model"]["cls_token"], expected)
    assert refused > 20


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


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", NOISE, b'{"step": 1, "epoch": 1}\n'),
        b'{"step": 1, "epoch": NaN, "cross_entropy": 1}\n',
    ],
)
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
