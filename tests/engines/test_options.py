"""Which engine works, with how many workers and where; what cannot be had is refused at once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines import options
from mjp_privacy.experiment.engines.options import (
    COPIES,
    OF_A_WORKER,
    EngineConfig,
    devices,
    engine_config,
    settled,
)
from mjp_privacy.experiment.plan import Forecast, make_plan
from tests.helpers.runs import tiny

ROOT = Path(__file__).parents[2]
REFUSED = [
    (["here", "--workers", "2"], "workers"),
    (["local", "--partition", "gpu"], "partition"),
    (["slurm", "--address", "head:6379"], "address"),
    (["lokal"], "local"),
    (["local", "--workers", "0"], "workers"),
    (["nowhere.yaml"], "nowhere.yaml"),
    (["flat.yaml"], "engine:"),
    (["slurm", "--minutes", "2"], "minutes"),
    (["slurm", "--gpus-per-task", "0.5"], "gpus_per_task"),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, submitit and Slurm are here."""
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("words", "name"), REFUSED)
def test_what_cannot_be_is_refused(
    words: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat.yaml").write_text(json.dumps({"kind": "slurm"}))
    assert main(["attack", "demo", "--engine", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert name in said
    assert not (tmp_path / "results").exists()


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    for kind, program, named in (
        ("ray", "here", r"mjp-privacy\[ray\]"),
        ("slurm", "here", r"mjp-privacy\[slurm\]"),
        ("slurm", None, r"sbatch.*slurm-here"),
    ):
        monkeypatch.setattr("shutil.which", lambda name, found=program: found)
        with pytest.raises(UserError, match=named):
            engine_config(kind)


@pytest.mark.usefixtures("installed")
def test_options_go_before_a_sites_file() -> None:
    path = ROOT / "configs" / "engines" / "slurm.yaml"
    engine = engine_config(EngineConfig(str(path), workers=3, partition="gpu"))
    assert (engine.kind, engine.workers, engine.partition) == ("slurm", 3, "gpu")
    assert engine_config(engine) == engine


# how many -----------------------------------------------------------------------------------------


AUTO, LOCAL = EngineConfig("auto"), EngineConfig("local")
WEIGHTS = 100 << 20
EACH = OF_A_WORKER + COPIES * WEIGHTS
FOUR = {"cores": 4, "gpus": (), "free": 64 << 30}
"""A machine of four cores, without a GPU, with 64 GiB of free memory."""


@pytest.mark.parametrize(
    ("machine", "engine", "images", "becomes"),
    [
        pytest.param({}, AUTO, 9, ("local", 4), id="a worker a core"),
        pytest.param({}, AUTO, 1, ("here", None), id="a small run"),
        pytest.param({"cores": 1}, AUTO, 9, ("here", None), id="one core"),
        pytest.param({"cores": 64}, AUTO, 9, ("local", 15), id="as many as there are tasks"),
        pytest.param({}, EngineConfig("auto", 2), 1, ("local", 2), id="asked for"),
        pytest.param({}, LOCAL, 1, ("local", 4), id="local is always local"),
        pytest.param({"gpus": ("0", "1")}, AUTO, 9, ("local", 2), id="a worker a GPU"),
        pytest.param({"free": None}, AUTO, 9, ("local", 4), id="memory is not known"),
        pytest.param({}, EngineConfig("ray"), 9, ("ray", None), id="a cluster's own affair"),
        pytest.param({"free": 5 * EACH // 2}, AUTO, 9, ("local", 2), id="memory holds fewer"),
        pytest.param({"free": 1}, AUTO, 9, ("here", None), id="memory holds one"),
        pytest.param({"free": 1}, EngineConfig("local", 4), 9, ("local", 4), id="who asks"),
    ],
)
def test_how_many_work(
    machine: dict[str, Any],
    engine: EngineConfig,
    images: int,
    becomes: tuple[str, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In ten cells of two models."""
    given = FOUR | machine
    monkeypatch.setattr(options, "cores", lambda: given["cores"])
    monkeypatch.setattr(options, "visible_gpus", lambda: given["gpus"])
    monkeypatch.setattr(options, "free_bytes", lambda device: given["free"])
    records = [ImageRecord(f"{number}.png") for number in range(images)]
    source: Any = SimpleNamespace(recorded=False, records=lambda model: records)
    plan, device = make_plan(load_experiment(tiny()), source), "cuda" if given["gpus"] else "cpu"
    config, remark = settled(engine, plan, Forecast(largest_model=WEIGHTS), device)
    assert (config.kind, config.workers) == becomes
    is_short = bool(machine.get("free")) and engine == AUTO
    assert is_short == bool(remark)
    assert not is_short or (f"{config.workers or 1} of 4" in remark and "--workers" in remark)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_where_the_command_and_its_workers_compute(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's jobs where the options say, all others where the command does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for name, gpus, there in [
        ("auto", None, cpu),
        ("auto", 0, cpu),
        ("auto", 1, cuda),
        ("cuda", None, cuda),
        ("cpu", 1, cpu),
    ]:
        assert devices(name, EngineConfig("slurm", gpus_per_task=gpus)) == (cpu, there)
    here = cuda if has_gpu else cpu
    assert devices("auto", LOCAL) == (here, here)
    if not has_gpu:
        with pytest.raises(UserError, match="cuda"):
            devices("cuda", LOCAL)
