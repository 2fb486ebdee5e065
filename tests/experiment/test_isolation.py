"""What an attack of somebody's own breaks is its rows, with the reason; all others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks import ATTACKS
from mjp_privacy.client.defenses.noise import GaussianNoise
from mjp_privacy.core.errors import format_error
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment import simulated, step_by_step, work
from mjp_privacy.interfaces import AttackerView, Reconstruction
from tests.helpers.faulty_attacks import ANSWERS, WHERE, grey, raised
from tests.helpers.runs import attack, one_cell, photographs, rows, same_rows

FILE = "helpers/faulty_attacks.py"
GOOD = {"2.png"}  # the image that the faulty attack bears where it is alone


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with ATTACKS.registered("faulty", Entry(f"{WHERE}:Faulty")):
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"), 3)


def with_faulty(**options: Any) -> dict[str, Any]:
    return one_cell(attacks=[{"name": "faulty", "options": options}, {"name": "patch_gradient"}])


def outcome(run: Path, name: str = "faulty") -> dict[str, tuple[str, str]]:
    """Status and reason of each image's score."""
    found = rows(run)
    scores = found[(found["attack"] == name) & (found["metric"] == "psnr")]
    return {r.image_id: (r.status, r.reason) for r in scores.itertuples()}


SAID = {
    "runtime": f"RuntimeError: sizes do not match ({FILE}:",
    "key": f"KeyError: 'no such thing' ({FILE}:",
    "assertion": f"AssertionError ({FILE}:",
    "exit": f"SystemExit: 5 ({FILE}:",
    "recursion": f"RecursionError: too deep ({FILE}:",
    "user": "prior 'x': expected a file",
    "singular": "the attack's linear algebra broke down: ",
    "torch": f"RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3) ({FILE}:",
    "nothing": "WrongAnswer: expected a Reconstruction, got NoneType (",
    "tensor": "WrongAnswer: expected a Reconstruction, got Tensor (",
    "shape": "WrongAnswer: images: expected the shape (1, 3, 32, 32), got (1, 3, 4, 32) (",
    "whole": "WrongAnswer: images: expected float numbers, got torch.uint8 (",
    "complex": "WrongAnswer: images: expected float numbers, got torch.complex64 (",
    "list": "WrongAnswer: images: expected a tensor, got list (",
    "nan": "the reconstruction is not finite",
    "mask": "WrongAnswer: mask: expected the shape (1, 16), got (1, 32) (",
    "permutation": "WrongAnswer: permutation: expected numbers of patches, 0 to 15 (",
    "diagnostics": "WrongAnswer: diagnostics['rank']: expected the shape (1,), got (1, 7) (",
    "names": "WrongAnswer: diagnostics: expected short names, got 3 (",
    "inapplicable": "WrongAnswer: inapplicable: expected reasons by image, 0 to 0, got {99: 'why'}",
}


