"""A run goes on where it stopped, however it stopped, and never takes other images or another run's
folder for its own."""

import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from mjp_privacy.cli import main
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core import files
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import store
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run_folder import run_folder
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import tensor_files
from tests.helpers.runs import (
    attack,
    cells,
    flip,
    names,
    one_cell,
    photograph,
    photographs,
    rows,
    said,
    same_results,
    same_tensors,
    tensors,
    tiny,
    values,
    weights,
    written,
)

BOTH = ["float32", "float64"]
MASKED = [{"models": ["MJP"], "settings": ["b", "c"], "gammas": [0.5]}]
"""Four of the whole run's cells: eight files of rows."""
SPAN = [{"name": "patch_gradient"}]


# killed -------------------------------------------------------------------------------------------


def same_as(whole: Path, out: Path) -> None:
    """The cells of a run are those of the whole one, to the last bit."""
    ids = [entry["run_id"] for entry in cells(out)]
    pd.testing.assert_frame_equal(rows(out), rows(whole, ids), check_exact=True)
    for run_id in ids:
        same_tensors(tensors(out, run_id), tensors(whole, run_id))


@pytest.mark.parametrize(("at", "before"), [(1, True), (3, False), (4, False), (8, True)])
def test_a_run_that_dies_at_any_file_goes_on_and_lists_what_it_owes(
    images: Path, whole: Path, tmp_path: Path, at: int, before: bool
) -> None:
    """At its k-th file, before or after that is in place; tools/crash-test kills processes."""
    config, calls, write = tiny(dtypes=["float64"], grid=MASKED), count(1), files.write_atomically

    def mortal(path: Path, *arguments: Any, **options: Any) -> Path:
        number = next(calls)
        made = path if number == at and before else write(path, *arguments, **options)
        if number == at:
            raise KeyboardInterrupt
        return made

    with pytest.MonkeyPatch.context() as patch:
        for module in (tensor_files, store):
            patch.setattr(module, "write_atomically", mortal)
        with pytest.raises(KeyboardInterrupt):
            attack(images, tmp_path, config)
    finished = written(tmp_path)
    owed = cells(tmp_path) if at > 2 else []  # a half-finished table does not look like a whole one
    assert at != 3 or {bool(entry["reason"]) for entry in owed} == {True}
    assert attack(images, tmp_path, config).exit_code == 0
    assert finished.items() <= written(tmp_path).items()
    same_as(whole, tmp_path)
    keys = [entry["cell_key"] for entry in cells(tmp_path)]
    assert not owed or [entry["cell_key"] for entry in owed] == keys


