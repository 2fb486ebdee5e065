"""Damaged files of a federation: named, and made again where that can be."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import json_line
from mjp_privacy.federation.rounds import evaluations, stored_config
from mjp_privacy.models.tensor_files import DIGEST_KEY, save_tensors
from tests.helpers.federations import run

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("federation"))


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A finished federation that a test may damage; its images are beside it."""
    import shutil

    shutil.copytree(finished.parent, tmp_path / "copy")
    return tmp_path / "copy" / "out"


def again(out: Path) -> Path:
    return run(out.parent)


# the final weights --------------------------------------------------------------------------------


def other_weights(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (other_weights, "got other weights than the last checkpoint's. They are written again"),
        (
            lambda p: p.write_bytes(p.read_bytes()[:-100]),
            "got what cannot be read (SafetensorError",
        ),
        (lambda p: p.write_bytes(b""), "a file that is cut off, or no safetensors file at all"),
        (lambda p: p.write_text(DEEP), "a file that is cut off, or no safetensors file at all"),
    ],
)
def test_damaged_final_weights_are_written_again(
    out: Path, damage: Callable[[Path], Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = out / "model.safetensors"
    before = path.read_bytes()
    damage(path)
    again(out)
    assert path.read_bytes() == before
    told = capsys.readouterr().err
    assert said in told
    assert "nothing to do" not in told
    again(out)
    assert "finished already; nothing to do" in capsys.readouterr().err


def metadata_bit(path: Path) -> None:
    """A bit of what the file says of its model: the ratio that it was trained with."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"trained_gamma":"0', b'"trained_gamma":"8', 1))


def unsealed(path: Path) -> None:
    """The file as an earlier version wrote it, with other metadata."""
    with safe_open(path, "pt") as file:
        metadata = {k: v for k, v in file.metadata().items() if k != DIGEST_KEY}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    save_tensors(path, tensors, metadata | {"trained_gamma": "0.9"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (metadata_bit, "got a file that changed after it was written"),
        (unsealed, "got metadata of another model. They are written again"),
    ],
)
def test_damaged_facts_of_the_final_weights_are_noticed(
    out: Path, damage: Callable[[Path], Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = out / "model.safetensors"
    before = path.read_bytes()
    damage(path)
    assert path.read_bytes() != before
    again(out)
    assert path.read_bytes() == before
    assert said in capsys.readouterr().err


def test_any_flipped_bit_of_the_final_weights_is_noticed(out: Path) -> None:
    draw = random.Random(16)
    path = out / "model.safetensors"
    before = path.read_bytes()
    header = 8 + int.from_bytes(before[:8], "little")
    for _ in range(6):
        content = bytearray(before)
        content[draw.randrange(header)] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        again(out)
        assert path.read_bytes() == before


def test_final_weights_of_an_earlier_version_stay_as_they_are(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = out / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = {k: v for k, v in file.metadata().items() if k != DIGEST_KEY}
    save_tensors(path, load_file(path), metadata)
    before = path.read_bytes()
    again(out)
    assert path.read_bytes() == before
    assert "finished already; nothing to do" in capsys.readouterr().err


def test_missing_final_weights_are_written_again(out: Path) -> None:
    before = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()
    again(out)
    assert (out / "model.safetensors").read_bytes() == before


# federation.json and metrics.jsonl ----------------------------------------------------------------

BROKEN = {
    "empty": b"",
    "deep": DEEP.encode(),
    "no text": b"\xff\xfe\x00",
    "a list": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "digits": b'{"seed": ' + b"9" * 5001 + b"}",
    "more": b'{"name": "x"} {}',
    "NaN": b'{"name": "x", "gamma": NaN}',
    "twice": b'{"name": "x", "name": "y"}',
    "unknown": b'{"name": "x", "nmae": "y"}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_damaged_config_is_named(out: Path, content: bytes) -> None:
    (out / "federation.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        stored_config(out)
    assert "federation.json" in str(caught.value)
    assert ": expected the config that `mjp federate` wrote; got " in str(caught.value)
    assert "delete this folder." in str(caught.value)
    assert main(["compare", str(out), "--out", str(out / "compared")]) == 2
    if content:
        assert again(out) == out  # its checkpoint says what was trained
        assert stored_config(out).name == "small"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": "2", "round": 2, "val_top1": null}', "step: Input should be a valid integer"),
        ('{"round": 2, "val_top1": null}', "step: this field is needed"),
        ('{"step": 2, "round": -2, "val_top1": null}', "round: Input should be greater than or"),
        ('{"step": 2, "round": 2, "val_top1": 101}', "val_top1: Input should be less than or"),
        ('{"step": 2, "round": 2, "val_top1": true}', "val_top1: Input should be a valid number"),
        ('{"step": 2, "round": 2, "val_top1": 1, "x": 1}', "x: unknown field"),
    ],
)
def test_a_damaged_evaluation_is_named(out: Path, line: str, said: str) -> None:
    path = out / "metrics.jsonl"
    path.write_text(path.read_text() + json_line(json.loads(line)))
    with pytest.raises(UserError) as caught:
        evaluations(out)
    assert said in str(caught.value)
    assert "metrics.jsonl, evaluation 4: expected a line for each evaluation" in str(caught.value)
    with pytest.raises(UserError, match="Delete the line that is wrong"):
        again(out)


def test_a_flipped_bit_of_an_evaluation_is_named(out: Path) -> None:
    path = out / "metrics.jsonl"
    before = path.read_bytes()
    for value in (b"101.0", b"000.0", b"180.0"):  # the digits are in other numbers of the file too
        changed = before.replace(b'"val_top1": 100.0', b'"val_top1": ' + value, 1)
        assert changed != before
        path.write_bytes(changed)
        for reads in (lambda: evaluations(out), lambda: again(out)):
            with pytest.raises(UserError, match=r"metrics\.jsonl, line 3: expected a line for"):
                reads()
    with pytest.raises(UserError, match=r"1 damaged line\(s\), whose checksums are of other cont"):
        evaluations(out)
    assert main(["compare", str(out), "--out", str(out / "compared")]) == 2
    path.write_bytes(b"".join(before.splitlines(keepends=True)[1:]))
    assert len(evaluations(out)) == 2  # as the message says, the others still hold


def test_lines_of_earlier_versions_are_read_and_get_their_checksums(out: Path) -> None:
    path = out / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(_without_check(line)) + "\n" for line in lines))
    assert [line.round for line in evaluations(out)] == [0, 2, 4]
    again(out)
    assert all('"check": "' in line for line in path.read_text().splitlines())
    assert [line.round for line in evaluations(out)] == [0, 2, 4]


def _without_check(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "check"}


@pytest.mark.parametrize("line", ["5", "null", "[1]", '{"step": ', DEEP, "\x00"])
def test_a_line_that_nobody_wrote_is_named(out: Path, line: str) -> None:
    path = out / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 4"):
        evaluations(out)


def test_a_folder_in_place_of_a_file_is_named(out: Path) -> None:
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: expected .* got a folder"):
        again(out)


# the checkpoint -----------------------------------------------------------------------------------


def with_state(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, **changes}


def with_weight(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    def changed(state: dict[str, Any]) -> Any:
        weights = dict(state["model"])
        weights["head.bias"] = change(weights["head.bias"])
        return {**state, "model": weights}

    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_state(step=5), "step: expected the state of a federation that was stopped; got 5 of"),
        (with_state(step=True), "step: Input should be a valid integer; got True"),
        (with_state(step="2"), "step: Input should be a valid integer; got '2'"),
        (with_state(seconds=float("nan")), "seconds: expected"),
        (with_state(seconds=None), "seconds: expected"),
        (with_state(optimizer=[1]), "optimizer: Input should be a valid dictionary; got [1]"),
        (with_state(optimizer={"step": 1, "first": 5, "second": {}}), "got int in place of"),
        (with_state(model="weights"), "model: Input should be a valid dictionary; got 'weights'"),
        (
            with_state(model={}),
            "model: expected the state of a federation that was stopped; got no",
        ),
        (with_state(model={"x": torch.ones(1)}), "got x, which is no parameter"),
        (with_weight(lambda t: t[:-1]), "head.bias: expected"),
        (with_weight(lambda t: t.double()), "of torch.float64"),
        (with_weight(lambda t: t * torch.nan), "numbers that are NaN or infinite"),
        (with_weight(lambda t: t.tolist()), "got head.bias, which is no parameter"),
    ],
)
def test_a_checkpoint_of_something_else_is_named(
    out: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    path = out / "checkpoint.pt"
    torch.save(change(torch.load(path, weights_only=True)), path)
    with pytest.raises(UserError) as caught:
        again(out)
    assert "checkpoint.pt" in str(caught.value)
    assert said in str(caught.value)
    assert str(caught.value).endswith(
        ("Delete this file, and the federation starts at round 0 again.", "to start anew.")
    )


def test_lines_are_json_objects(out: Path) -> None:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [line.round for line in evaluations(out)]
