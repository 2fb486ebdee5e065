"""Which engine works, with how many workers and where; what cannot be had is refused at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines import options, start
from mjp_privacy.experiment.engines.options import EngineConfig, engine_config
from mjp_privacy.experiment.engines.start import COPIES, OF_A_WORKER, devices, settled
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


@dataclass
class Images:
    """A source that has so many images."""

    count: int
    recorded: bool = False

    def records(self, model: str) -> list[ImageRecord]:
        return [ImageRecord(f"{number}.png") for number in range(self.count)]


@dataclass(frozen=True)
class Machine:
    """A machine of so many cores, GPUs and GiB of free memory."""

    cores: int = 4
    gpus: tuple[str, ...] = ()
    free: float | None = 64.0

    def settle(
        self, engine: EngineConfig, images: int, patch: pytest.MonkeyPatch, largest: int = 0
    ) -> tuple[str, int | None, str]:
        """What an engine becomes here for so many images in ten cells of two models."""
        patch.setattr(options, "cores", lambda: self.cores)
        patch.setattr(options, "visible_gpus", lambda: self.gpus)
        free = None if self.free is None else int(self.free * 2**30)
        patch.setattr(start, "free_bytes", lambda device: free)
        plan = make_plan(load_experiment(tiny()), Images(images))  # type: ignore[arg-type]
        device = "cuda" if self.gpus else "cpu"
        config, remark = settled(engine, plan, Forecast(largest_model=largest), device)
        return config.kind, config.workers, remark


AUTO, LOCAL = EngineConfig("auto"), EngineConfig("local")
WEIGHTS = 100 << 20
EACH = (OF_A_WORKER + COPIES * WEIGHTS) / 2**30


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
        pytest.param(Machine(free=None), AUTO, 9, ("local", 4), id="memory is not known"),
        pytest.param(Machine(), EngineConfig("ray"), 9, ("ray", None), id="a cluster's own affair"),
        pytest.param(Machine(free=2.5 * EACH), AUTO, 9, ("local", 2), id="memory holds fewer"),
        pytest.param(Machine(free=0.1), AUTO, 9, ("here", None), id="memory holds one"),
        pytest.param(
            Machine(free=0.1), EngineConfig("local", 4), 9, ("local", 4), id="who asks gets them"
        ),
    ],
)
def test_how_many_work(
    machine: Machine,
    engine: EngineConfig,
    images: int,
    becomes: tuple[str, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, workers, remark = machine.settle(engine, images, monkeypatch, WEIGHTS)
    assert (kind, workers) == becomes
    is_short = machine.free is not None and machine.free < 64 and engine == AUTO
    assert is_short == (f"{workers or 1} of 4" in remark and "--workers" in remark)
    assert is_short == bool(remark)


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
