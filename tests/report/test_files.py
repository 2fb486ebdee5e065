"""The files of a report: which there are, equal bytes, what is left out of a large one, the
commands that make it again, and where it may not be written."""

import errno
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from safetensors.torch import save_file

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report import write as data_files
from mjp_privacy.report.runs import commands, load_runs, provenance, run_configs
from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.refusals import refused
from tests.helpers.report_rows import HOSTILE, cell, run_of, small_run
from tests.helpers.runs import TINY, attack, flip, one_cell, photographs, same_rows


def test_same_rows_same_bytes(written: tuple[Path, ReportSummary], tmp_path: Path) -> None:
    """Also from another folder, and with the images of a line in another order."""
    out, moved = written[0], tmp_path / "moved" / "run"
    shutil.copytree(out.parent / "run", moved)
    store = RunStore(moved)
    rows = store.read("plain").drop(columns="has_picture")
    kept = {image: store.pictures("plain", image) or {} for image in store.pictured("plain")}
    shutil.rmtree(moved / "rows" / "plain")
    about = {"made_with": {"device": "cpu"}}
    store.write("plain", 0, rows.iloc[::-1].reset_index(drop=True), kept, about)
    write_report([moved], tmp_path / "out")
    for name in ("table.md", "table.tex", "table.csv", "index.html"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes(), name


def test_very_many_rows_are_not_written_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "samples.csv").touch()  # that of an earlier report is removed
    monkeypatch.setattr(data_files, "MOST_ROWS", 10)
    write_report([tmp_path / "run"], out)
    assert not (out / "samples.csv").exists()
    assert "samples.csv" not in (out / "index.html").read_text()


# the same again -----------------------------------------------------------------------------------


def mjp(command: str, **stands_for: Path) -> None:
    words = shlex.split(command)
    assert words[0] == "mjp"
    for name, path in stands_for.items():
        words = [word.replace(name, str(path)) for word in words]
    assert main(words[1:]) == 0


def told(*runs: Path) -> tuple[list[str], dict[str, str]]:
    """The commands that make these runs again, and where their numbers come from."""
    lines, configs = load_runs(runs).lines, run_configs(runs)
    return commands(configs, lines).splitlines(), dict(provenance(configs, lines))


