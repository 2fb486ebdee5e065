"""Gives chunks of tasks to Slurm as job arrays, by way of submitit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.slurm_chunk import Chunk
from mjp_privacy.experiment.engines.slurm_queue import outside_of_jobs
from mjp_privacy.experiment.job import Task, thread_environment

MINUTES = 60  # time limit of a task, where none is given
REQUEUES = 10**6  # submitit's own limit, which would end a task that makes progress


@dataclass(frozen=True)
class Element:
    """One task of an array as it was submitted."""

    id: str  # such as "1234_5"
    tasks: Sequence[Task]
    log: Path  # what it writes to stderr
    result: Path  # is there when it ended by itself

    @property
    def array(self) -> str:
        """The id of its array."""
        return self.id.partition("_")[0]


class Refused(Exception):
    """sbatch did not take an array, and says why."""


@dataclass(frozen=True)
class Submission:
    """What all arrays of a run have in common: Submission(...).array(chunks, at_once=8)"""

    job_file: Path
    name: str  # of its jobs
    config: EngineConfig
    threads: int
    on_gpu: bool

    @property
    def folder(self) -> Path:
        """Where submitit writes; tasks stop when it is gone."""
        return self.job_file.parent / "slurm" / self.name

    def array(self, chunks: Sequence[Sequence[Task]], at_once: int) -> list[Element]:
        """Submit an array with a task for each chunk; at_once: how many run at the same time."""
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        with outside_of_jobs():
            executor = SlurmExecutor(self.folder, max_num_timeout=REQUEUES)
            executor.update_parameters(**self._parameters(at_once))
            try:
                jobs = executor.submit_array([self._chunk(chunk) for chunk in chunks])
            except (FailedJobError, FailedSubmissionError) as error:
                raise Refused(_complaint(str(error))) from error
        return [
            Element(job.job_id, chunk, job.paths.stderr, job.paths.result_pickle)
            for job, chunk in zip(jobs, chunks, strict=True)
        ]

    @property
    def _minutes(self) -> int:
        return self.config.minutes or MINUTES

    def _chunk(self, tasks: Sequence[Task]) -> Chunk:
        numbers = [(task.model, task.block, task.attempt) for task in tasks]
        return Chunk(str(self.job_file), str(self.folder), numbers, self._minutes)

    def _parameters(self, at_once: int) -> Mapping[str, Any]:
        """What submitit writes into the batch script."""
        config = self.config
        gpus = (1 if config.gpus_per_task is None else int(config.gpus_per_task)) * self.on_gpu
        variables = thread_environment(self.threads).items()
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables]
        memory = config.memory_gb
        return {
            "job_name": self.name,
            "partition": config.partition,
            "account": config.account,
            "qos": config.qos,
            "time": self._minutes,
            "mem": None if memory is None else f"{round(memory * 1024)}MB",
            "gpus_per_node": gpus or None,
            "cpus_per_task": self.threads,
            "srun_args": [f"--cpus-per-task={self.threads}"],  # srun does not take sbatch's
            "array_parallelism": at_once,
            "setup": [*exports, *config.setup],
            "wckey": None,
            "additional_parameters": {"requeue": True, **config.slurm_options},
        }


def chunks_of(tasks: Sequence[Task], size: int) -> Iterator[list[Task]]:
    """The tasks in groups of consecutive blocks of one model, so that it is loaded once a group.

    A task that is given again is alone: whatever killed its worker is not to take others along.
    """
    for _, group in groupby(tasks, key=lambda task: (task.model, task.attempt)):
        same = list(group)
        step = size if same[0].attempt == 1 else 1
        for start in range(0, len(same), step):
            yield same[start : start + step]


def _complaint(text: str) -> str:
    """The last thing that sbatch said: "Batch job submission failed: Invalid account"."""
    said = [line for line in text.splitlines() if "error:" in line] or text.splitlines() or [""]
    return said[-1].rpartition("error:")[2].strip()
