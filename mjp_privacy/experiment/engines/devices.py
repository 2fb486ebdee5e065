"""Where a command computes, and where its workers do."""

from __future__ import annotations

import torch

from mjp_privacy.core.machine import pick_device
from mjp_privacy.experiment.engines.options import EngineConfig


def devices(name: str, engine: EngineConfig) -> tuple[torch.device, torch.device]:
    """The device of this process and that of the workers, for --device auto, cpu or cuda.

    Jobs are often submitted from a machine without a GPU. With Slurm the options alone decide
    where tasks compute: auto takes GPUs if gpus_per_task asks for them. This process, which only
    looks at weights, takes its CPU.
    """
    if engine.kind == "slurm" and name == "auto":
        name = "cuda" if engine.gpus_per_task else "cpu"
    if engine.kind == "slurm" and name == "cuda":
        return pick_device("cpu"), torch.device("cuda")
    device = pick_device(name)
    return device, device
