"""Workers of a Slurm cluster: each is a job of an array, submitted by way of submitit.

    RUN/work/slurm/NAME/     what submitit writes, and the workers' logs; NAME is the jobs' name

submitit pickles what it calls into this folder, which leaves with the run's end; the call holds a
path and numbers alone (`SlurmWorker`). Nodes must see the run folder, the images, the weights and
this Python environment under the same paths. submitit reads states by `sacct`, which many clusters
do not have; `squeue` is asked here.

A job that is preempted or comes to its time limit is requeued and goes on; one that ends otherwise
is gone. What is left of a command's jobs is cancelled at its end, or by the next one on the folder.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from submitit import Job, SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import DelayedSubmission, clean_env

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import one_thread_environment
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.tasks import last_words, serve, task_file

MINUTES = 60  # time limit of a job, where none is given
STARTS = 5  # starts in a row with the same task, by preemption or time limit, before it is lost
REQUEUES = 10**6  # submitit's own limit, which raises an error that an attack may catch
LOOK = 5.0  # seconds between two questions to Slurm
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
class SlurmWorker:
    """What a job does: SlurmWorker("RUN/work/job.json", 3)(). submitit carries it to the node in a
    pickle file."""

    job_file: str
    number: int
    task: str = ""  # the one that it had when it was last requeued
    starts: int = 1  # with this task

    def __call__(self) -> None:
        """Do tasks until there are none. The main thread only waits: what a signal raises in it is
        not to be taken for an attack's own error."""
        try:
            ThreadPoolExecutor(1).submit(serve, self.job_file, self.number, 1.0).result()
        except BaseException as error:
            if not isinstance(error, SystemExit) or isinstance(error.code, str):
                print(*traceback.format_exception_only(error), sep="", file=sys.stderr, flush=True)
            os._exit(1)  # the work is not waited for

    def checkpoint(self) -> DelayedSubmission:
        """What goes on after a preemption or the time limit; called by submitit on a signal."""
        task = task_file(Path(self.job_file), self.number).read_text(encoding="ascii")
        starts = self.starts + 1 if task == self.task else 1
        if starts >= STARTS:
            sys.exit(f"its task was not done in {STARTS} starts: give more time (option minutes)")
        return DelayedSubmission(SlurmWorker(self.job_file, self.number, task, starts))


@dataclass
class SlurmEngine:
    """SlurmEngine(config, job.path, on_gpu=False).start([0, 1])"""

    config: EngineConfig
    job_file: Path
    on_gpu: bool
    interval: float = 0.5
    _waiting: list[int] = field(default_factory=list, init=False)
    _jobs: dict[int, Job[None]] = field(default_factory=dict, init=False)
    _looked: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Cancel the jobs of an earlier command, and see how long an array may be."""
        job_file = self.job_file
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
        self.name = f"mjp-{run}-{secrets.token_hex(4)}"  # of the jobs
        self.longest = max(1, int(longest[1])) if longest else 1

    @property
    def most(self) -> int:
        return self.config.workers or self.longest

    def start(self, workers: Sequence[int]) -> None:
        self._waiting += workers
        self._submit()

    def gone(self) -> Mapping[int, str]:
        if not self._jobs or time.monotonic() - self._looked < LOOK:
            return {}
        self._looked = time.monotonic()
        options = ("--noheader", "--array", "--states=all", "--format=%i|%T|%r")
        listed = output("squeue", *options, *_mine(self.name))
        if listed is None:  # Slurm does not answer
            return {}
        rows = [line.strip().split("|") for line in listed.splitlines() if line.strip()]
        states = {job: (state, " ".join(reason).strip("()")) for job, state, *reason in rows}
        words = {number: self._fate(job, states) for number, job in self._jobs.items()}
        gone = {number: fate for number, fate in words.items() if fate}
        for number in gone:
            del self._jobs[number]
        self._submit()
        return gone

    def _fate(self, job: Job[None], states: Mapping[str, tuple[str, str]]) -> str:
        """What became of a job that is over, in words; "" of one that waits or runs."""
        # those that were cancelled before they started have one state, their array's
        array, log = job.job_id.partition("_")[0], job.paths.stderr
        state, reason = states.get(job.job_id) or states.get(array) or ("UNKNOWN", "")
        if state == "PENDING" and NEVER.fullmatch(reason):
            output("scancel", "--quiet", job.job_id)
            return f"a Slurm job would wait for ever ({reason})"
        if state not in OVER:
            return ""
        said = last_words(log)
        if state == "FAILED" and not log.exists():
            said = f": it left no log, as if its node did not see {log.parent}"
        return f"a Slurm job ended as {state}{HINTS.get(state, '')}{said}"

    def close(self) -> None:
        """Cancel what is queued and what runs, apart from whoever was told to end and does."""
        if self._jobs:
            time.sleep(2 * self.interval)
        if not all(job.paths.result_pickle.exists() for job in self._jobs.values()):
            cancel(self.name)

    def _submit(self) -> None:
        """Submit the workers that wait. What sbatch refuses, as where a user may have only so many
        jobs, waits until others are over."""
        while self._waiting:
            numbers = self._waiting[: self.longest]
            try:
                jobs = self._array([SlurmWorker(str(self.job_file), n) for n in numbers])
            except (FailedJobError, FailedSubmissionError) as error:
                if self._jobs:
                    return
                raise UserError(
                    "--engine slurm: expected sbatch to take the tasks; it says: "
                    f"{str(error).rpartition('error:')[2].strip()}. Correct the engine's options; "
                    "`sinfo` lists partitions and their limits."
                ) from error
            del self._waiting[: self.longest]
            self._jobs |= zip(numbers, jobs, strict=True)

    def _array(self, workers: Sequence[SlurmWorker]) -> Sequence[Job[None]]:
        """Submit an array. Where this process is part of a job itself, its jobs do not inherit its
        shape."""
        config, threads = self.config, one_thread_environment()
        gpus = (1 if config.gpus_per_task is None else int(config.gpus_per_task)) * self.on_gpu
        exports = [f"export {name}={shlex.quote(value)}" for name, value in threads.items()]
        folder = self.job_file.parent / "slurm" / self.name
        executor = SlurmExecutor(folder, max_num_timeout=REQUEUES)
        executor.update_parameters(
            job_name=self.name,
            partition=config.partition,
            account=config.account,
            qos=config.qos,
            time=config.minutes or MINUTES,
            mem=config.memory_gb and f"{round(config.memory_gb * 1024)}MB",
            gpus_per_node=gpus or None,
            cpus_per_task=1,
            srun_args=["--cpus-per-task=1"],  # srun does not take sbatch's
            array_parallelism=self.longest,
            setup=[*exports, *config.setup],
            wckey=None,
            additional_parameters={"requeue": True, **config.slurm_options},
        )
        conf = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        with clean_env() if "SLURM_JOB_ID" in os.environ else nullcontext():
            os.environ.update(conf)
            return executor.submit_array(workers)


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
