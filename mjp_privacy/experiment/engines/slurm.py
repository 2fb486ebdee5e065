"""Workers of a Slurm cluster: tasks are submitted as job arrays, by way of submitit.

    RUN/work/slurm/NAME/     what submitit writes, and the tasks' logs; NAME is the jobs' name

submitit pickles what it calls into this folder, which leaves with the run's end; the call holds
paths and numbers alone (`Chunk`). Nodes must see the run folder, the images, the weights and this
Python environment under the same paths. submitit reads states by `sacct`, which many clusters do
not have; `squeue` is asked here.

A job that is preempted or comes to its time limit is requeued and goes on with what is not
finished. One that ends otherwise is lost, and the coordinator gives its tasks again, each alone;
others go on. When the command ends, what is left of its jobs is cancelled; those of a command that
was killed are cancelled by the next one on the same folder.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from submitit import Job, SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import DelayedSubmission, clean_env

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.threads import one_thread_environment
from mjp_privacy.experiment.engines.coordinator import SHARED, Lost, last_words
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.worker import do_task
from mjp_privacy.experiment.job import Task

SHARES, MOST = 4, 16  # jobs for each worker, and tasks of a job, where no number is given
MINUTES = 60  # time limit of a job, where none is given
STARTS = 5  # times that a job may be requeued before its tasks are given again, each alone
REQUEUES = 10**6  # submitit's own limit, which raises an error that an attack may catch
GRACE = 60.0  # seconds until an answer that is not seen is taken for none; NFS may take so long
LOOKS = (2.0, 30.0)  # seconds between two questions to Slurm: soon after news, and later
LAST_BREATH = 15.0  # seconds that jobs have to stop
TIMEOUT = 60.0  # seconds that a command may take; a busy controller answers late

OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("REVOKED", "TIMEOUT", "UNKNOWN"),
}
"""States in which a job does nothing more. A preempted one may come back until Slurm has forgotten
it: it is UNKNOWN then."""
NEVER = re.compile(
    "BadConstraints|DependencyNeverSatisfied|Invalid(Account|QOS)|JobHoldMaxRequeue|"
    "Partition(Node|Time)Limit|launch failed requeued held"
)
"""Reasons for which a job would wait for ever."""
HINTS = {"TIMEOUT": " (option minutes)", "OUT_OF_MEMORY": " (option memory_gb)"}


@dataclass(frozen=True)
class Chunk:
    """What a job does: Chunk("RUN/work/job.json", "RUN/work/slurm/x", [Task(0, 3, 1)])(). submitit
    carries it to the node in a pickle file."""

    job_file: str
    folder: str  # of the submission; when it is gone, the command that gave the work is over
    tasks: Sequence[Task]
    starts: int = 1

    def __call__(self) -> None:
        """Do the tasks, one after the other."""
        for task in self.tasks:
            if Path(self.folder).is_dir():
                do_task(self.job_file, *task.key, task.attempt)

    def checkpoint(self) -> DelayedSubmission:
        """What goes on after a preemption or the time limit; called by submitit on a signal."""
        if self.starts >= STARTS:
            sys.exit(f"it was not done in {STARTS} starts: give it more time (option minutes)")
        return DelayedSubmission(replace(self, starts=self.starts + 1))


@dataclass
class SlurmEngine:
    """SlurmEngine.of(config, job.path, on_gpu=False).submit(tasks)"""

    job_file: Path
    name: str  # of the jobs
    config: EngineConfig
    on_gpu: bool
    longest: int  # jobs that an array may have
    interval: float = 0.5
    _waiting: list[list[Task]] = field(default_factory=list, init=False)
    _jobs: list[tuple[Job[None], list[Task]]] = field(default_factory=list, init=False)
    """Those that are not known to be over."""
    _states: Mapping[str, tuple[str, str]] = field(default_factory=dict, init=False)
    _looked: float = field(default=0.0, init=False)
    _news: float = field(default=0.0, init=False)  # when something was last seen to change

    @classmethod
    def of(cls, config: EngineConfig, job_file: Path, on_gpu: bool) -> SlurmEngine:
        """The engine of these options; jobs of an earlier command are cancelled."""
        if "%" in str(job_file):
            raise UserError(
                f"--engine slurm: expected a run folder without % in its path, got "
                f"{job_file.parent.parent}; Slurm takes it for a pattern. Give another --out."
            )
        for folder in (job_file.parent / "slurm").glob("mjp-*"):
            cancel(folder.name)
        run = re.sub(r"[^A-Za-z0-9]+", "-", job_file.parent.parent.name)[:40]
        settings = output("scontrol", "show", "config") or ""
        longest = re.search(r"^MaxArraySize\s*=\s*(\d+)", settings, re.MULTILINE)
        name = f"mjp-{run}-{secrets.token_hex(4)}"
        return cls(job_file, name, config, on_gpu, max(1, int(longest[1])) if longest else 1)

    @property
    def folder(self) -> Path:
        """Where submitit writes; jobs stop when it is gone."""
        return self.job_file.parent / "slurm" / self.name

    def submit(self, tasks: Sequence[Task]) -> None:
        """Submit the tasks in chunks, as far as there is room for them."""
        workers, size = self.config.workers, self.config.blocks_per_task
        share = len(tasks) / (SHARES * workers) if workers else 1
        self._waiting += chunks_of(tasks, size or max(1, min(MOST, math.ceil(share))))
        self._send()

    def lost(self) -> Sequence[Lost]:
        """Tasks whose job is over, also of those that did answer; Slurm is asked now and then."""
        now = time.monotonic()
        pause = min(LOOKS[1], max(LOOKS[0], (now - self._news) / 4))
        if not self._jobs or now - self._looked < pause:
            return []
        self._looked = now
        if (states := states_of(self.name)) is None:
            return []
        if states != self._states:
            self._states, self._news = states, now
        lost, jobs = [], self._jobs
        self._jobs = []
        for job, tasks in jobs:
            # those that were cancelled before they started have one state, their array's
            array, unknown = job.job_id.partition("_")[0], ("UNKNOWN", "")
            state, reason = states.get(job.job_id) or states.get(array) or unknown
            if state == "PENDING" and NEVER.fullmatch(reason):
                output("scancel", "--quiet", job.job_id)
                words = f"would wait for ever ({reason})"
            elif state in OVER:
                words = f"ended as {state}{HINTS.get(state, '')}{last_words(job.paths.stderr)}"
                if state == "FAILED" and not job.paths.stderr.exists():
                    words += f": no log in {self.folder}, which its node may not see: {SHARED}"
            else:
                self._jobs.append((job, tasks))
                continue
            wait = GRACE if state in ("UNKNOWN", "COMPLETED") else 0.0
            lost += [Lost(task, f"a Slurm task {words}", wait) for task in tasks]
        self._send()
        return lost

    def close(self) -> None:
        """Cancel what is queued and what runs, and wait for it a little."""
        self._waiting.clear()
        if not self._jobs:
            return
        time.sleep(self.interval)  # whoever has done all of its tasks ends by itself
        if not all(job.paths.result_pickle.exists() for job, _ in self._jobs):
            cancel(self.name)
        deadline = time.monotonic() + LAST_BREATH
        while time.monotonic() < deadline:
            states = states_of(self.name)
            if states is not None and all(state in OVER for state, _ in states.values()):
                return
            time.sleep(self.interval)
        cancel(self.name)

    def _send(self) -> None:
        """Submit what is waiting, as long as fewer jobs are queued than there are workers. What
        sbatch refuses, as where a user may have only so many jobs, waits until others are over."""
        while self._waiting:
            room = self.longest
            if self.config.workers:
                room = min(room, self.config.workers - len(self._jobs))
            if room <= 0:
                return
            chunks = self._waiting[:room]
            try:
                jobs = self._array(chunks)
            except (FailedJobError, FailedSubmissionError) as error:
                if self._jobs:
                    return
                raise UserError(
                    "--engine slurm: expected sbatch to take the tasks; it says: "
                    f"{str(error).rpartition('error:')[2].strip()}. Correct the engine's options; "
                    "`sinfo` lists partitions and their limits."
                ) from error
            del self._waiting[:room]
            self._jobs += zip(jobs, chunks, strict=True)
            self._news = time.monotonic()

    def _array(self, chunks: Sequence[Sequence[Task]]) -> Sequence[Job[None]]:
        """Submit an array with a job for each chunk. Where this process is part of a job itself,
        its jobs do not inherit its shape."""
        conf = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        with clean_env() if "SLURM_JOB_ID" in os.environ else nullcontext():
            os.environ.update(conf)
            executor = SlurmExecutor(self.folder, max_num_timeout=REQUEUES)
            executor.update_parameters(**self._parameters())
            paths = str(self.job_file), str(self.folder)
            return executor.submit_array([Chunk(*paths, chunk) for chunk in chunks])

    def _parameters(self) -> Mapping[str, Any]:
        """What submitit writes into the batch script."""
        config, threads = self.config, one_thread_environment()
        gpus = (1 if config.gpus_per_task is None else int(config.gpus_per_task)) * self.on_gpu
        exports = [f"export {name}={shlex.quote(value)}" for name, value in threads.items()]
        return {
            "job_name": self.name,
            "partition": config.partition,
            "account": config.account,
            "qos": config.qos,
            "time": config.minutes or MINUTES,
            "mem": config.memory_gb and f"{round(config.memory_gb * 1024)}MB",
            "gpus_per_node": gpus or None,
            "cpus_per_task": 1,
            "srun_args": ["--cpus-per-task=1"],  # srun does not take sbatch's
            "array_parallelism": self.longest,
            "setup": [*exports, *config.setup],
            "wckey": None,
            "additional_parameters": {"requeue": True, **config.slurm_options},
        }


def chunks_of(tasks: Sequence[Task], size: int) -> Iterator[list[Task]]:
    """The tasks in groups of one model, so that it is loaded once a group. One that is given again
    is alone: whatever killed its worker is not to take others along."""
    for (_, attempt), group in groupby(tasks, key=lambda task: (task.model, task.attempt)):
        same, step = list(group), size if attempt == 1 else 1
        yield from (same[start : start + step] for start in range(0, len(same), step))


def states_of(name: str) -> Mapping[str, tuple[str, str]] | None:
    """State and reason of each job of this name: {"12_3": ("PENDING", "Resources")}; None if Slurm
    does not answer."""
    options = ("--noheader", "--array", "--states=all", "--format=%i|%T|%r")
    listed = output("squeue", *options, *_mine(name))
    if listed is None:
        return None
    rows = [line.strip().split("|") for line in listed.splitlines() if line.strip()]
    return {job: (state, " ".join(reason).strip("()")) for job, state, *reason in rows}


def cancel(name: str) -> None:
    """Stop all jobs of this name; running ones at once, for submitit has them ignore SIGTERM."""
    output("scancel", "--quiet", "--signal=INT", "--state=RUNNING", *_mine(name))
    output("scancel", "--quiet", *_mine(name))


def _mine(name: str) -> tuple[str, str]:
    return f"--name={name}", f"--user={getpass.getuser()}"


def output(*command: str) -> str | None:
    """What a command prints; None if it fails, is missing, or takes too long."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if ended.returncode else ended.stdout
