"""What would stop the attacks is told before a round is trained, and costs no training after."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines import options
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.federation import task as tasks
from mjp_privacy.federation.campaign import attack_experiment, check_campaign, inapplicable_attacks
from mjp_privacy.federation.rounds import federate
from tests.helpers.federations import MJP, MODEL, config, content, images, run
from tests.helpers.runs import rows

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


WRONG = [
    ({"name": "patch_gradeint"}, "attacks.0: Unknown attack 'patch_gradeint'. Did you mean"),
    ({"name": "multi_round", "options": {"upload": 6}}, "Did you mean uploads?"),
    ({"name": "multi_round", "options": {"uploads": "6"}}, "should be a valid integer; got '6'"),
    ({"name": "multi_round", "options": {"uploads": True}}, "a valid integer; got True"),
    ({"name": "multi_round", "options": {"uploads": 10**9}}, "less than or equal to 10000"),
    ({"name": "masked_span", "options": {"prior": "nowhere"}}, "prior 'nowhere': expected"),
    ({"name": "patch_gradient", "seconds": -1}, "attacks.0.seconds: Input should be greater"),
    ({"name": "patch_gradient", "label": "a\x1b[2Jb"}, "should hold no invisible characters"),
]


@pytest.mark.parametrize(("attack", "said"), WRONG)
def test_a_wrong_attack_is_refused_before_any_image_is_read(
    tmp_path: Path,
    data: Path,
    attack: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks.Task, "from_config", lambda *_, **__: pytest.fail("it began"))
    assert command(tmp_path, data, [attack]) == 2
    error = capsys.readouterr().err
    assert said in error
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
    assert "finished already; nothing to do" in capsys.readouterr().err
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
    with pytest.raises(UserError, match=r"of another config: server\.lr was 0\.1 and is 0\.2"):
        run(tmp_path, server={"optimizer": "sgd", "lr": 0.2})


@pytest.mark.parametrize(
    ("kind", "missing", "said"),
    [
        ("ray", "ray", "--engine ray: expected the package ray, which is not installed"),
        ("slurm", "sbatch", "expected Slurm's commands on this machine; `"),
    ],
)
def test_an_engine_that_is_not_there_is_told(
    tmp_path: Path, data: Path, kind: Any, missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError) as caught:
        check_campaign(config(), data, tmp_path / "out", by=EngineConfig(kind=kind))
    assert said in str(caught.value), missing


def test_folders_are_told(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UserError, match="lies inside --data"):
        check_campaign(config(), data, data / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "attack").write_text("mine")
    with pytest.raises(UserError, match="attack: expected a folder for the attacks, or nothing"):
        check_campaign(config(), data, tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"--out .*file.*: expected a folder"):
        check_campaign(config(), data, tmp_path / "file")


# foreseen -----------------------------------------------------------------------------------------


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
