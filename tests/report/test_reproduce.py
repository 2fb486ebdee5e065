"""The commands under a report make the same rows and the same report again."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from safetensors.torch import save_file

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import Line
from mjp_privacy.report.runs import commands, load_runs, provenance, run_configs
from mjp_privacy.report.write import write_report
from tests.helpers.report_rows import HOSTILE, cell, small_run
from tests.helpers.runs import TINY, attack, one_cell, photographs, same_rows


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on two of three images, and its report in the current folder."""
    images = photographs(tmp_path / "images", 3)
    save_file(load_model(**TINY).state_dict(), tmp_path / "w.safetensors")
    model = TINY | {"checkpoint": str(tmp_path / "w.safetensors")}
    content = one_cell(models={"my ViT": model}, grid=[{"models": ["my ViT"], "settings": ["a"]}])
    content |= {"attacks": [{"name": "patch_gradient"}, {"name": "grey"}], "seed": 7}
    attack(images, tmp_path / "run", content, limit=2)
    write_report([tmp_path / "run"], tmp_path / "report")
    monkeypatch.chdir(tmp_path / "report")
    return tmp_path


def mjp(command: str, **stands_for: Path) -> None:
    words = shlex.split(command)
    assert words[0] == "mjp"
    for name, path in stands_for.items():
        words = [word.replace(name, str(path)) for word in words]
    assert main(words[1:]) == 0


def test_the_commands_make_the_same_rows_and_report(finished: Path) -> None:
    run = finished / "run"
    first, second = commands(run_configs([run]), load_runs([run]).lines).splitlines()
    assert first == (
        "mjp attack config.yaml --out again/run --images IMAGES --limit 2 --weights 'my ViT'=FILE"
    )
    mjp(f"{first} --device cpu", IMAGES=finished / "images", FILE=finished / "w.safetensors")
    same_rows(run, Path("again/run"))
    mjp(second)
    one, two = (pd.read_csv(path) for path in ("table.csv", "again/report/table.csv"))
    pd.testing.assert_frame_equal(one, two)


def test_the_config_is_the_runs_and_its_hash_is_told(finished: Path) -> None:
    (kept,) = run_configs([finished / "run"])
    config, software = kept.fields, kept.software
    text = Path("config.yaml").read_bytes()
    assert yaml.safe_load(text) == config
    facts = dict(provenance(run_configs([finished / "run"]), load_runs([finished / "run"]).lines))
    assert facts["config, sha256"] == hashlib.sha256(text).hexdigest()
    (digest,) = (value for name, value in facts.items() if name.startswith("images and their"))
    assert digest == hashlib.sha256("".join(listed(finished / "run")).encode()).hexdigest()
    assert {name: str(value) for name, value in software.items()}.items() <= facts.items()
    assert software
    weights = hashlib.sha256((finished / "w.safetensors").read_bytes()).hexdigest()
    assert weights in facts["weights of my ViT"]


def listed(run: Path) -> list[str]:
    """The images of a run with their hashes, in the order of their names."""
    store = RunStore(run)
    rows = pd.concat([store.read(run_id) for run_id in store.stored_cells()])
    names = zip(rows["image_id"], rows["sha256"], rows["pixel_sha256"], strict=True)
    return sorted({f"{image} {file} {pixels}\n" for image, file, pixels in names})


def described(folder: Path, config: Any, **facts: Any) -> list[Line]:
    small_run(folder, **facts)
    (folder / "experiment.yaml").write_text(yaml.safe_dump({"experiment": config, "made_with": {}}))
    return list(load_runs([folder]).lines)


@pytest.mark.parametrize(
    ("config", "facts", "expected"),
    [
        ({"images": "embedded"}, {}, "mjp attack config.yaml --out again/run"),
        (
            {"images": "embedded"},
            {"planned_images": 20},
            "mjp attack config.yaml --out again/run --limit 20",
        ),
        ({"images": "my/own"}, {}, "mjp attack config.yaml --out again/run --images IMAGES"),
        ({"name": "x"}, {"round": 3}, "mjp attack config.yaml --out again/run --uploads UPLOADS"),
        (
            {"images": "embedded", "models": {"a b": {"checkpoint": "x.pth"}, "c": {"model": "y"}}},
            *({}, "mjp attack config.yaml --out again/run --weights 'a b'=FILE"),
        ),
    ],
)
def test_what_is_your_own_is_in_capitals(
    tmp_path: Path, config: Any, facts: dict[str, Any], expected: str
) -> None:
    lines = described(tmp_path / "run", config, **facts)
    assert commands(run_configs([tmp_path / "run"]), lines).splitlines() == [
        *(expected, "mjp report again/run --out again/report")
    ]


