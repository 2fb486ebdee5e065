"""From options to a running engine: where it computes and how many work; and the usual one, workers
of this machine, each a process. Packages of another engine are imported where it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mjp_privacy.core.machine import BESIDE, free_bytes, one_thread_environment, pick_device
from mjp_privacy.experiment.engines.coordinator import Engine, last_words
from mjp_privacy.experiment.engines.options import (
    EngineConfig,
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
    if config.kind == "ray":
        from mjp_privacy.experiment.engines.ray import RayEngine

        return RayEngine.of(config, job_file, on_gpu)
    if config.kind == "slurm":
        from mjp_privacy.experiment.engines.slurm import SlurmEngine

        return SlurmEngine.of(config, job_file, on_gpu)
    gpus = visible_gpus() if on_gpu else ()
    return LocalEngine(job_file, workers_here(config, on_gpu), gpus)


# workers of this machine ------------------------------------------------------------------------


@dataclass
class LocalEngine:
    """LocalEngine(job.path, most=2).start([0, 1])

    gpus: the CUDA devices that workers share, one after the other; none: they use the CPU
    """

    job_file: Path
    most: int
    gpus: Sequence[str] = ()
    interval: float = 0.05
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)
    _unstarted: dict[int, str] = field(default_factory=dict, init=False)

    def start(self, workers: Sequence[int]) -> None:
        """Start a process for each worker; where there is no memory for one, it is gone."""
        for number in workers:
            try:
                self._processes[number] = self._started(number)
            except OSError as error:
                self._unstarted[number] = f"worker {number} could not be started: {error}"

    def gone(self) -> Mapping[int, str]:
        """Workers whose process ended, and what those printed last that ended by themselves."""
        gone, self._unstarted = self._unstarted, {}
        for number, process in list(self._processes.items()):
            if (code := process.poll()) is None:
                continue
            del self._processes[number]
            if code >= 0:
                how = f"ended with code {code}{last_words(self._log(number))}"
            else:
                hint = ", as a system does that is out of memory" if code == -9 else ""
                how = f"was killed by signal {-code}{hint}"
            gone[number] = f"worker {number} {how}"
        return gone

    def close(self) -> None:
        """Kill the workers and wait for them."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _log(self, number: int) -> Path:
        return self.job_file.parent / f"worker-{number}.log"

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **one_thread_environment(), BESIDE: str(self.most)}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[number % len(self.gpus)]
        program = [sys.executable, "-m", "mjp_privacy.experiment.engines.process"]
        with self._log(number).open("a") as log:
            return subprocess.Popen(
                [*program, str(self.job_file), str(number)],
                stdin=subprocess.PIPE,  # its end tells the worker that this process is gone
                stdout=log,  # an attack may print what it likes
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends them
            )
