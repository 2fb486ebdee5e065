"""Two models under one name never share a folder by themselves, and never replace each other
silently."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from mjp_privacy.experiment.run_folder import run_folder
from safetensors.torch import save_file

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.experiment.config_files import load_experiment
from tests.helpers.runs import TINY, cells, photographs

FACTS = {"mean": 0.5, "std": 0.5, "num_heads": 3}
CONFIG = {
    "name": "brief",
    "attacks": [{"name": "grey"}, {"name": "patch_gradient"}],
    "models": {"own": {}},
    "grid": [
        {"models": ["own"], "settings": ["a"]},
        {"models": ["own"], "settings": ["c"], "only_with": "unknown_embedding"},
    ],
}
PLAIN = Path("results/brief/mine")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    photographs(tmp_path / "images", 1)
    (tmp_path / "brief.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(path: Path, seed: int = 0, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    model = load_model(**{**TINY, "seed": seed, **changes})
    save_file(model.state_dict(), path, {key: json.dumps(value) for key, value in FACTS.items()})
    return path


def run(path: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """Where `mjp attack` put the run of these weights, and what it said."""
    argv = ["attack", "brief.yaml", "--images", "images", "--device", "cpu", "--weights", str(path)]
    assert main([*argv, *options]) == 0
    printed = capsys.readouterr()
    found = re.search(r"images? in \d+ cells?: (\S+)", printed.out)
    assert found is not None
    return Path(found[1]), printed.err


def shas(out: Path) -> set[str]:
    return {entry["checkpoint_sha"] for entry in cells(out)}


def test_another_file_of_the_same_name_goes_elsewhere_and_is_found_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (weights(place / name / "mine.safetensors", seed) for seed, name in enumerate("ab"))
    assert run(one, capsys=capsys)[0] == PLAIN
    out, said = run(two, capsys=capsys)
    assert re.fullmatch(r"results/brief/mine-[0-9a-f]{6}", str(out))
    (sha,) = shas(PLAIN)
    assert (
        f"results/brief/mine holds another model or gamma (mine.safetensors, sha256 {sha[:12]}, "
        f"32 px): this run goes to {out}"
    ) in said
    assert shas(PLAIN).isdisjoint(shas(out))
    assert {entry["status"] for entry in [*cells(PLAIN), *cells(out)]} == {"ok"}
    for path, folder in ((one, PLAIN), (two, out)):
        again, said = run(path, capsys=capsys)
        assert again == folder
        assert "all 2 units are finished already; nothing to do" in said
    for file in PLAIN.rglob("*"):  # the first folder is thrown away
        file.unlink() if file.is_file() else None
    again, said = run(two, capsys=capsys)
    assert again == out
    assert f"this run's folder is {out}; {PLAIN} was that of another model" in said
    assert run(one, capsys=capsys)[0] == PLAIN


@pytest.mark.parametrize(
    "options",
    [
        ["--img-size", "64"],
        ["--mean", "0.4"],
        ["--std", "0.3"],
        ["--num-heads", "6"],
        ["--gamma", "0.5"],
    ],
    ids=" ".join,
)
def test_the_same_file_as_another_model_goes_elsewhere(
    place: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = weights(place / "mine.safetensors", unknown_embedding=True)
    assert run(path, capsys=capsys)[0] == PLAIN
    out, said = run(path, *options, capsys=capsys)
    assert out != PLAIN
    assert out.name.startswith("mine-")
    assert "32 px, gamma 0.27): this run goes to " in said
    for again, expected in (([], PLAIN), (options, out)):
        folder, said = run(path, *again, capsys=capsys)
        assert folder == expected
        assert "units are finished already; nothing to do" in said
    assert run(path, "--gamma", "0.27", capsys=capsys)[0] == PLAIN


def test_gamma_is_nothing_to_a_model_that_cannot_mask(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = weights(place / "mine.safetensors")
    assert {run(path, *o, capsys=capsys)[0] for o in ([], ["--gamma", "0.5"])} == {PLAIN}


def test_files_known_by_their_folder_go_apart_too(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [place / name / "checkpoints" / "model.safetensors" for name in "ab"]
    outs = [run(weights(path, seed), capsys=capsys)[0] for seed, path in enumerate(places)]
    assert outs[0] == Path("results/brief/checkpoints")
    assert outs[1].name.startswith("checkpoints-")


def test_a_run_that_never_opened_its_model_holds_no_folder(place: Path) -> None:
    PLAIN.mkdir(parents=True)
    (PLAIN / "cells.json").write_text('{"format": 1, "cells": []}')
    path = weights(place / "mine.safetensors")
    assert run_folder(load_experiment("brief.yaml"), [str(path)]).path == PLAIN


# --out --------------------------------------------------------------------------------------------


def test_cells_that_another_checkpoint_replaces_are_said(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (weights(place / name / "mine.safetensors", seed) for seed, name in enumerate("ab"))
    _, said = run(one, "--out", "out", capsys=capsys)
    assert "leave its tables" not in said
    (sha,) = shas(Path("out"))
    _, said = run(two, "--out", "out", capsys=capsys)
    assert (
        "own: 2 finished cell(s) of out leave its tables, because this run has another model or "
        "other options under the same name: grey (a), patch_gradient (a), made of "
        f"mine.safetensors, sha256 {sha[:12]}, 32 px. Their rows stay in out/rows; the command "
        "that made them shows them again. To have both, give this run an --out of its own\n"
    ) in said
    assert said.index("leave its tables") < said.index("own: mine.safetensors (timm)")
    assert sha not in shas(Path("out"))
    _, said = run(two, "--out", "out", capsys=capsys)
    assert "leave its tables" not in said
    _, said = run(one, "--out", "out", capsys=capsys)
    assert "leave its tables" in said
    assert "all 2 units are finished already; nothing to do" in said
    assert shas(Path("out")) == {sha}
