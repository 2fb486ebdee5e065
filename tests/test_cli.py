"""`mjp` and its commands: exit codes, overrides, help; and `--json`, one object on stdout and
nothing else, with the fields of docs/json.md."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from attacks import ATTACKS, CONTROLS
from mjp_privacy import __version__
from mjp_privacy.cli import COMMANDS, main, overview
from mjp_privacy.core.command import plain_value, print_json
from mjp_privacy.federation.commands import NAMES
from tests.helpers.card_run import card_of, card_run
from tests.helpers.federations import run
from tests.helpers.runs import cell, one_cell, photographs
from tests.inputs.base import called

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def mjp(tmp_path: Path) -> Command:
    """`mjp` with these arguments, in a folder with a config and images: exit code and what was
    printed."""
    photographs(tmp_path / "images", 3)
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(one_cell(seed=41, images="images")))

    def command(*argv: object) -> tuple[int, str]:
        outcome = called([str(argument) for argument in argv], tmp_path)
        assert "Traceback" not in outcome.said
        return outcome.code, outcome.said

    return command


# runs and the config's values ---------------------------------------------------------------------


def test_a_run_and_its_report(mjp: Command, tmp_path: Path) -> None:
    code, said = mjp("attack", "one.yaml", "--out", "run", "--device", "cpu")
    assert code == 0
    assert "3 images in 1 cell: run" in said
    assert "Next: mjp report run" in said
    answer = said.split("\n\n")[1].splitlines()
    code, said = mjp("report", "run", "--out", "run/report")
    assert code == 0
    assert said.splitlines()[: len(answer) - 1] == answer[:-1]  # which the attack ended with
    assert len(answer) <= 10
    for name in ("index.html", "table.md", "table.csv", "table.tex", "samples.csv"):
        assert (tmp_path / "run" / "report" / name).is_file()


def test_help_shows_the_configs_values_as_defaults_and_overrides_replace_them(
    mjp: Command, tmp_path: Path
) -> None:
    code, said = mjp("attack", "one.yaml", "--help")
    assert code == 0
    said = " ".join(said.replace("│", " ").split())
    for default in ("41", "3", "images"):
        assert f"default: {default}" in said
    assert "--client.dal, --client.no-dal" in said
    assert "{None}" not in said  # as a value that one could give
    for flag in ("--images", "--out", "--weights", "--labels", "--limit", "--gamma", "--device"):
        assert flag in said
    words = ("--client.dal", "--seed", 7, "--dtypes", "float64", "--block", 2, "--device", "cpu")
    assert mjp("attack", "one.yaml", "--out=~/run", *words)[0] == 0
    entry = cell(tmp_path / "run")
    assert (entry["seed"], entry["dtype"]) == (7, "float64")
    written = yaml.safe_load((tmp_path / "run" / "experiment.yaml").read_text())["experiment"]
    assert (written["block"], written["client"]["dal"]) == (2, True)


# one command --------------------------------------------------------------------------------------


def test_the_overview_fits_a_screen_names_every_command_and_answers_misspelt_ones(
    mjp: Command,
) -> None:
    code, said = mjp("--help")
    assert code == 0
    lines = said.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80 + 20  # the longest example may wrap
    assert all(f"  {name} " in said for name in COMMANDS)
    code, said = mjp("atack")
    assert (code, "attack?" in said) == (2, True)
    assert mjp() == (2, overview() + "\n")
    assert mjp("--version") == (0, f"mjp-privacy {__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_commands_help_opens_with_its_example(mjp: Command, name: str) -> None:
    code, said = mjp(name, "--help")
    assert code == 0
    opening = " ".join(said.split("╭")[0].split())
    assert opening.startswith(f"usage: mjp {name} ")
    assert f"Example: mjp {COMMANDS[name].example}" in opening


def test_the_tab_key_completes_commands_options_and_stock_configs(mjp: Command) -> None:
    code, script = mjp("completion", "bash")
    assert code == 0
    for line, wanted in {
        "mjp fed": "federate",
        "mjp attack --publ": "--published-only",
        "mjp attack tabl": "table5 table5_finetuned table5_timm table5_vit_tiny",
        "mjp list def": "defenses",
    }.items():
        words = line.split()
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _mjp; echo ${{COMPREPLY[@]}}"
        said = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True)
        assert said.stdout.split() == wanted.split(), said.stderr


def test_every_name_is_listed_with_a_line(mjp: Command) -> None:
    code, said = mjp("list", "--json")
    assert code == 0
    listed = json.loads(said)
    assert listed.pop("schema") == "mjp-privacy/list/1"
    assert set(listed) == set(NAMES)
    assert all(line for names in listed.values() for line in names.values())
    assert set(listed["attacks"]) == {*ATTACKS, *CONTROLS}
    assert len(set(listed["defenses"].values())) == len(listed["defenses"])  # each its own line
    assert "configs/demo.yaml" in listed["configs"]
    code, said = mjp("list", "atacks")
    assert (code, "attacks" in said) == (2, True)


# --json -------------------------------------------------------------------------------------------

DOCUMENT = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")


def parsed(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> dict[str, Any]:
    """What a command prints, with its exit code; every field of it is documented."""
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == code

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=refuse)
    schema = found.pop("schema")
    assert f"`{schema}`" in DOCUMENT
    if argv[0] != "list":
        assert all(f"`{field}`" in DOCUMENT for field in found)
    return found


def test_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    values = [math.nan, math.inf, np.float32(0.5), np.int64(3), Path("a"), (True, None)]
    assert plain_value(values) == [None, "inf", 0.5, 3, "a", [True, None]]
    print_json("x", {"y": values})
    assert json.loads(capsys.readouterr().out)["schema"] == "mjp-privacy/x/1"


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = card_run(tmp_path / "run")
    found = parsed(capsys, 0, "report", folder, "--out", tmp_path / "out", "--pictures", "none")
    card = card_of(folder)
    assert found["verdict"] == card.verdict
    assert [client["client"] for client in found["clients"]] == [
        row.client.title for row in card.rows
    ]
    assert found["about"] == card.main
    best, figure = card.rows[card.main].one_upload, found["clients"][card.main]["one_upload"]
    assert best is not None
    assert (figure["exact"], figure["of"], figure["mean"]) == (best.exact, best.of, best.mean)
    assert figure["flags"] == [flag.key for flag in best.flags]
    assert {flag for row in found["clients"] for flag in row["flags"]} <= set(found["flags"])
    assert found["clients"][0]["any_uploads"] == {"absent": "not run"}
    assert Path(found["files"][0]).name == "index.html"


def test_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two pictures one is cut off: it is named, and the exit code says so."""
    first, second = photographs(tmp_path / "a", 2), photographs(tmp_path / "b", 2)
    (second / "1.png").write_bytes((second / "1.png").read_bytes()[:99])
    argv = ("--reference", first, "--reconstruction", second, "--out", tmp_path / "s.csv")
    found = parsed(capsys, 3, "score", *argv, "--metrics", "psnr/standard", "mse/standard")
    mean, error = found["means"]
    assert (mean["mean"], mean["n"], mean["exact"], mean["low"]) == (100, 1, 1, None)
    assert (mean["better_for_privacy"], error["better_for_privacy"]) == ("lower", "higher")
    assert list(found["failed"]) == ["1.png"]


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"rounds": [1], "images": 1, "probes": [{"uploads": 1}]}
    uploads = run(tmp_path / "federation", record=record) / "uploads"
    found = parsed(capsys, 0, "check", uploads)
    (group,) = found["groups"]
    assert found["usable"]
    assert group["uploads"] == 1
    assert set(group["applies"]) | set(group["does_not_apply"])
    (uploads / "stray.json").write_text("{}")
    found = parsed(capsys, 3, "check", uploads)
    assert list(found["refused"]) == ["stray"]
    found = parsed(capsys, 0, "check", "--model", "vit_tiny_patch16_224")
    assert found["attacks"]["patch_gradient"].startswith("no: ")
    assert "yes" in {answer[:3] for answer in found["attacks"].values()}
