"""Training and attack in one command: what is told before, who attacks, and what probes record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_json
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines import options
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.federation import task as tasks
from mjp_privacy.federation.campaign import attack_experiment, check_campaign, inapplicable_attacks
from mjp_privacy.federation.comparison import defence_text
from mjp_privacy.federation.config import plain
from mjp_privacy.federation.rounds import federate
from mjp_privacy.models.sizes import LowRank
from mjp_privacy.report.charts.tradeoff import family_and_strength
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.runs import load_runs
from mjp_privacy.uploads.folder import UploadFolder
from mjp_privacy.uploads.record import TruthFile
from tests.helpers.federations import MJP, MODEL, config, content, images, run, task
from tests.helpers.runs import cells, rows, same_rows
from tests.helpers.trap import planted

ALL = [{"name": "patch_gradient"}, {"name": "multi_round"}, {"name": "grey"}]
WORKERS = ["--attack.engine", "local", "--attack.workers", "2"]


GOOD: list[dict[str, Any]] = [{"name": "grey"}, {"name": "patch_gradient"}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return images(tmp_path / "data")


def command(root: Path, data: Path, attacks: list[dict[str, Any]], *words: str) -> int:
    """`mjp federate` with these attacks; its exit code."""
    path = root / "federation.yaml"
    record = {"rounds": [1], "images": 2, "probes": [{"batch": 1}]}
    path.write_text(yaml.safe_dump(content(attacks=attacks, record=record)))
    out = ["--out", str(root / "out"), "--device", "cpu"]
    return main(["federate", str(path), "--data", str(data), *out, *words])


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        ({"name": "patch_gradeint"}, "patch_gradient"),
        ({"name": "multi_round", "options": {"upload": 6}}, "uploads"),
        ({"name": "multi_round", "options": {"uploads": "6"}}, "'6'"),
        ({"name": "masked_span", "options": {"prior": "nowhere"}}, "'nowhere'"),
        ({"name": "patch_gradient", "seconds": -1}, "attacks.0.seconds"),
        ({"name": "patch_gradient", "label": "a\x1b[2Jb"}, "attacks.0.label"),
    ],
)
def test_a_wrong_attack_is_refused_before_any_image_is_read(
    tmp_path: Path,
    data: Path,
    attack: dict[str, Any],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks.Task, "from_config", lambda *_, **__: pytest.fail("it began"))
    assert command(tmp_path, data, [attack]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_other_attacks_go_on_with_the_trained_federation(
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert command(tmp_path, data, GOOD[:1]) == 0
    trained = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr(tasks.Task, "server_step", lambda *_: pytest.fail("it trained again"))
    assert command(tmp_path, data, GOOD) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == trained
    stored = json.loads((tmp_path / "out" / "federation.json").read_text())
    assert [attack["name"] for attack in stored["attacks"]] == ["grey", "patch_gradient"]
    cells = RunStore(tmp_path / "out" / "attack").read_cells()
    assert "patch_gradient" in {cell["attack"] for cell in cells}


def test_a_federation_that_stopped_goes_on_with_other_attacks(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tasks.Task.server_step

    def killed(self: Any, weights: Any, state: Any, uploads: Any, round: int) -> Any:
        if round == 2:
            raise KeyboardInterrupt
        return step(self, weights, state, uploads, round)

    monkeypatch.setattr("mjp_privacy.federation.rounds.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(tasks.Task, "server_step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, attacks=GOOD[:1])
    monkeypatch.setattr(tasks.Task, "server_step", step)
    out = run(tmp_path, attacks=GOOD)
    assert [json.loads(line)["round"] for line in (out / "metrics.jsonl").open()] == [0, 2, 4]
    whole = run(tmp_path, "whole", attacks=GOOD)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its config held the attacks."""
    out = run(tmp_path, attacks=GOOD[:1])
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    before = {**json.loads(state["config"]), "attacks": [{"name": "grey"}]}
    torch.save({**state, "config": json.dumps(before)}, out / "checkpoint.pt")
    assert run(tmp_path, attacks=GOOD) == out


