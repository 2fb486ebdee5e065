"""Training and attack in one command: what is told before, who attacks, what probes record; and
accuracy against leakage: the figures of table and pictures against the runs they are of."""

import dataclasses
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_json
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.federation import task as tasks
from mjp_privacy.federation.comparison import defence_text, leakage_table, worst_case
from mjp_privacy.federation.config import load_federation
from mjp_privacy.federation.flower import run as flower_run
from mjp_privacy.federation.flower.run import run_flower
from mjp_privacy.models.sizes import LowRank
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.lines import Line, image_frame
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tradeoff import family_of
from tests.helpers.federations import MJP, config, content, images, run, small_federation, task
from tests.helpers.refusals import refused
from tests.helpers.report_rows import rows_of
from tests.helpers.runs import cells, flip, rows
from tests.helpers.uploads import load_uploads

GOOD: list[dict[str, Any]] = [{"name": "grey"}, {"name": "patch_gradient"}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return images(tmp_path / "data")


def command(root: Path, data: Path, attacks: list[dict[str, Any]], *words: str) -> int:
    """`mjp federate` with these attacks on two images; its exit code."""
    path = root / "federation.yaml"
    record = {"rounds": [1], "images": 2, "probes": [{"batch": 1}]}
    path.write_text(yaml.safe_dump(content(attacks=attacks, record=record)))
    out = [] if "--out" in words else ["--out", str(root / "out")]
    return main(["federate", str(path), "--data", str(data), *out, "--device", "cpu", *words])


# before and after the training --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "words", "named"),
    [
        ({"name": "patch_gradeint"}, [], "patch_gradient"),
        ({"name": "multi_round", "options": {"upload": 6}}, [], "uploads"),
        ({"name": "masked_span", "options": {"prior": "nowhere"}}, [], "'nowhere'"),
        (GOOD[0], ["--attack.engine", "local", "--attack.partition", "gpu"], "partition"),
        (GOOD[0], ["--out", "data/out"], "--data"),
        (GOOD[0], ["--out", "file"], "--out"),
        (GOOD[0], ["--out", "other"], "attack"),
        (GOOD[0], ["--out", "attacked"], "attacked"),
        (GOOD[0], ["--out", "trained"], "trained"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_image_is_read(
    tmp_path: Path,
    data: Path,
    attack: dict[str, Any],
    words: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks.Task, "__init__", lambda *_, **__: pytest.fail("it began"))
    for folder in ("other", "attacked", "trained"):
        Path(folder).mkdir()
    for file in ("file", "other/attack", "attacked/experiment.yaml"):
        Path(file).write_text("mine")
    Path("trained/metrics.jsonl").write_text('{"step": 1, "epoch": 0.5}\n')
    assert command(tmp_path, data, [attack], *words) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("error: ") == 1
    assert not (tmp_path / "out").exists()


def test_an_engine_without_its_package_is_refused_and_the_app_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for absent, engine in (("ray", "flower"), ("flwr", "flower-deployment")):
        monkeypatch.setattr(flower_run, "find_spec", lambda name, gone=absent: name != gone or None)
        with pytest.raises(UserError, match=f"{engine}.*package {absent}"):
            run_flower(small_federation(), tmp_path / "data", tmp_path / "out", engine)
    flower = ("flwr", "mjp_privacy.federation.flower.")
    for name in [name for name in sys.modules if name.startswith(flower)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(UserError, match="pip install"):
        importlib.import_module("mjp_privacy.federation.flower.app")


def test_other_attacks_go_on_with_the_trained_federation(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert command(tmp_path, data, GOOD[:1]) == 0
    trained = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(trained[:-9])  # damaged, and written again
    monkeypatch.setattr(tasks.Task, "server_step", lambda *_: pytest.fail("it trained again"))
    assert command(tmp_path, data, GOOD) == 0
    assert "finished already" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == trained
    stored = json.loads((out / "federation.json").read_text())
    assert [attack["name"] for attack in stored["attacks"]] == ["grey", "patch_gradient"]
    attacked = RunStore(out / "attack").read_cells()
    assert "patch_gradient" in {cell["attack"] for cell in attacked}


# what probes record -------------------------------------------------------------------------------


def test_a_probe_with_fresh_partners_cuts_its_batches_anew_and_is_attacked_whole(
    tmp_path: Path,
) -> None:
    """What needs the same images in each upload does not apply."""
    probe = {"batch": 4, "uploads": 3, "partners": "fresh"}
    out = run(tmp_path, record={"rounds": [0], "images": 8, "probes": [probe]})
    batches: dict[int, set[frozenset[str]]] = {}
    for upload in load_uploads(out / "uploads"):
        truth = upload.truth()
        assert truth is not None
        batches.setdefault(upload.header.round, set()).add(frozenset(truth.image_ids))
    assert list(batches) == [0, 1, 2]
    assert len({frozenset(cut) for cut in batches.values()}) == 3
    for cut in batches.values():
        assert [len(batch) for batch in cut] == [4, 4]
        assert len(frozenset.union(*cut)) == 8
    several = {"name": "multi_round", "options": {"uploads": 2}}
    experiment = load_experiment(
        {"name": "recorded", "block": 4, "attacks": [{"name": "masked_span"}, several]}
    )
    attack_uploads(experiment, out / "uploads", tmp_path / "attacked", device="cpu")
    by_attack = {entry["attack"]: entry for entry in cells(tmp_path / "attacked")}
    assert by_attack["masked_span"]["partners"] == "fresh"
    found = rows(tmp_path / "attacked", [by_attack["masked_span"]["run_id"]])
    places = found.loc[found["metric"] == "matched_place", "value"]
    assert sorted(places) == [0, 0, 1, 1, 2, 2, 3, 3]  # within each of the round's two batches
    refused = rows(tmp_path / "attacked", [by_attack["multi_round"]["run_id"]])
    assert refused["reason"].str.contains("shuffles").all()


CLIENT = {"batch": 3, "lora": {"rank": 2, "targets": ["qkv", "fc1"]}}


def test_a_client_of_low_rank_adapters_is_trained_recorded_and_named(
    tmp_path: Path,
) -> None:
    """Only adapters and head move and are sent; tables and charts call them a defence."""
    out = run(tmp_path, client=CLIENT)
    before = task(tmp_path, client=CLIENT).initial_weights()
    after = load_model(checkpoint=out / "model.safetensors")
    assert after.adapters == LowRank(2, ("qkv", "fc1"))
    moved = {n for n, weight in after.named_parameters() if not torch.equal(weight, before[n])}
    assert moved == {name for name in before if "lora_" in name or name.startswith("head.")}
    for upload in load_uploads(out / "uploads"):
        assert set(upload.tensor_file().names) == moved
        assert upload.header.recipe.lora == "{rank: 2, targets: [qkv, fc1]}"
    experiment = load_experiment({"name": "recorded", "attacks": [{"name": "mean_image"}]})
    attack_uploads(experiment, out / "uploads", tmp_path / "attacked", device="cpu")
    (client, *_) = clients_of(load_runs([tmp_path / "attacked"]).lines)
    assert client.defended
    assert client.name == "plain, lora {rank: 2, targets: [qkv, fc1]}"
    assert family_of(defence_text(config(client=CLIENT))) == "withheld"


# accuracy against leakage -------------------------------------------------------------------------


STATIONARY = {"prior": "stationary"}
ATTACKS = [
    {"name": "grey"},
    {"name": "patch_gradient"},
    {"name": "masked_span", "options": STATIONARY},
    {"name": "multi_round", "options": {"uploads": 2, **STATIONARY}},
]


@pytest.fixture(scope="module")
def federations(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A plain one and MJP, which has no test images, trained and attacked from the command line."""
    root = tmp_path_factory.mktemp("federations")
    data = str(images(root / "data"))
    for name, changes in (("plain", {}), ("mjp", {"model": MJP, "gamma": 0.5})):
        write_json(root / f"{name}.yaml", content(name=name, attacks=ATTACKS, **changes))
        argv = [str(root / f"{name}.yaml"), "--data", data]  # JSON is YAML
        argv += ["--val", str(images(root / "val"))] if name == "plain" else []
        assert main(["federate", *argv, "--out", str(root / name), "--device", "cpu"]) == 0
    return [root / "plain", root / "mjp"]


@pytest.fixture(scope="module")
def lines(federations: list[Path]) -> dict[str, Line]:
    """The plain federation's lines by attack."""
    return {line.attack: line for line in load_runs([federations[0] / "attack"]).lines}


def test_leakage_is_the_best_attack_of_each_image(federations: list[Path]) -> None:
    table = leakage_table(federations)
    for out in federations:
        lines = load_runs([out / "attack"]).lines
        for scope, most in (("1 upload", 1), ("any number of uploads", 2)):
            rows = pd.concat([rows_of(line) for line in lines if line.uploads <= most])
            rows = rows[(rows.role == "attack") & (rows.metric == "psnr")]
            rows = rows[(rows.variant == "standard") & (rows.status == "ok")]
            best = rows.groupby("image_id").value.max().clip(upper=100)
            found = table[(table.run == str(out)) & (table.scope == scope)].iloc[0]
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
    last = json.loads((federations[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(table[table.label == "plain"].top1) == {last["val_top1"]}
    plain, _, mjp, _ = (x for x in text.splitlines() if x.startswith(("| plain |", "| mjp |")))
    assert f" | {last['val_top1']:.1f} [" in plain
    assert "MJP γ=0.5" in mjp
    assert "| – | 0 |" in mjp
    assert (tmp_path / "tradeoff.png").stat().st_size > 0
    assert (tmp_path / "rounds.png").stat().st_size > 0


def test_a_federation_is_compared_once_and_over_nobodys_files(
    federations: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own earlier tables are replaced; a federation's folder is no place for them."""
    run, out = federations[0], tmp_path / "out"
    refused(capsys, str(run), "compare", run, run.parent / "mjp" / ".." / run.name, "--out", out)
    refused(capsys, "attack", "compare", run, "--out", run)
    assert [main(["compare", str(run), "--out", str(out)]) for _ in range(2)] == [0, 0]
    before = (out / "table.md").read_bytes()
    (out / "photo.png").touch()
    refused(capsys, "photo.png", "compare", run, "--out", out)
    assert (out / "table.md").read_bytes() == before


def test_a_last_measurement_that_is_lost_is_named_and_made_again(
    federations: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The accuracy of an earlier round is not shown in its place."""
    root, run = federations[0].parent, tmp_path / "plain"
    shutil.copytree(federations[0], run)
    path = run / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-20])
    refused(capsys, str(path), "compare", run, "--out", tmp_path / "out")
    data, val = (str(root / name) for name in ("data", "val"))
    words = ["--data", data, "--val", val, "--out", str(run), "--device", "cpu"]
    assert main(["federate", str(root / "plain.yaml"), *words]) == 0
    assert path.read_bytes() == before


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
    federations: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is missing would look like privacy."""
    run = tmp_path / "run"
    shutil.copytree(federations[0], run)
    cells = RunStore(run / "attack").read_cells()
    gone = next(cell for cell in cells if cell["attack"] == "patch_gradient")
    [file] = RunStore(run / "attack").files(gone["run_id"])
    flip(file.path)
    with pytest.raises(UserError, match=re.escape(file.path.name)):
        leakage_table([run])
    shutil.rmtree(run / "attack" / "rows" / gone["run_id"])
    with pytest.raises(UserError, match="0 of 2"):
        leakage_table([run])
    for left in ("attack", "metrics.jsonl"):
        shutil.rmtree(run / left) if left == "attack" else (run / left).unlink()
        refused(capsys, f"{run} holds no {left}", "compare", run, "--out", tmp_path / "out")