def test_the_commands_make_the_same_rows_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page also tells the hashes of the config, of the images and of the weights."""
    images, run = photographs(tmp_path / "images", 3), tmp_path / "run"
    save_file(load_model(**TINY).state_dict(), tmp_path / "w.safetensors")
    model = TINY | {"checkpoint": str(tmp_path / "w.safetensors")}
    content = one_cell(models={"my ViT": model}, grid=[{"models": ["my ViT"], "settings": ["a"]}])
    content |= {"attacks": [{"name": "patch_gradient"}, {"name": "grey"}], "seed": 7}
    attack(images, run, content, limit=2)
    write_report([run], tmp_path / "report")
    monkeypatch.chdir(tmp_path / "report")
    (first, second), facts = told(run)
    assert first == (
        "mjp attack config.yaml --out again/run --images IMAGES --limit 2 --weights 'my ViT'=FILE"
    )
    mjp(f"{first} --device cpu", IMAGES=images, FILE=tmp_path / "w.safetensors")
    same_rows(run, Path("again/run"))
    mjp(second)
    one, two = (pd.read_csv(path) for path in ("table.csv", "again/report/table.csv"))
    pd.testing.assert_frame_equal(one, two)
    text = Path("config.yaml").read_bytes()
    assert yaml.safe_load(text) == run_configs([run])[0].fields
    assert facts["config, sha256"] == hashlib.sha256(text).hexdigest()
    rows = pd.concat([RunStore(run).read(run_id) for run_id in RunStore(run).stored_cells()])
    names = zip(rows["image_id"], rows["sha256"], rows["pixel_sha256"], strict=True)
    listed = "".join(sorted({f"{image} {file} {pixels}\n" for image, file, pixels in names}))
    assert hashlib.sha256(listed.encode()).hexdigest() in facts.values()
    weights = hashlib.sha256((tmp_path / "w.safetensors").read_bytes()).hexdigest()
    assert weights in facts["weights of my ViT"]


EVIL = "x; echo 'gone' $(id) `id`"


@pytest.mark.parametrize(
    ("config", "facts", "expected"),
    [
        ({"images": "embedded"}, {"planned_images": 20}, ["--limit", "20"]),
        ({"images": "my/own"}, {}, ["--images", "IMAGES"]),
        ({"name": "x"}, {"round": 3}, ["--uploads", "UPLOADS"]),
        (
            {"images": "embedded", "models": {"a b": {"checkpoint": "x.pth"}, "c": {"model": "y"}}},
            *({}, ["--weights", "a b=FILE"]),
        ),
        (  # a label that is a command of a shell is text, also on the page
            {"images": "embedded", "models": {n: {"checkpoint": "x.pth"} for n in (EVIL, HOSTILE)}},
            *({}, ["--weights", f"{EVIL}=FILE", f"{HOSTILE}=FILE"]),
        ),
    ],
)
def test_what_is_your_own_is_in_capitals_and_no_name_leaves_its_word(
    tmp_path: Path, config: Any, facts: dict[str, Any], expected: list[str]
) -> None:
    run = small_run(tmp_path / EVIL, **facts)
    made = yaml.safe_dump({"experiment": config, "made_with": {}}, sort_keys=False)
    (run / "experiment.yaml").write_text(made)
    (first, second), _ = told(run)
    begin = ["mjp", "attack", "config.yaml", "--out", f"again/{EVIL}"]
    assert shlex.split(first) == [*begin, *expected]
    assert shlex.split(second) == ["mjp", "report", f"again/{EVIL}", "--out", "again/report"]
    if f"{HOSTILE}=FILE" in expected:
        write_report([run], tmp_path / "out")
        assert HOSTILE not in (tmp_path / "out/index.html").read_text(encoding="utf-8")


def test_several_runs_and_experiments_have_a_config_and_a_command_each(tmp_path: Path) -> None:
    """ladder.yaml and ladder_finetuned.yaml share a folder: both are needed to make it again."""
    images, runs = photographs(tmp_path / "images", 1), [tmp_path / "one", tmp_path / "two"]
    for run, name, seen in (
        *((runs[0], "first", "grey"), (runs[0], "second", "patch_gradient")),
        (runs[1], "third", "grey"),
    ):
        attack(images, run, one_cell(name=name, attacks=[{"name": seen}]), add=True)
    lines, facts = told(*runs)
    assert [line.split(" --images")[0] for line in lines] == [
        *(f"mjp attack config_{n}.yaml --out again/{run}" for n, run in enumerate(["one"] * 2, 1)),
        *("mjp attack config_3.yaml --out again/two", lines[-1]),
    ]
    assert ["--add" in line for line in lines] == [False, True, False, False]
    assert lines[-1] == "mjp report again/one again/two --out again/report"
    write_report(runs, tmp_path / "out")
    names = [yaml.safe_load((tmp_path / f"out/config_{n}.yaml").read_text())["name"] for n in "123"]
    assert names == ["first", "second", "third"]
    assert {f"config_{number}.yaml: config, sha256" for number in "123"} < set(facts)


@pytest.mark.parametrize("text", [None, "", "[1, 2", "- a\n", "experiment: [1]\n", "\x00"])
def test_a_run_whose_config_cannot_be_read_has_a_report(tmp_path: Path, text: str | None) -> None:
    run = small_run(tmp_path / "run")
    if text is not None:
        (run / "experiment.yaml").write_text(text)
    lines, facts = told(run)
    assert lines == ["mjp report again/run --out again/report"]
    assert "config" in facts


# what is no run, and no place for a report --------------------------------------------------------

Make = Callable[[Path], object]


def file(name: str, text: str = "") -> Make:
    """A file in the folder that is given as a run."""

    def make(run: Path) -> None:
        run.mkdir()
        (run / name).write_text(text)

    return make


def cells(*entries: dict[str, Any]) -> Make:
    """A run whose list has these cells and nothing else."""
    return lambda run: RunStore(run).write_cells(list(entries))


def of_pipes(run: Path) -> None:
    run.mkdir()
    os.mkfifo(run / f"cells.0001.{'0' * 16}.parquet")


NAMELESS = {name: value for name, value in cell("x").items() if name != "attack"}
MISSPELT = {"model": "DeiT-S+MPJ", "setting": "a"}

NO_RUNS: dict[str, tuple[Make, str]] = {
    "missing": (lambda run: None, "run"),
    "empty": (Path.mkdir, "empty"),
    "a file": (Path.touch, "is a file"),
    "a pipe": (os.mkfifo, "is a file"),
    "other files": (file("a.png"), "other files"),
    "an earlier version": (file("cells.json", '{"cells": []}'), "convert_run"),
    "a pipe for cells": (of_pipes, "is not a run folder"),
    "no cells": (cells(), "empty run"),
    "no rows": (cells(cell("x"), cell("y")), "2 cell(s)"),
    "no attack": (cells(NAMELESS), "without attack"),
    "an unknown row of the paper": (lambda run: small_run(run, paper_row=MISSPELT), "DeiT-S+MJP a"),
}


@pytest.mark.parametrize("kind", NO_RUNS)
def test_what_is_no_run(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, named = NO_RUNS[kind]
    make(tmp_path / "run")
    refused(capsys, named, "report", tmp_path / "run", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["rows", "list", "no list"])
def test_damage_is_named_and_ends_with_3(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", (cell("small"), [10.0]), (cell("other"), [12.0]))
    path = RunStore(run).files("small")[0].path if kind == "rows" else next(run.glob("cells.*"))
    if kind == "no list":
        path.unlink()
    else:
        flip(path)
    assert main(["report", str(run), "--json"]) == 3
    told = capsys.readouterr()
    assert ("cells." if kind == "no list" else path.name) in told.err
    report = json.loads(told.out)
    assert report["damaged_files"] == 1
    assert any("DAMAGED" in reason for reason in report["reasons"])


@pytest.mark.parametrize("place", ["rows", "rows/small", "a file of rows", "the list"])
def test_what_may_not_be_read_is_named_and_ends_with_74(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of another user's run; root may read all, so that the system's answer is put in."""
    run = small_run(tmp_path / "run")
    files = {
        "a file of rows": RunStore(run).files("small")[0].path,
        "the list": next(run.glob("cells.*")),
    }
    path = files.get(place, run / place)
    for module, name in ((os, "listdir"), (Path, "open")):
        opened = getattr(module, name)

        def denied(at: Any, *words: Any, opened: Any = opened, **named: Any) -> Any:
            if Path(at) == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(at))
            return opened(at, *words, **named)

        monkeypatch.setattr(module, name, denied)
    assert main(["report", str(run)]) == 74
    [told] = capsys.readouterr().err.splitlines()
    assert path.name in told
    assert "permission denied" in told
    assert "attack" not in told  # it could not read it either


