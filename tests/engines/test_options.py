"""Which engine works, with how many workers and where; what cannot be had is refused at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines import options, start
from mjp_privacy.experiment.engines.options import EngineConfig, check_engine, engine_config
from mjp_privacy.experiment.engines.start import COPIES, OF_A_WORKER, devices, settled
from mjp_privacy.experiment.plan import Forecast, Plan, make_plan
from tests.helpers.runs import tiny

ROOT = Path(__file__).parents[2]
CASES: dict[str, tuple[list[str], str]] = {
    "workers of none": (["--engine", "here", "--workers", "2"], "workers"),
    "a partition of this machine": (["--engine", "local", "--partition", "gpu"], "partition"),
    "an address of Slurm": (["--engine", "slurm", "--address", "head:6379"], "address"),
    "no such engine": (["--engine", "lokal"], "local"),
    "no workers": (["--engine", "local", "--workers", "0"], "workers"),
    "no such file": (["--engine", "nowhere.yaml"], "nowhere.yaml"),
    "too few minutes": (["--engine", "slurm", "--minutes", "2"], "minutes"),
    "half a GPU of Slurm": (["--engine", "slurm", "--gpus-per-task", "0.5"], "gpus_per_task"),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, submitit and Slurm are here."""
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, name = CASES[case]
    assert main(["attack", "demo", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert name in said
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("kind", ["ray", "slurm"])
def test_what_is_not_installed_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: name)
    with pytest.raises(UserError, match=rf"mjp-privacy\[{kind}\]"):
        check_engine(EngineConfig(kind))
    if kind == "slurm":
        monkeypatch.setattr("shutil.which", lambda name: None)
        with pytest.raises(UserError, match=r"sbatch.*slurm-here"):
            check_engine(EngineConfig(kind))


def test_a_sites_file_and_what_goes_before_it(tmp_path: Path) -> None:
    path = ROOT / "configs" / "engines" / "slurm.yaml"
    engine = engine_config(str(path), {"workers": 3, "partition": "gpu"})
    assert (engine.kind, engine.workers, engine.partition) == ("slurm", 3, "gpu")
    (tmp_path / "site.yaml").write_text(json.dumps({"kind": "slurm"}))
    with pytest.raises(UserError, match="engine:"):
        engine_config(str(tmp_path / "site.yaml"), {})


# how many -----------------------------------------------------------------------------------------


@dataclass
class Images:
    """A source that has so many images."""

    count: int

    def records(self, model: str) -> list[Any]:
        return [f"{number}.png" for number in range(self.count)]


@dataclass(frozen=True)
class Machine:
    """A machine of so many cores, GPUs and GiB of free memory."""

    cores: int = 4
    gpus: tuple[str, ...] = ()
    free: float | None = 64.0

    def settle(
        self, engine: EngineConfig, images: int, patch: pytest.MonkeyPatch, largest: int = 0
    ) -> tuple[EngineConfig, str]:
        """What an engine becomes here for so many images in ten cells of two models."""
        patch.setattr(options, "cores", lambda: self.cores)
        patch.setattr(options, "visible_gpus", lambda: self.gpus)
        free = None if self.free is None else int(self.free * 2**30)
        patch.setattr(start, "free_bytes", lambda device: free)
        plan: Plan = make_plan(load_experiment(tiny()), Images(images))  # type: ignore[arg-type]
        foreseen = Forecast((), {}, largest)
        return settled(engine, plan, foreseen, "cuda" if self.gpus else "cpu")


AUTO, LOCAL = EngineConfig("auto"), EngineConfig("local")


@pytest.mark.parametrize(
    ("machine", "engine", "images", "becomes"),
    [
        pytest.param(Machine(), AUTO, 9, ("local", 4), id="a worker a core"),
        pytest.param(Machine(), AUTO, 1, ("here", None), id="a small run"),
        pytest.param(Machine(cores=1), AUTO, 9, ("here", None), id="one core"),
        pytest.param(Machine(cores=64), AUTO, 9, ("local", 15), id="as many as there are tasks"),
        pytest.param(Machine(), EngineConfig("auto", 2), 1, ("local", 2), id="asked for"),
        pytest.param(Machine(), LOCAL, 1, ("local", 4), id="local is always local"),
        pytest.param(Machine(gpus=("0", "1")), AUTO, 9, ("local", 2), id="a worker a GPU"),
        pytest.param(Machine(gpus=("0",)), AUTO, 9, ("here", None), id="one GPU"),
        pytest.param(Machine(free=None), AUTO, 9, ("local", 4), id="memory is not known"),
        pytest.param(Machine(), EngineConfig("here"), 9, ("here", None), id="here"),
        pytest.param(Machine(), EngineConfig("ray"), 9, ("ray", None), id="a cluster's own affair"),
    ],
)
def test_how_many_work(
    machine: Machine,
    engine: EngineConfig,
    images: int,
    becomes: tuple[str, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, remark = machine.settle(engine, images, monkeypatch)
    assert (config.kind, config.workers) == becomes
    assert not remark


def test_where_memory_does_not_hold_them_fewer_start_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = 100 << 20
    each = (OF_A_WORKER + COPIES * weights) / 2**30
    machine = Machine(free=2.5 * each)
    config, remark = machine.settle(AUTO, 9, monkeypatch, weights)
    assert (config.kind, config.workers) == ("local", 2)
    assert "2 of 4" in remark
    assert "--workers" in remark
    config, remark = machine.settle(EngineConfig("local", 4), 9, monkeypatch, weights)
    assert (config.workers, remark) == (4, "")  # who asks for a number gets it
    config, remark = Machine(free=0.1).settle(AUTO, 9, monkeypatch, weights)
    assert config.kind == "here"
    assert "1 of 4" in remark


# where --------------------------------------------------------------------------------------------


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
