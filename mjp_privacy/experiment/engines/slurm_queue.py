"""What Slurm knows of a submission's tasks, asked of its own commands, and said in words.

submitit reads states by `sacct`, which many clusters do not have; `squeue` is asked here, and
`sacct` where `squeue` has forgotten a task.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mjp_privacy.core.errors import UserError

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
TIMEOUT = 60.0  # seconds that a command may take; a busy controller answers late

ENDED = {
    "BOOT_FAIL": "had a node that did not start",
    "CANCELLED": "was cancelled",
    "COMPLETED": "ended without an answer",
    "DEADLINE": "missed its deadline",
    "FAILED": "failed",
    "NODE_FAIL": "lost its node",
    "OUT_OF_MEMORY": "took more memory than it had (option memory_gb)",
    "PREEMPTED": "gave its place to another job",
    "REVOKED": "was taken by another cluster",
    "TIMEOUT": "ran out of time (option minutes)",
    "": "is not known to Slurm any more",
}
"""States in which a task is over, and what became of it in words; "" is the state of a task that
Slurm has forgotten."""

UNSURE = ("COMPLETED", "PREEMPTED", "")
"""States in which an answer may still be on its way through the file system, or a requeue."""

NEVER = (
    "BadConstraints",
    "DependencyNeverSatisfied",
    "InvalidAccount",
    "InvalidQOS",
    "JobHoldMaxRequeue",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "launch failed requeued held",
)
"""Reasons for which a task would wait for ever."""


@dataclass(frozen=True)
class State:
    """What Slurm says of a task: State("PENDING", "Resources")."""

    name: str  # "" if Slurm does not know the task
    reason: str = ""  # why it waits

    @property
    def is_over(self) -> bool:
        """Whether the task will do nothing more."""
        return self.name in ENDED or self.waits_in_vain

    @property
    def waits_in_vain(self) -> bool:
        """Whether the task is queued and will never start."""
        return self.name == "PENDING" and self.reason in NEVER

    def words(self) -> str:
        """What became of the task."""
        if self.waits_in_vain:
            return f"would wait for ever ({self.reason})"
        return ENDED.get(self.name, self.name)


GONE = State("")


@dataclass(frozen=True)
class Queue:
    """All tasks of jobs of one name: Queue("mjp-demo-1a2b3c4d").states()"""

    name: str

    def states(self) -> Mapping[str, State] | None:
        """The state of each task by its id, such as "1234_5"; None if Slurm does not answer."""
        columns = "--format=%i|%T|%r"
        listed = output("squeue", "--noheader", "--array", "--states=all", columns, *self._mine())
        return None if listed is None else read_states(listed)

    def accounted(self, ids: Sequence[str]) -> Mapping[str, State]:
        """What the accounting knows of tasks that the queue has forgotten."""
        columns = "--format=JobID,State"
        options = ("--noheader", "--parsable2", "--allocations", columns)
        return read_states(output("sacct", *options, f"--jobs={','.join(ids)}") or "")

    def cancel(self) -> None:
        """Have everything stop; running tasks at once, for submitit lets them ignore SIGTERM."""
        output("scancel", "--quiet", "--signal=INT", "--state=RUNNING", *self._mine())
        output("scancel", "--quiet", *self._mine())

    def cancel_task(self, task: str) -> None:
        """Have one task stop."""
        output("scancel", "--quiet", task)

    def throttle(self, array: str, at_once: int) -> None:
        """Let this many tasks of an array run at once."""
        output("scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={at_once}")

    def _mine(self) -> tuple[str, str]:
        return f"--name={self.name}", f"--user={getpass.getuser()}"


def read_states(listed: str) -> dict[str, State]:
    """States by task from lines such as "12_3|PENDING|Resources" or "12_3|CANCELLED by 1000"."""
    states = {}
    for line in filter(None, map(str.strip, listed.splitlines())):
        task, name, *reason = line.split("|")
        states[task] = State(name.partition(" ")[0], " ".join(reason).strip("()"))
    return states


def output(*command: str) -> str | None:
    """What a command prints; None if it fails, is missing, or takes too long."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if ended.returncode else ended.stdout


def longest_array() -> int:
    """How many tasks an array of this cluster may have."""
    settings = output("scontrol", "show", "config") or ""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", settings, re.MULTILINE)
    return max(1, int(match[1])) if match else 1


def require_slurm() -> None:
    """Raise if this machine cannot give work to Slurm."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"--engine slurm: expected Slurm's commands on this machine; `{missing[0]}` is not "
            "here. Run the command on a machine from which jobs are submitted, try it on a cluster "
            "of its own with tools/slurm-here, or take --engine local."
        )


@contextmanager
def outside_of_jobs() -> Iterator[None]:
    """Hide that this process is part of a job itself: its tasks would inherit the job's shape."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name != "SLURM_CONF"
    }
    if "SLURM_JOB_ID" not in inherited:
        inherited = {}
    for name in inherited:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(inherited)


def last_line(log: Path) -> str:
    """The last thing that a task wrote to its log, without what Slurm adds; "" if nothing."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    own = [line for line in said if not line.startswith(("srun:", "slurmstepd", "submitit "))]
    return (own or said or [""])[-1]