def test_what_is_trained_may_not_change(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(UserError, match=r"server\.lr"):
        run(tmp_path, server={"optimizer": "sgd", "lr": 0.2})


def test_folders_are_told(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UserError, match="--data"):
        check_campaign(config(), data, data / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "attack").write_text("mine")
    with pytest.raises(UserError, match="attack"):
        check_campaign(config(), data, tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="--out"):
        check_campaign(config(), data, tmp_path / "file")


def test_attacks_that_will_not_apply_are_named() -> None:
    attacks = [{"name": name} for name in ("grey", "april", "multi_round", "patch_gradient")]
    lines = inapplicable_attacks(config(attacks=attacks))
    assert "multi_round: it needs 6 uploads of the same images; a probe records 2" in lines
    assert not any(line.startswith(("grey", "patch_gradient")) for line in lines)
    assert inapplicable_attacks(config(attacks=attacks, record={"rounds": []})) == ()


@pytest.mark.parametrize("position", ["learned", "none"])
def test_they_are_those_that_the_rows_call_unsupported(
    tmp_path: Path, data: Path, position: str
) -> None:
    names = ("patch_gradient", "masked_span", "token_span", "mask_locator", "inverting_gradients")
    shape = {**(MJP if position == "learned" else MODEL), "position_embedding": position}
    whole = config(
        model=shape,
        attacks=[{"name": name} for name in names],
        record={"rounds": [0], "images": 2, "probes": [{"batch": 1}]},
        rounds=1,
    )
    foreseen = {line.partition(":")[0] for line in inapplicable_attacks(whole)}
    federate(whole, data, tmp_path / "out")
    experiment = attack_experiment(whole)
    quick = [a for a in experiment.attacks if a.name != "inverting_gradients"]
    attack_uploads(
        replace(experiment, attacks=tuple(quick)),
        tmp_path / "out" / "uploads",
        tmp_path / "run",
        device="cpu",
    )
    found = rows(tmp_path / "run")
    refused = set(found[found["status"] == "unsupported"]["attack"])
    assert refused == foreseen - {"inverting_gradients"}


def test_an_engine_that_cannot_work_is_told_before_the_training(
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options_of_slurm = ["--attack.engine", "local", "--attack.partition", "gpu"]
    assert command(tmp_path, data, GOOD, *options_of_slurm) == 2
    assert "partition" in capsys.readouterr().err
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    kinds: list[Any] = ["ray", "slurm"]
    for kind in kinds:
        with pytest.raises(UserError, match=kind.capitalize() if kind == "slurm" else kind):
            check_campaign(config(), data, tmp_path / "out", by=EngineConfig(kind=kind))
    assert not (tmp_path / "out").exists()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """`--threads 1` below is for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attacked_by(root: Path, out: str, *options: str, attacks: Sequence[Mapping[str, str]]) -> int:
    """`mjp federate` of a small federation with these attacks; its exit code."""
    write_json(root / "config.yaml", content(attacks=attacks))  # JSON is YAML
    argv = [str(root / "config.yaml"), "--data", str(images(root / "data"))]
    argv += ["--out", str(root / out), "--device", "cpu", "--threads", "1", *options]
    return main(["federate", *argv])


@pytest.mark.nightly
def test_workers_attack_what_was_recorded(tmp_path: Path) -> None:
    assert attacked_by(tmp_path, "here", attacks=ALL) == 0
    shutil.copytree(tmp_path / "here", tmp_path / "two", ignore=shutil.ignore_patterns("attack"))
    (tmp_path / "two" / "rounds.png").unlink()
    assert attacked_by(tmp_path, "two", *WORKERS, attacks=ALL) == 0
    same_rows(tmp_path / "here" / "attack", tmp_path / "two" / "attack")
    log = (tmp_path / "two" / "attack" / "log.jsonl").read_text()
    assert "engine local, 2 worker(s)" in log
    assert (tmp_path / "two" / "rounds.png").is_file()


def test_blocks_that_no_worker_did_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers do not know an attack that only this process has."""
    with planted(tmp_path / "trap", monkeypatch):
        monkeypatch.delenv("PYTHONPATH")
        assert attacked_by(tmp_path, "out", *WORKERS, attacks=[{"name": "trap"}]) == 3
    said = capsys.readouterr()
    assert "'trap'" in said.err
    assert not (tmp_path / "out" / "rounds.png").exists()


FRESH: dict[str, Any] = {
    "rounds": [0],
    "images": 8,
    "probes": [{"batch": 4, "uploads": 3, "partners": "fresh"}],
}


def recorded(out: Path) -> dict[int, list[tuple[str, ...]]]:
    """The images of every batch, by round."""
    found: dict[int, list[tuple[str, ...]]] = {}
    for path in sorted((out / "uploads").glob("*.json")):
        header = json.loads(path.read_text())
        truth = TruthFile(path.parent / "truth" / f"{path.stem}.safetensors")
        found.setdefault(header["round"], []).append(truth.image_ids)
    return found


def test_a_probe_with_fresh_partners_cuts_its_batches_anew(tmp_path: Path) -> None:
    found = recorded(run(tmp_path, record=FRESH))
    assert list(found) == [0, 1, 2]
    everything = {image for batch in found[0] for image in batch}
    assert len(everything) == 8
    for batches in found.values():
        assert [len(batch) for batch in batches] == [4, 4]
        assert {image for batch in batches for image in batch} == everything
    assert len({frozenset(map(frozenset, batches)) for batches in found.values()}) == 3


def test_its_uploads_are_attacked_together(tmp_path: Path) -> None:
    """What needs the same images in each does not apply."""
    out = run(tmp_path, record=FRESH)
    attacks = [
        {"name": "masked_span"},
        {"name": "multi_round", "options": {"uploads": 2}},
    ]
    experiment = load_experiment({"name": "recorded", "block": 4, "attacks": attacks})
    attack_uploads(experiment, out / "uploads", tmp_path / "attacked", device="cpu")
    by_attack = {entry["attack"]: entry for entry in cells(tmp_path / "attacked")}
    assert by_attack["masked_span"]["partners"] == "fresh"
    found = rows(tmp_path / "attacked", [by_attack["masked_span"]["run_id"]])
    places = found.loc[found["metric"] == "matched_place", "value"]
    assert sorted(places) == [0, 0, 1, 1, 2, 2, 3, 3]  # within each of the round's two batches
    refused = rows(tmp_path / "attacked", [by_attack["multi_round"]["run_id"]])
    assert refused["reason"].str.contains("shuffles").all()


CLIENT = {"batch": 3, "lora": {"rank": 2, "targets": ["qkv", "fc1"]}}
MATCHING = [
    {"name": "patch_gradient"},
    {"name": "inverting_gradients", "options": {"steps": 2}},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("federation"), client=CLIENT)


def test_only_adapters_and_the_head_move(finished: Path) -> None:
    before = task(finished.parent, client=CLIENT).initial_weights()
    after = load_model(checkpoint=finished / "model.safetensors")
    assert after.adapters == LowRank(2, ("qkv", "fc1"))
    moved = {
        name for name, weight in after.named_parameters() if not torch.equal(weight, before[name])
    }
    assert moved == {name for name in before if "lora_" in name or name.startswith("head.")}


def test_whole_uploads_of_the_adapters_are_recorded(finished: Path) -> None:
    uploads = UploadFolder(finished / "uploads").entries()
    sent = task(finished.parent, client=CLIENT).model
    names = {name for name, _ in sent.named_parameters() if "lora_" in name}
    assert len(uploads) == 4
    for upload in uploads:
        assert set(upload.names()) == names | {"head.weight", "head.bias"}
        assert not upload.header.partial
        assert upload.header.recipe["lora"] == "{rank: 2, targets: [qkv, fc1]}"


def test_recorded_uploads_are_attacked_with_their_adapters(finished: Path, tmp_path: Path) -> None:
    experiment = load_experiment({"name": "recorded", "attacks": MATCHING})
    attack_uploads(experiment, finished / "uploads", tmp_path, device="cpu")
    found = rows(tmp_path).groupby("attack")
    (reason,) = set(found.get_group("patch_gradient")["reason"])
    assert "low-rank" in reason
    assert set(found.get_group("inverting_gradients")["status"]) == {"ok"}


def test_tables_and_charts_name_it_as_a_defence(finished: Path, tmp_path: Path) -> None:
    text = defence_text(plain(config(client=CLIENT)))
    assert text == "lora {rank: 2, targets: [qkv, fc1]}"
    assert family_and_strength(text)[0] == "withheld"
    experiment = load_experiment({"name": "recorded", "attacks": [{"name": "mean_image"}]})
    attack_uploads(experiment, finished / "uploads", tmp_path, device="cpu")
    (client, *_) = clients_of(load_runs([tmp_path]).lines)
    assert client.defended
    assert client.name == "plain, lora {rank: 2, targets: [qkv, fc1]}"


def test_what_will_not_apply_is_said_before_training() -> None:
    lines = inapplicable_attacks(config(client=CLIENT, attacks=MATCHING))
    assert [line.partition(":")[0] for line in lines] == ["patch_gradient"]
