"""From options to a running engine: where it computes and how many work. An engine's packages are
imported where it is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from mjp_privacy.core.machine import free_bytes, pick_device
from mjp_privacy.experiment.engines.coordinator import Engine
from mjp_privacy.experiment.engines.options import (
    EngineConfig,
    check_engine,
    visible_gpus,
    workers_here,
)
from mjp_privacy.experiment.plan import Forecast, Plan

SMALL = 40
"""Units (an image in a cell) below which starting another process takes longer than the work."""
OF_A_WORKER = 700 << 20  # bytes that torch, timm and the metrics take in each process
COPIES = 12  # of a model's float32 weights: variants, float64, gradients of a block


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


def settled(
    config: EngineConfig, plan: Plan, foreseen: Forecast, device: str
) -> tuple[EngineConfig, str]:
    """The engine that `auto` stands for, and what is said of it: a worker for each core or GPU, as
    far as there is work and memory for them; this process where that is one."""
    if config.kind not in ("auto", "local"):
        return config, ""
    on_gpu = torch.device(device).type == "cuda"
    wanted = workers_here(config, on_gpu)
    tasks = sum(len(blocks) * len(plan.groups(name)) for name, blocks in plan.blocks.items())
    number, remark = min(wanted, max(1, tasks)), ""
    free = free_bytes(torch.device("cpu"))
    if config.workers is None and free is not None and not on_gpu:
        each = OF_A_WORKER + COPIES * foreseen.largest_model
        if (fit := max(1, free // each)) < number:
            remark = (
                f"memory holds {fit} of {number} workers ({free / 2**30:.1f} GiB free, about "
                f"{each / 2**30:.1f} GiB each): {fit} start; --workers asks for another number"
            )
            number = fit
    small = config.workers is None and plan.units < SMALL
    if config.kind == "auto" and (number == 1 or small):
        return EngineConfig("here"), remark
    return replace(config, kind="local", workers=number), remark


def start_engine(config: EngineConfig, job_file: Path, on_gpu: bool) -> Engine:
    """The engine that does the tasks of this job; on_gpu: whether gradients are computed there."""
    check_engine(config)
    if config.kind == "ray":
        from mjp_privacy.experiment.engines.ray import RayEngine

        return RayEngine.of(config, job_file, on_gpu)
    if config.kind == "slurm":
        from mjp_privacy.experiment.engines.slurm import SlurmEngine

        return SlurmEngine.of(config, job_file, on_gpu)
    from mjp_privacy.experiment.engines.local import LocalEngine

    gpus = visible_gpus() if on_gpu else ()
    return LocalEngine(job_file, workers_here(config, on_gpu), gpus)
