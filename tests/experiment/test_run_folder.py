"""Where a run goes that names no folder, and what happens where its folder does not take it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import save_file

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run_folder import run_folder
from mjp_privacy.experiment.store import RunStore
from tests.helpers.runs import TINY, attack, cells, one_cell, photographs, same_results, written

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


def test_runs_have_a_folder(place: Path) -> None:
    own, ladder = load_experiment("own"), load_experiment("ladder")
    one = weights(place / "a" / "vit.safetensors")
    trained = weights(place / "J" / "model.safetensors")
    folders = [
        run_folder(own),
        run_folder(own, [str(one)]),
        run_folder(own, [str(trained)]),
        run_folder(own, ["packaged:cifar_vit"]),
        run_folder(ladder, [str(one)]),
    ]
    names = ["own", "own/vit-", "own/J-", "own/cifar_vit-", "ladder"]
    for folder, name in zip(folders, names, strict=True):
        digits = "[0-9a-f]{6}" if name.endswith("-") else ""
        assert re.fullmatch(f"results/{name}{digits}", str(folder)), folder


@pytest.mark.parametrize("changed", [{"img_size": 64}, {"mean": (0.4,)}, {"gamma": 0.5}])
def test_the_same_file_as_another_model_goes_elsewhere(
    place: Path, changed: dict[str, Any]
) -> None:
    experiment, path = load_experiment("brief.yaml"), weights(place / "mine.safetensors")
    gamma = changed.pop("gamma", None)
    other = run_folder(experiment, [str(path)], gamma=gamma, model=changed)
    assert other != run_folder(experiment, [str(path)])
    assert other == run_folder(experiment, [str(path)], gamma=gamma, model=dict(changed))


def test_cells_that_another_checkpoint_replaces_are_said(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (weights(place / name / "mine.safetensors", seed) for seed, name in enumerate("ab"))
    _, told = run(one, "--out", "out", capsys=capsys)
    assert "2 finished cell" not in told
    (sha,) = shas(Path("out"))
    rows_of_one = written(Path("out"))
    _, told = run(two, "--out", "out", capsys=capsys)
    assert all(n in told for n in ("2 finished cell", "grey (a)", "patch_gradient (a)", sha[:12]))
    assert sha not in shas(Path("out"))
    assert rows_of_one.items() <= written(Path("out")).items()
    _, told = run(two, "--out", "out", capsys=capsys)
    assert "2 finished cell" not in told
    before = written(Path("out"))
    run(one, "--out", "out", capsys=capsys)
    assert written(Path("out")) == before  # the rows were there
    assert shas(Path("out")) == {sha}


def mjp_attack(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of `mjp attack` in a folder `out`, and what it said on stderr."""
    named = ["brief.yaml", "--images", "images", "--weights", "packaged:cifar_vit", "--out", "out"]
    capsys.readouterr()
    code = main(["attack", *map(str, (*named, *words)), "--engine", "here", "--device", "cpu"])
    return code, capsys.readouterr().err


def test_a_folder_with_other_files_and_no_run_is_no_place_for_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "out").mkdir()
    (place / "out" / ".hidden").touch()
    assert mjp_attack(capsys=capsys)[0] == 0  # what is hidden is nobody's
    shutil.rmtree(place / "out")
    (place / "out").mkdir()
    (place / "out" / "thesis.tex").touch()
    code, told = mjp_attack(capsys=capsys)
    assert (code, len(told.splitlines())) == (2, 1)
    assert "thesis.tex" in told
    assert "--into" in told
    assert [path.name for path in (place / "out").iterdir()] == ["thesis.tex"]
    assert mjp_attack("--into", capsys=capsys)[0] == 0
    assert mjp_attack(capsys=capsys)[0] == 0  # it is a run's now


def test_a_second_experiment_is_refused_unless_it_is_added(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "other.yaml").write_text(yaml.safe_dump({**CONFIG, "name": "other", "seed": 1}))
    grown = {**CONFIG, "attacks": [*CONFIG["attacks"], {"name": "mean_image"}]}
    assert mjp_attack(capsys=capsys)[0] == 0
    before = written(place / "out")
    for words in (["--seed", 1], ["--out", "out"]):
        config = [] if words[0] == "--seed" else ["other.yaml"]
        argv = ["attack", *(config or ["brief.yaml"]), "--images", "images", "--out", "out"]
        argv += ["--weights", "packaged:cifar_vit", *(map(str, words) if not config else ())]
        assert main([*argv, "--device", "cpu"]) == 2
        told = capsys.readouterr().err.splitlines()
        assert "--add" in told[-1]
        assert "brief" in told[-1]
    assert written(place / "out") == before
    (place / "brief.yaml").write_text(yaml.safe_dump(grown))
    assert mjp_attack(capsys=capsys)[0] == 0  # more lines
    (place / "brief.yaml").write_text(yaml.safe_dump(CONFIG))
    assert mjp_attack(capsys=capsys)[0] == 0  # fewer
    assert len(RunStore(place / "out").experiments) == 1
    for _ in range(2):
        assert mjp_attack("--seed", 1, "--add", capsys=capsys)[0] == 0
    assert mjp_attack("--seed", 1, capsys=capsys)[0] == 0  # it is one of the folder's
    assert len(RunStore(place / "out").experiments) == 2
    assert {entry["seed"] for entry in cells(place / "out")} == {0, 1}
    capsys.readouterr()
    assert main(["report", "out", "--out", "report", "--pictures", "none"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert all(name in first for name in RunStore(place / "out").experiments)


# storage ------------------------------------------------------------------------------------------


STORED = one_cell(attacks=[{"name": "april"}, {"name": "patch_gradient"}])


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    attack(images, out, STORED)
    return out


def command(images: Path, out: Path, folder: Path) -> int:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(STORED))
    words = ["attack", config, "--images", images, "--out", out, "--device", "cpu"]
    return main([*map(str, words), "--engine", "here"])


def after_blocks(
    number: int, happens: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have something happen once so many blocks of a run were written."""
    write, written = RunStore.write, count(1)

    def write_and_count(self: RunStore, *arguments: Any) -> Path:
        path = write(self, *arguments)
        if next(written) == number:
            happens()
        return path

    monkeypatch.setattr(RunStore, "write", write_and_count)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 320 KiB, too small for the run."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=320k", "small", str(place)]
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a small disk needs root")
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let a tmpfs be mounted")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_run_on_a_full_disk_goes_on_where_there_is_space(
    images: Path,
    undisturbed: Path,
    disk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (disk / "other").write_bytes(bytes(130 << 10))
    assert command(images, disk / "run", tmp_path) == 74
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{disk}/run/" in last
    assert "no space left on device" in last
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    assert command(images, disk / "run", tmp_path) == 0
    same_results(undisturbed, disk / "run")


@pytest.mark.parametrize(("blocks", "lost"), [(1, ""), (4, ""), (4, "rows")])
def test_a_run_whose_files_are_deleted_ends_with_74_and_can_be_made_again(
    images: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    blocks: int,
    lost: str,
) -> None:
    """In its middle and after its last block; the folder itself or its rows alone."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        after_blocks(blocks, lambda: shutil.rmtree(run / lost), patch)
        assert command(images, run, tmp_path) == 74
    assert str(run) in capsys.readouterr().err.splitlines()[-1]
    assert run.exists() == bool(lost)
    assert command(images, run, tmp_path) == 0
    same_results(undisturbed, run)
