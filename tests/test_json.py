"""`--json`: one object on stdout and nothing else, with the fields of docs/json.md."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.command import plain_value, print_json
from tests.helpers.card_run import card_of, card_run
from tests.helpers.federations import run
from tests.helpers.models import tiny
from tests.helpers.runs import photographs
from tests.helpers.training import class_folders
from tests.training.test_evaluation import saved

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


def test_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = class_folders(tmp_path / "data", images=3, classes=5, side=40)
    file = saved(tmp_path / "model.safetensors", tiny(torch.float32))
    found = parsed(capsys, 0, "evaluate", "--checkpoint", file, "--data", data)
    (line,) = found["lines"]
    assert (line["n"], line["gamma"], line["paper_top1"]) == (15, 0.27, None)


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
