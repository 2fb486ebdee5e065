"""Where a command and its workers compute, on a machine with a GPU and on one without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mjp_privacy.experiment.engines.devices import devices
from mjp_privacy.experiment.provenance import provenance

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.options import EngineConfig, engine_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[False, True], ids=["no GPU here", "a GPU here"])
def has_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize(
    ("name", "gpus", "there"),
    [
        ("auto", None, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 1, "cuda"),
        ("cuda", None, "cuda"),
        ("cuda", 0, "cuda"),
        ("cpu", 1, "cpu"),
    ],
)
def test_slurms_tasks_compute_where_the_options_say(
    has_gpu: bool, name: str, gpus: float | None, there: str
) -> None:
    engine = EngineConfig("slurm", gpus_per_task=gpus)
    assert devices(name, engine) == (torch.device("cpu"), torch.device(there))


def test_others_compute_where_the_command_does(has_gpu: bool) -> None:
    device = torch.device("cuda" if has_gpu else "cpu")
    assert devices("auto", EngineConfig("local")) == (device, device)
    if not has_gpu:
        with pytest.raises(UserError, match="--device cuda: no CUDA device here"):
            devices("cuda", EngineConfig())


def test_a_gpu_that_is_not_here_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert provenance(torch.device("cuda"), 1)["device"] == "cuda"


def test_the_sites_example_can_be_taken_as_it_is() -> None:
    path = str(ROOT / "configs" / "engines" / "slurm.yaml")
    engine = engine_config(path, {"workers": 3, "partition": "gpu"})
    assert (engine.kind, engine.workers, engine.partition) == ("slurm", 3, "gpu")
