"""From options to a running engine; an engine's packages are imported where it is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.coordinator import Engine
from mjp_privacy.experiment.engines.options import EngineConfig, visible_gpus, workers_here


def check_engine(config: EngineConfig) -> None:
    """Raise where the packages or programs of this engine are not on this machine."""
    if config.kind == "ray":
        from mjp_privacy.experiment.engines.ray_connection import INSTALL

        if find_spec("ray") is None:
            raise UserError(INSTALL)
    if config.kind == "slurm":
        from mjp_privacy.experiment.engines.slurm import require_submitit
        from mjp_privacy.experiment.engines.slurm_queue import require_slurm

        require_slurm()
        require_submitit()


def start_engine(config: EngineConfig, job_file: Path, threads: int, on_gpu: bool) -> Engine:
    """The engine that does the tasks of this job.

    threads  CPU threads of each worker
    on_gpu   whether gradients are computed on GPUs
    """
    if config.kind == "ray":
        from mjp_privacy.experiment.engines.ray_cluster import RayEngine

        return RayEngine.of(config, job_file, threads, on_gpu)
    if config.kind == "slurm":
        from mjp_privacy.experiment.engines.slurm import SlurmEngine

        return SlurmEngine.of(config, job_file, threads, on_gpu)
    from mjp_privacy.experiment.engines.local import LocalEngine

    gpus = visible_gpus() if on_gpu else ()
    return LocalEngine(job_file, workers_here(config, on_gpu), threads, gpus)
