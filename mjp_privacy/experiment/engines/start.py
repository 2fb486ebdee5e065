"""From options to a running engine; an engine's packages are imported where it is asked for."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.experiment.engines.coordinator import Engine
from mjp_privacy.experiment.engines.options import EngineConfig, visible_gpus, workers_here


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
