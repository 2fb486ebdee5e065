"""Training and attack in one command: what is told before, who attacks, and what probes record."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.federation import task as tasks
from mjp_privacy.federation.comparison import defence_text
from mjp_privacy.federation.flower import run as flower_run
from mjp_privacy.federation.flower.run import run_flower
from mjp_privacy.models.sizes import LowRank
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tradeoff import family_and_strength
from tests.helpers.federations import config, content, images, run, small_federation, task
from tests.helpers.runs import cells, rows
from tests.helpers.trap import planted
from tests.helpers.uploads import load_uploads

GOOD: list[dict[str, Any]] = [{"name": "grey"}, {"name": "patch_gradient"}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return images(tmp_path / "data")


def command(
    root: Path, data: Path, attacks: list[dict[str, Any]], *words: str, images: int = 2
) -> int:
    """`mjp federate` with these attacks on so many images; its exit code."""
    path = root / "federation.yaml"
    record = {"rounds": [1], "images": images, "probes": [{"batch": 1}]}
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
        (GOOD[0], ["--rounds", "0"], "--rounds"),
        (GOOD[0], ["--out", "data/out"], "--data"),
        (GOOD[0], ["--out", "file"], "--out"),
        (GOOD[0], ["--out", "other"], "attack"),
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
    Path("other").mkdir()
    for file in ("file", "other/attack"):
        Path(file).write_text("mine")
    assert command(tmp_path, data, [attack], *words) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("error: ") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("engine", "absent"), [("flower", "ray"), ("flower-deployment", "flwr")])
def test_an_engine_without_its_package_is_refused(
    engine: Any, absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_run, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(UserError, match=f"{engine}.*package {absent}"):
        run_flower(small_federation(), tmp_path / "data", tmp_path / "out", engine)


def test_the_app_without_flower_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    flower = ("flwr", "mjp_privacy.federation.flower.")
    for name in [name for name in sys.modules if name.startswith(flower)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(UserError, match="pip install"):
        importlib.import_module("mjp_privacy.federation.flower.app")


def test_other_attacks_go_on_with_the_trained_federation(
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    assert command(tmp_path, data, GOOD[:1]) == 0
    trained = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(tasks.Task, "server_step", lambda *_: pytest.fail("it trained again"))
    assert command(tmp_path, data, GOOD) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == trained
    stored = json.loads((out / "federation.json").read_text())
    assert [attack["name"] for attack in stored["attacks"]] == ["grey", "patch_gradient"]
    attacked = RunStore(out / "attack").read_cells()
    assert "patch_gradient" in {cell["attack"] for cell in attacked}


def test_blocks_that_no_worker_did_are_said(
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_thread: None,
) -> None:
    """Workers do not know an attack that only this process has."""
    workers = ["--attack.engine", "local", "--attack.workers", "1", "--threads", "1"]
    with planted(tmp_path / "trap", monkeypatch):
        monkeypatch.delenv("PYTHONPATH")
        assert command(tmp_path, data, [{"name": "trap"}], *workers) == 3
    assert "'trap'" in capsys.readouterr().err
    assert not (tmp_path / "out" / "rounds.png").exists()


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
MATCHING = [{"name": "patch_gradient"}, {"name": "inverting_gradients", "options": {"steps": 2}}]


def test_a_client_of_low_rank_adapters_is_trained_recorded_attacked_and_named(
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
        assert set(upload.names()) == moved
        assert not upload.header.partial
        assert upload.header.recipe["lora"] == "{rank: 2, targets: [qkv, fc1]}"
    attacks = [*MATCHING, {"name": "mean_image"}]
    experiment = load_experiment({"name": "recorded", "attacks": attacks})
    attack_uploads(experiment, out / "uploads", tmp_path / "attacked", device="cpu")
    found = rows(tmp_path / "attacked").groupby("attack")
    assert set(found.get_group("patch_gradient")["status"]) == {"unsupported"}
    assert set(found.get_group("inverting_gradients")["status"]) == {"ok"}
    text = defence_text(config(client=CLIENT))
    assert text == "lora {rank: 2, targets: [qkv, fc1]}"
    assert family_and_strength(text)[0] == "withheld"
    (client, *_) = clients_of(load_runs([tmp_path / "attacked"]).lines)
    assert client.defended
    assert client.name == "plain, lora {rank: 2, targets: [qkv, fc1]}"


def test_a_shorter_federation_records_in_proportion_and_says_what_is_not_there(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, data, [], "--rounds", "2", images=600) == 0
    recorded = [json.loads(file.read_text()) for file in tmp_path.glob("out/uploads/*.json")]
    assert {upload["round"] for upload in recorded} == {0}
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "600" in line]
    assert str(len(recorded)) in line
    assert len(recorded) == 24