def test_several_runs_have_a_config_each(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        described(run, {"images": "embedded", "name": run.name})
    first, second, third = commands(run_configs(runs), load_runs(runs).lines).splitlines()
    assert first == "mjp attack config_1.yaml --out again/one"
    assert second == "mjp attack config_2.yaml --out again/two"
    assert third == "mjp report again/one again/two --out again/report"
    write_report(runs, tmp_path / "out")
    for config in run_configs(runs):
        written = yaml.safe_load((tmp_path / "out" / config.file).read_text())
        assert written["name"] == config.run.name
    names = [name for name, _ in provenance(run_configs(runs), load_runs(runs).lines)]
    assert {name.split(": ")[0] for name in names if "config" in name} == {"one", "two"}


def test_a_folder_that_two_experiments_filled_has_a_command_for_each(tmp_path: Path) -> None:
    """ladder.yaml and ladder_finetuned.yaml share a folder: both are needed to make it again."""
    images = photographs(tmp_path / "images", 2)
    for name, seen in (("first", "grey"), ("second", "patch_gradient")):
        attack(images, tmp_path / "run", one_cell(name=name, attacks=[{"name": seen}]), add=True)
    run = tmp_path / "run"
    one, two, last = commands(run_configs([run]), load_runs([run]).lines).splitlines()
    assert one.startswith("mjp attack config_1.yaml --out again/run --images IMAGES")
    assert two.startswith("mjp attack config_2.yaml --out again/run --images IMAGES")
    assert "--add" not in one
    assert two.endswith(" --add")
    assert last == "mjp report again/run --out again/report"
    write_report([run], tmp_path / "out")
    names = [yaml.safe_load((tmp_path / f"out/config_{n}.yaml").read_text())["name"] for n in "12"]
    assert names == ["first", "second"]
    headings = [heading for heading, _ in provenance(run_configs([run]), load_runs([run]).lines)]
    assert {"first: config, sha256", "second: config, sha256"} <= set(headings)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text", [None, "", "[1, 2", "- a\n- b\n", "experiment: [1]\nmade_with: x\n", "\x00"]
)
def test_a_run_whose_config_cannot_be_read_has_a_report(tmp_path: Path, text: str | None) -> None:
    run = small_run(tmp_path / "run")
    if text is not None:
        (run / "experiment.yaml").write_text(text)
    (kept,) = run_configs([run])
    assert (kept.fields, kept.software) == ({}, {})
    assert (
        commands(run_configs([run]), load_runs([run]).lines)
        == "mjp report again/run --out again/report"
    )
    write_report([run], tmp_path / "out")
    assert not (tmp_path / "out/config.yaml").exists()


def test_names_cannot_leave_their_word(tmp_path: Path) -> None:
    """A label or a folder that is a command of a shell is text, also on the page."""
    evil = "x; echo 'gone' $(id) `id`"
    store = RunStore(tmp_path / evil)
    store.write_cells([cell("x", status="unsupported", reason="so it is")])
    models = {evil: {"checkpoint": "x.pth"}, HOSTILE: {"checkpoint": "y.pth"}}
    made = {"experiment": {"images": "embedded", "models": models}}
    (store.root / "experiment.yaml").write_text(yaml.safe_dump(made, sort_keys=False))
    first, second = commands(run_configs([store.root]), load_runs([store.root]).lines).splitlines()
    assert shlex.split(first) == [
        *("mjp", "attack", "config.yaml", "--out", f"again/{evil}"),
        *("--weights", f"{evil}=FILE", f"{HOSTILE}=FILE"),
    ]
    assert shlex.split(second) == ["mjp", "report", f"again/{evil}", "--out", "again/report"]
    write_report([store.root], tmp_path / "out")
    assert HOSTILE not in (tmp_path / "out/index.html").read_text(encoding="utf-8")