def test_a_run_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    runs = [small_run(tmp_path / "run"), tmp_path / "other/../run"]
    refused(capsys, "run", "report", *runs, "--out", tmp_path / "out")
    refused(capsys, "--out", "report", *runs)


@pytest.mark.parametrize(
    ("out", "named"),
    [
        *(("run", "run"), ("run/rows/report", "rows"), ("run/mine", "mine")),
        *(("file", "file"), ("file/below", "file"), ("link", "link"), ("folders", "index.html")),
        ("x" * 300, "xxx"),
    ],
)
def test_where_no_report_can_be(
    out: str, named: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folders" / "index.html").mkdir(parents=True)
    refused(capsys, named, "report", run, "--out", tmp_path / out)


def test_nobodys_files_are_written_over(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier report is replaced, and one in its run whatever else lies there."""
    out, name = tmp_path / "out", "rounds.csv"
    for folder in (out, run / "report"):
        folder.mkdir(exist_ok=True)
        (folder / "photo.png").touch()
    (out / name).write_text("mine")
    refused(capsys, "photo.png", "report", run, "--out", out)
    assert (out / name).read_text() == "mine"
    refused(capsys, "cells.", "report", run, "--out", small_run(tmp_path / "other"))
    assert main(["report", str(run)]) == 0
    (out / "photo.png").unlink()
    arguments = ["--pictures", "all", "--out", str(out)]
    assert [main(["report", str(run), *arguments]) for _ in range(2)] == [0, 0]


def test_a_report_lies_in_its_run_or_around_it(run: Path, tmp_path: Path) -> None:
    for arguments, page in (([], run / "report"), (["--out", str(tmp_path)], tmp_path)):
        assert main(["report", str(run), *arguments]) == 0
        assert (page / "index.html").is_file()
