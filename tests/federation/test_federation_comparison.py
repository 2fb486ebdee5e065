"""Accuracy against leakage: the figures of table and pictures against the runs they are of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_json
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.federation.comparison import defence_text, leakage_table, worst_case
from mjp_privacy.federation.config import load_federation
from mjp_privacy.report.lines import Line, image_frame
from mjp_privacy.report.runs import load_runs
from tests.helpers.federations import MJP, content, images
from tests.helpers.refusals import refused
from tests.helpers.report_rows import rows_of

STATIONARY = {"prior": "stationary"}
ATTACKS = [
    {"name": "grey"},
    {"name": "patch_gradient"},
    {"name": "masked_span", "options": STATIONARY},
    {"name": "multi_round", "options": {"uploads": 2, **STATIONARY}},
]
FLOOR = "grey_psnr.diagnostic"
MINUTE = "configs/federated/minute.yaml"


@pytest.fixture(scope="module")
def federations(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A plain one and MJP, trained and attacked from the command line."""
    root = tmp_path_factory.mktemp("federations")
    data = str(images(root / "data"))
    for name, changes in (("plain", {}), ("mjp", {"model": MJP, "gamma": 0.5})):
        write_json(root / f"{name}.yaml", content(name=name, attacks=ATTACKS, **changes))
        argv = [str(root / f"{name}.yaml"), "--data", data, "--val", data]  # JSON is YAML
        assert main(["federate", *argv, "--out", str(root / name), "--device", "cpu"]) == 0
    return [root / "plain", root / "mjp"]


@pytest.fixture(scope="module")
def lines(federations: list[Path]) -> dict[str, Line]:
    """The plain federation's lines by attack."""
    return {line.attack: line for line in load_runs([federations[0] / "attack"]).lines}


def test_leakage_is_the_best_attack_of_each_image(federations: list[Path]) -> None:
    table = leakage_table(federations)
    for run in federations:
        lines = load_runs([run / "attack"]).lines
        for scope, most in (("1 upload", 1), ("any number of uploads", 2)):
            rows = pd.concat([rows_of(line) for line in lines if line.uploads <= most])
            rows = rows[(rows.role == "attack") & (rows.metric == "psnr")]
            rows = rows[(rows.variant == "standard") & (rows.status == "ok")]
            best = rows.groupby("image_id").value.max().clip(upper=100)
            found = table[(table.run == str(run)) & (table.scope == scope)].iloc[0]
            assert found.psnr == pytest.approx(best.mean())
            assert found.success == pytest.approx((best >= 20).mean())
            assert (found["round"], found.n) == (1, 2)
    plain = table[table.label == "plain"]
    assert (plain.psnr > 60).all()
    assert (plain.floor < 15).all()


def test_compare_writes_table_and_pictures(
    federations: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, federations), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "table.md")
    text = (tmp_path / "table.md").read_text()
    table = pd.read_csv(tmp_path / "comparison.csv")
    for run, label in zip(federations, ("plain", "mjp"), strict=True):
        measured = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        own = table[table.label == label]
        assert set(own.top1) == {measured[-1]["val_top1"]}
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
        assert f" | {measured[-1]['val_top1']:.1f} [" in line
    assert "MJP γ=0.5" in text
    assert (tmp_path / "tradeoff.png").stat().st_size > 0
    assert (tmp_path / "rounds.png").stat().st_size > 0


def test_a_defence_is_named_by_what_differs_from_a_plain_client() -> None:
    assert defence_text(load_federation(content())) == "none"
    client = {"withhold": ["pos_embed"], "defenses": [{"dp_sgd": {"noise": 1.0}}, {"top_k": 0.1}]}
    config = load_federation(content(client={"batch": 1, **client}, model=MJP, gamma=0.27))
    assert defence_text(config) == "MJP γ=0.27; withhold pos_embed; dp_sgd 1; top_k 0.1"


def changed(line: Line, **columns: Any) -> Line:
    """A line with other values; None takes a column away."""
    rows = line.store.read(line.cell.run_id).assign(**columns).dropna(axis=1, how="all")
    return dataclasses.replace(line, stored=image_frame(rows))


def test_what_is_missing_or_worse_than_grey_counts_as_grey(lines: dict[str, Line]) -> None:
    """An image that no attack reaches, or a score below grey; failures are counted."""
    found = worst_case([lines["grey"]], "1 upload")
    assert found["psnr"] == pytest.approx(found["floor"])
    assert (found["unreached"], found["success"]) == (2, 0.0)
    worse = {"psnr.standard": [3.0, 50.0], "status": ["ok", "failed"]}
    found = worst_case([changed(lines["patch_gradient"], **worse), lines["grey"]], "1 upload")
    assert found["psnr"] == pytest.approx(found["floor"])
    assert (found["failed"], found["unreached"]) == (1, 1)


def test_what_is_unfinished_or_no_federation_is_refused(
    federations: list[Path],
    lines: dict[str, Line],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is missing would look like privacy."""
    with pytest.raises(UserError, match="grey"):
        worst_case([changed(lines["patch_gradient"], **{FLOOR: None})], "1 upload")
    run = tmp_path / "run"
    shutil.copytree(federations[0], run)
    cells = RunStore(run / "attack").read_cells()
    gone = next(cell for cell in cells if cell["attack"] == "patch_gradient")
    shutil.rmtree(run / "attack" / "rows" / gone["run_id"])
    with pytest.raises(UserError, match="0 of 2"):
        leakage_table([run])
    for left in ("attack", "metrics.jsonl"):
        shutil.rmtree(run / left) if left == "attack" else (run / left).unlink()
        refused(capsys, f"{run} holds no {left}", "compare", run, "--out", tmp_path / "out")


@pytest.mark.nightly
def test_the_one_minute_config_needs_nothing_from_outside(tmp_path: Path) -> None:
    """Its shortest form: one recorded round."""
    argv = [MINUTE, "--data", "embedded", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["federate", *argv, "--rounds", "6"]) == 0
    leakage = pd.read_csv(tmp_path / "out" / "rounds.csv").set_index("scope")
    assert set(leakage["n"]) == {6}
    one, several = leakage.loc["1 upload"], leakage.loc["any number of uploads"]
    assert 0 < one["unshuffled"] < several["unshuffled"] == 6
    assert one["psnr"] < several["psnr"]
    assert (tmp_path / "out" / "rounds.png").stat().st_size > 0
    assert main(["compare", str(tmp_path / "out"), "--out", str(tmp_path / "compared")]) == 0
    assert "| 0 | – | 0 |" in (tmp_path / "compared" / "table.md").read_text()  # no test images