def test_every_wrong_answer_has_its_words() -> None:
    assert SAID.keys() == ANSWERS.keys()


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_faulty_attack_is_rows_with_the_reason(
    images: Path, tmp_path: Path, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = attack(images, tmp_path / "run", with_faulty(answer=answer))
    assert summary.exit_code == 3
    said = outcome(tmp_path / "run")
    fails = dict.fromkeys({"0.png", "1.png", "2.png"} - ({"2.png"} if answer != "nan" else set()))
    assert {name for name, (status, _) in said.items() if status == "failed"} == set(fails)
    for name in fails:
        assert said[name][1].startswith(SAID[answer]), said[name]
    assert {status for status, _ in outcome(tmp_path / "run", "patch_gradient").values()} == {"ok"}
    assert "Traceback" not in capsys.readouterr().err
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    traces = [line["traceback"] for line in log if line.get("traceback")]
    assert bool(traces) == (answer not in ("user", "singular", "nan"))
    assert all("Traceback" in trace for trace in traces)


@pytest.mark.parametrize("member", ["needs", "unsupported"])
def test_so_is_one_that_fails_before_it_runs(images: Path, tmp_path: Path, member: str) -> None:
    assert attack(images, tmp_path / "run", with_faulty(member=member)).exit_code == 3
    for status, reason in outcome(tmp_path / "run").values():
        assert status == "failed"
        assert reason.startswith("ValueError: ")
        assert f"({FILE}:" in reason
    assert {status for status, _ in outcome(tmp_path / "run", "patch_gradient").values()} == {"ok"}


def test_a_mended_attack_ends_with_the_rows_of_a_fresh_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert attack(images, run, with_faulty()).exit_code == 3
    monkeypatch.setitem(ANSWERS, "runtime", lambda view: Reconstruction(grey(view)))
    assert attack(images, run, with_faulty()).exit_code == 0
    assert attack(images, tmp_path / "fresh", with_faulty()).exit_code == 0
    same_rows(run, tmp_path / "fresh")


def test_a_defence_that_fails_is_the_rows_of_its_clients(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GaussianNoise, "apply", lambda *_: 1 / 0)
    grid = [
        {"models": ["ViT"], "settings": ["a"]},
        {"models": ["ViT"], "settings": ["a"], "client": {"defenses": [{"gaussian_noise": 0.1}]}},
    ]
    config = one_cell(grid=grid, attacks=[{"name": "patch_gradient"}])
    assert attack(images, tmp_path / "run", config).exit_code == 3
    found = rows(tmp_path / "run")
    assert set(found[found["defenses"] == ""]["status"]) == {"ok"}
    defended = found[found["defenses"] != ""]
    assert set(defended["status"]) == {"failed"}
    assert defended["reason"].str.startswith("ZeroDivisionError: division by zero (").all()


def test_a_model_that_fails_to_open_is_its_own_rows(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = simulated.Simulated.open

    def broken(self: Any, model: str) -> Any:
        return 1 / 0 if model == "bad" else opened(self, model)

    monkeypatch.setattr(simulated.Simulated, "open", broken)
    tiny = one_cell()["models"]["ViT"]
    grid = [{"models": ["bad", "good"], "settings": ["a"]}]
    config = one_cell(
        models={"bad": tiny, "good": tiny}, grid=grid, attacks=[{"name": "patch_gradient"}]
    )
    assert attack(images, tmp_path / "run", config).exit_code == 3
    found = rows(tmp_path / "run")
    assert set(found[found["model"] == "good"]["status"]) == {"ok"}
    bad = found[found["model"] == "bad"]
    assert set(bad["status"]) == {"failed"}
    assert bad["reason"].str.startswith("ZeroDivisionError: division by zero (").all()


def test_a_block_that_cannot_be_read_is_its_own_rows(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = simulated.SimulatedModel.block

    def broken(self: Any, block: Any) -> Any:
        return 1 / 0 if block.index == 0 else read(self, block)

    monkeypatch.setattr(simulated.SimulatedModel, "block", broken)
    config = one_cell(block=1, attacks=[{"name": "patch_gradient"}])
    assert attack(images, tmp_path / "run", config).exit_code == 3
    said = outcome(tmp_path / "run", "patch_gradient")
    assert sorted(status for status, _ in said.values()) == ["failed", "ok", "ok"]


def test_a_stop_is_no_fault_of_the_attack(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "runtime", lambda view: raised(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        attack(images, tmp_path / "run", with_faulty())


def test_nor_is_whatever_an_attack_raises_after_a_signal(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries turn an interrupted import into errors of their own."""
    monkeypatch.setattr(step_by_step, "stopped", lambda: True)
    monkeypatch.setattr(work, "stopped", lambda: True)
    with pytest.raises(RuntimeError, match="sizes do not match"):
        attack(images, tmp_path / "run", with_faulty())


def test_memory_that_runs_out_splits_the_block_as_before(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(view: AttackerView) -> Reconstruction:
        return raised(MemoryError()) if len(grey(view)) > 1 else Reconstruction(grey(view))

    monkeypatch.setitem(ANSWERS, "runtime", large)
    assert attack(images, tmp_path / "run", with_faulty()).exit_code == 0
    found = rows(tmp_path / "run")
    assert set(found[found["metric"] == "images_together"]["value"]) == {1.0}


# blame --------------------------------------------------------------------------------------------


def error_of(source: str, name: str) -> BaseException:
    try:
        exec(compile(source, name, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_place_is_the_innermost_line_that_is_no_librarys() -> None:
    inner = "import json\n\njson.loads('{')"
    assert format_error(error_of(inner, "/home/me/project/attacks/mine.py")).endswith(
        "(char 1) (attacks/mine.py:3)"
    )
    installed = "/x/lib/python3.11/site-packages/attacks/april.py"
    assert format_error(error_of("1 / 0", installed)).endswith("(attacks/april.py:1)")
    other = "/x/lib/python3.11/site-packages/numpy/core.py"
    assert "numpy" not in format_error(error_of("1 / 0", other))


def test_an_error_is_one_line_of_bounded_length() -> None:
    error = error_of("raise ValueError('\\x1b[2J' + 'a' * 5000 + '\\nmore')", "a/b.py")
    assert len(format_error(error)) < 300
    assert "\x1b" not in format_error(error)
    assert "more" not in format_error(error)


def test_an_error_whose_text_fails_is_named_by_its_class() -> None:
    source = "class E(Exception):\n  def __str__(self): return 1 / 0\nraise E"
    assert format_error(error_of(source, "a/b.py")) == "E (a/b.py:3)"
