"""Which engine works, with how many workers and where; what cannot be had is refused at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(
    ("engine", "program", "package", "named"),
    [
        ("ray", "here", None, r"mjp-privacy\[ray\]"),
        ("slurm", "here", None, r"mjp-privacy\[slurm\]"),
        ("slurm", None, None, r"sbatch.*slurm-here"),
        (EngineConfig("slurm", minutes=2), "here", "here", "minutes"),
        (EngineConfig("slurm", gpus_per_task=0.5), "here", "here", "gpus_per_task"),
    ],
)
def test_what_is_not_installed_or_not_possible_is_named(
    engine: Any, program: Any, package: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong on the command line alone stands in tests/inputs."""
    monkeypatch.setattr(options, "find_spec", lambda name: package)
    monkeypatch.setattr("shutil.which", lambda name: program)
    with pytest.raises(UserError, match=named):
        engine_config(engine)


def test_options_go_before_a_sites_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
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
        ({}, AUTO, 9, ("local", 4)),
        ({}, AUTO, 1, ("here", None)),  # a small run
        ({"cores": 1}, AUTO, 9, ("here", None)),
        ({"cores": 64}, AUTO, 9, ("local", 15)),  # as many as there are tasks
        ({}, EngineConfig("auto", 2), 1, ("local", 2)),  # asked for
        ({}, LOCAL, 1, ("local", 4)),
        ({"gpus": ("0", "1")}, AUTO, 9, ("local", 2)),
        ({"free": None}, AUTO, 9, ("local", 4)),
        ({}, EngineConfig("ray"), 9, ("ray", None)),  # a cluster's own affair
        ({"free": 5 * EACH // 2}, AUTO, 9, ("local", 2)),  # memory holds fewer
        ({"free": 1}, AUTO, 9, ("here", None)),
        ({"free": 1}, EngineConfig("local", 4), 9, ("local", 4)),  # who asks gets it
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