def test_a_damaged_and_a_missing_file_are_named_and_made_again_and_then_nothing(
    images: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, config = Path(shutil.copytree(whole, tmp_path / "run")), tiny(dtypes=BOTH)
    missing, flipped, *_ = sorted(out.glob("rows/*/00001.*.parquet"))
    missing.unlink()
    flip(flipped)
    content = flipped.read_bytes()
    assert attack(images, out, config).exit_code == 0
    assert str(flipped.relative_to(out)) in said(out)
    assert (out / "damaged" / flipped.relative_to(out)).read_bytes() == content
    same_results(whole, out)
    before = written(out)
    monkeypatch.setattr(FedSGDClient, "gradients", lambda *_, **__: pytest.fail("computed again"))
    assert attack(images, out, config).exit_code == 0
    assert "all 60 units" in said(out)
    assert attack(images, out, config, limit=2).images == 2
    assert written(out) == before


@pytest.mark.parametrize(("block", "limits"), [(3, (3, 6)), (6, (2, 6))])
def test_a_larger_limit_ends_with_the_rows_of_a_fresh_run(
    images: Path, tmp_path: Path, block: int, limits: tuple[int, int]
) -> None:
    """A limit inside a block has it done again as a whole, for its numbers move with the batch."""
    config, grown = one_cell(dtypes=BOTH, block=block), tmp_path / "grown"
    attack(images, grown, config, limit=limits[0])
    first = written(grown)
    assert attack(images, grown, config, limit=limits[1]).images == limits[1]
    attack(images, tmp_path / "fresh", config, limit=limits[1])
    same_results(grown, tmp_path / "fresh")
    assert block > limits[0] or first.items() <= written(grown).items()


# other images -------------------------------------------------------------------------------------


@pytest.fixture
def own(images: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the images, and a finished run on it."""
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    attack(folder, tmp_path / "run", one_cell(attacks=SPAN))
    return folder, tmp_path / "run"


def test_images_may_come_and_go(own: tuple[Path, Path]) -> None:
    folder, run = own
    before = values(run)
    (folder / "0.png").unlink()
    for label in (6, 7):
        photograph(label).save(folder / f"{label}.png")
    lines = [f"{at}.png,{at}" for at in range(1, 8)]
    (folder / "labels.csv").write_text("\n".join(["file,label", *lines]) + "\n")
    assert attack(folder, run, one_cell(attacks=SPAN)).exit_code == 0
    assert "0.png" in said(run)  # its rows stay
    after = values(run)
    assert {*after.index.get_level_values("image_id")} == {*names(8)}
    pd.testing.assert_series_equal(after[before.index], before, check_exact=True)


def test_a_run_refuses_other_pixels_and_labels_under_the_same_names(
    own: tuple[Path, Path],
) -> None:
    folder, run = own
    before, image, labels = written(run), folder / "2.png", folder / "labels.csv"
    for path, spoil in (
        (image, photograph(99).save),
        (image, lambda path: path.write_bytes(b"no image")),
        (labels, lambda path: path.write_text(path.read_text().replace("2.png,2", "2.png,3"))),
    ):
        content = path.read_bytes()
        spoil(path)
        with pytest.raises(UserError, match=r"2\.png"):
            attack(folder, run, one_cell(attacks=SPAN))
        path.write_bytes(content)
    photograph(2).save(image, compress_level=0)  # the same pixels in other bytes
    assert attack(folder, run, one_cell(attacks=SPAN)).exit_code == 0
    others = photographs(folder.parent / "others", 2, first=7)
    with pytest.raises(UserError, match="6 image"):
        attack(others, run, one_cell(attacks=SPAN))
    assert written(run) == before


# folders ------------------------------------------------------------------------------------------

CONFIG = {
    "name": "brief",
    "attacks": [{"name": "grey"}, *SPAN],
    "models": {"own": {}},
    "grid": [{"models": ["own"], "settings": ["a"]}],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    photographs(tmp_path / "images", 1)
    (tmp_path / "brief.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**CONFIG, "name": "other", "seed": 1}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(capsys: pytest.CaptureFixture[str], *words: object, **named: object) -> tuple[int, str]:
    """The exit code of `mjp attack` in a folder `out`, and what it said on stderr."""
    given = {"config": "brief.yaml", "weights": "packaged:cifar_vit", **named}
    options = ["--images", "images", "--weights", given["weights"], "--out", "out"]
    capsys.readouterr()
    options += ["--engine", "here", "--device", "cpu", *words]
    code = main([*map(str, ["attack", given["config"], *options])])
    return code, capsys.readouterr().err


def test_runs_have_a_folder_by_their_weights_and_what_is_made_of_them(place: Path) -> None:
    own, ladder = load_experiment("own"), load_experiment("ladder")
    one = str(weights(place / "a" / "vit.safetensors"))
    trained = str(weights(place / "J" / "model.safetensors"))
    for folder, name in (
        (run_folder(own), "own"),
        (run_folder(own, [one]), "own/vit-[0-9a-f]{6}"),
        (run_folder(own, [trained]), "own/J-[0-9a-f]{6}"),
        (run_folder(own, ["packaged:cifar_vit"]), "own/cifar_vit-[0-9a-f]{6}"),
        (run_folder(ladder, [one]), "ladder"),
    ):
        assert re.fullmatch(f"results/{name}", str(folder)), folder
    made = [{"img_size": 64}, {"mean": (0.4,)}, {}, {"img_size": 64}]
    others = {run_folder(own, [one], model=model) for model in made}
    assert len(others | {run_folder(own, [one], gamma=0.5)}) == 4


def test_cells_that_another_checkpoint_replaces_are_said(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (weights(place / n / "mine.safetensors", seed=ord(n)) for n in "ab")
    said_of_first = "2 finished cell"
    assert said_of_first not in command(capsys, weights=one)[1]
    [sha] = {entry["checkpoint_sha"] for entry in cells(Path("out"))}
    told = command(capsys, weights=two)[1]
    assert all(words in told for words in (said_of_first, "grey (a)", "patch_gradient (a)"))
    assert sha not in {entry["checkpoint_sha"] for entry in cells(Path("out"))}
    before = written(Path("out"))
    assert said_of_first not in command(capsys, weights=two)[1]
    command(capsys, weights=one)
    assert written(Path("out")) == before  # the rows were there
    assert {entry["checkpoint_sha"] for entry in cells(Path("out"))} == {sha}


@pytest.mark.parametrize("how", ["gone", "flipped"])
def test_no_figure_of_another_model_is_shown_where_the_list_of_cells_is_lost(
    place: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Two models under one name, the second of which left the tables again: its rows are later."""
    one, two = (weights(place / n / "mine.safetensors", seed=ord(n)) for n in "ab")
    for made_of in (one, two, one):
        command(capsys, weights=made_of)
    before = cells(Path("out"))
    [path] = Path("out").glob("cells.*.parquet")
    if how == "gone":
        path.unlink()
    else:
        flip(path)
    assert cells(Path("out")) == before
    assert main(["report", "out"]) == 3
    told = capsys.readouterr().err
    assert path.name in told if how == "flipped" else "cells." in told
    code, told = command(capsys, weights=one)
    assert code == 0
    assert "cells." in told
    assert cells(Path("out")) == before
    assert main(["report", "out"]) == 0


def test_a_folder_with_other_files_and_no_run_is_no_place_for_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "out").mkdir()
    (place / "out" / ".hidden").touch()
    assert command(capsys)[0] == 0  # what is hidden is nobody's
    shutil.rmtree(place / "out")
    (place / "out").mkdir()
    (place / "out" / "thesis.tex").touch()
    code, told = command(capsys)
    assert (code, len(told.splitlines())) == (2, 1)
    assert "thesis.tex" in told
    assert "--into" in told
    assert [path.name for path in (place / "out").iterdir()] == ["thesis.tex"]
    assert command(capsys, "--into")[0] == command(capsys)[0] == 0  # it is a run's now


def test_a_second_experiment_is_refused_unless_it_is_added(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: object) -> int:
        return command(capsys, *words)[0]

    assert run() == 0
    before = written(place / "out")
    changed = ("--seed", 1, "--client.defenses", "int8")
    for differ, (code, told) in (
        (" in name, seed)", command(capsys, config="other.yaml")),
        (" in client.defenses, seed)", command(capsys, *changed)),
    ):
        assert code == 2
        assert all(word in told.splitlines()[-1] for word in ("--add", "brief", differ))
    assert written(place / "out") == before
    grown = {**CONFIG, "attacks": [*CONFIG["attacks"], {"name": "mean_image"}]}
    for config in (grown, CONFIG):  # more lines, or fewer
        (place / "brief.yaml").write_text(yaml.safe_dump(config))
        assert run() == 0
    assert len(RunStore(place / "out").experiments) == 1
    assert run("--seed", 1, "--add") == run("--seed", 1, "--add") == 0
    assert run("--seed", 1) == 0  # it is one of the folder's
    assert len(RunStore(place / "out").experiments) == 2
    assert [entry["seed"] for entry in cells(place / "out")] == [1, 1, 0, 0, 0]
    assert main(["report", "out", "--out", "report", "--pictures", "none"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert all(name in first for name in RunStore(place / "out").experiments)
    shutil.rmtree(place / "out")
    shuffled = [{"models": ["own"], "settings": ["b"]}]
    (place / "brief.yaml").write_text(yaml.safe_dump({**CONFIG, "grid": shuffled}))
    assert run() == 0
    assert " in gamma)" in command(capsys, "--gamma", 0.5)[1].splitlines()[-1]


# storage ------------------------------------------------------------------------------------------


STORED = one_cell(attacks=[{"name": "grey"}, *SPAN])


@pytest.mark.parametrize(("blocks", "lost"), [(1, ""), (4, ""), (4, "rows")])
def test_a_run_whose_files_are_deleted_ends_with_74_and_can_be_made_again(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    blocks: int,
    lost: str,
) -> None:
    """In its middle and after its last block; the folder itself or its rows alone."""
    run, write, number = tmp_path / "run", RunStore.write, count(1)

    def write_and_lose(self: RunStore, *arguments: Any) -> Path:
        path = write(self, *arguments)
        if next(number) == blocks:
            shutil.rmtree(run / lost)
        return path

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(STORED))
    words = ["attack", config, "--images", images, "--out", run, "--device", "cpu"]
    words = [*map(str, words), "--engine", "here"]
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "write", write_and_lose)
        assert main(words) == 74
    assert str(run) in capsys.readouterr().err.splitlines()[-1]
    assert run.exists() == bool(lost)
    assert main(words) == 0
    attack(images, tmp_path / "undisturbed", STORED)
    same_results(tmp_path / "undisturbed", run)
