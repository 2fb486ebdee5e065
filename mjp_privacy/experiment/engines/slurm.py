"""Workers of a Slurm cluster: tasks are submitted as job arrays, by way of submitit.

    RUN/work/slurm/NAME/     what submitit writes, and the tasks' logs; NAME is the jobs' name

submitit pickles what it calls into this folder, which leaves with the run's end; the call holds
paths and numbers alone (`slurm_chunk.Chunk`). Nodes must see the run folder, the images, the
weights and this Python environment under the same paths.

A task that is preempted or comes to its time limit is requeued and goes on with what is not
finished. One that ends otherwise is lost, and the coordinator gives its blocks again, each alone;
other tasks go on. When the command ends, what is left of its arrays is cancelled; those of a
command that was killed are cancelled by the next one on the same folder.
"""

from __future__ import annotations

import importlib.util
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.slurm_chunk import WARNING
from mjp_privacy.experiment.engines.slurm_queue import (
    GONE,
    UNSURE,
    Queue,
    State,
    last_line,
    longest_array,
    require_slurm,
)
from mjp_privacy.experiment.engines.slurm_submission import (
    Element,
    Refused,
    Submission,
    chunks_of,
)
from mjp_privacy.experiment.job import Task

SHARES, MOST = 4, 16  # tasks for each worker, and blocks of a task, where no number is given
GRACE = 60.0  # seconds until an answer that is not seen is taken for none; NFS may take so long
SHORTEST = 5  # minutes that a task may have at least
LOOKS = (2.0, 30.0)  # seconds between two questions to Slurm: soon after news, and later
LAST_BREATH = 15.0  # seconds that tasks have to stop


@dataclass
class SlurmEngine:
    """SlurmEngine.of(config, job.path, threads=1, on_gpu=False).submit(tasks)"""

    submission: Submission
    longest: int  # tasks that an array may have
    interval: float = 0.5
    _waiting: list[list[Task]] = field(default_factory=list, init=False)
    _elements: dict[str, Element] = field(default_factory=dict, init=False)  # not known to be over
    _ended: dict[str, float] = field(default_factory=dict, init=False)
    """When elements were first seen to be over that may still answer."""
    _at_once: dict[str, int] = field(default_factory=dict, init=False)  # by array
    _states: Mapping[str, State] = field(default_factory=dict, init=False)
    _looked: float = field(default=0.0, init=False)
    _news: float = field(default=0.0, init=False)  # when something was last seen to change

    @classmethod
    def of(cls, config: EngineConfig, job_file: Path, threads: int, on_gpu: bool) -> SlurmEngine:
        """The engine of these options; arrays of an earlier command are cancelled."""
        require_submitit()
        require_slurm()
        _refuse_impossible(config, job_file)
        for folder in (job_file.parent / "slurm").glob("mjp-*"):
            Queue(folder.name).cancel()
        run = re.sub(r"[^A-Za-z0-9]+", "-", job_file.parent.parent.name)[:40]
        name = f"mjp-{run}-{secrets.token_hex(4)}"
        return cls(Submission(job_file, name, config, threads, on_gpu), longest_array())

    @property
    def queue(self) -> Queue:
        """What Slurm knows of this run."""
        return Queue(self.submission.name)

    @property
    def workers(self) -> int | None:
        """How many tasks run at once; None: as many as Slurm lets."""
        return self.submission.config.workers

    def submit(self, tasks: Sequence[Task]) -> None:
        """Submit the tasks in chunks, as far as there is room for them."""
        size = self.submission.config.blocks_per_task
        if size is None:
            share = len(tasks) / (SHARES * self.workers) if self.workers else 1
            size = min(MOST, math.ceil(share))
        self._waiting += chunks_of(tasks, max(1, size))
        self._send()

    def lost(self) -> Sequence[tuple[Task, str]]:
        """Tasks whose element is over, also of those that did answer; Slurm is asked now and then.

        An element that ended well may have answered where this machine does not see it yet, so it
        is given some time.
        """
        now = time.monotonic()
        pause = min(LOOKS[1], max(LOOKS[0], (now - self._news) / 4))
        if not self._elements or now - self._looked < pause:
            return []
        self._looked = now
        states = self.queue.states()
        if states is None:
            return []
        if states != self._states:
            self._states, self._news = states, now
        over = [element for element in self._elements.values() if self._is_over(element, now)]
        reasons = self._reasons(over)
        for element in over:
            del self._elements[element.id]
        self._widen()
        self._send()
        return [(task, reasons[element.id]) for element in over for task in element.tasks]

    def close(self) -> None:
        """Cancel what is queued and what runs, and wait for it a little."""
        self._waiting.clear()
        if not self._elements:
            return
        time.sleep(self.interval)  # whoever has done all of its tasks ends by itself
        if not all(element.result.exists() for element in self._elements.values()):
            self.queue.cancel()
        deadline = time.monotonic() + LAST_BREATH
        while time.monotonic() < deadline:
            states = self.queue.states()
            if states is not None and all(state.is_over for state in states.values()):
                return
            time.sleep(self.interval)
        self.queue.cancel()

    def _is_over(self, element: Element, now: float) -> bool:
        state = self._state(element)
        if not state.is_over:
            self._ended.pop(element.id, None)
            return False
        if state.name not in UNSURE:
            return True
        return now - self._ended.setdefault(element.id, now) > GRACE

    def _state(self, element: Element) -> State:
        """Those that were cancelled before they started have one state in common, their array's."""
        return self._states.get(element.id) or self._states.get(element.array, GONE)

    def _reasons(self, over: Sequence[Element]) -> dict[str, str]:
        """What became of each of these, in words."""
        gone = [element.id for element in over if self._state(element) == GONE]
        accounted = self.queue.accounted(gone) if gone else {}
        reasons = {}
        for element in over:
            state = accounted.get(element.id, self._state(element))
            if state.waits_in_vain:
                self.queue.cancel_task(element.id)
            said = last_line(element.log)
            if state.name == "FAILED" and not element.log.exists():
                said = f"it left no log, as if its node did not see {self.submission.folder}"
            reasons[element.id] = f"a Slurm task {state.words()}{f': {said}' if said else ''}"
        return reasons

    def _send(self) -> None:
        """Submit what is waiting. An array that sbatch refuses, as where a user may have only so
        many jobs, waits until others are over."""
        while self._waiting and (room := self._room()) > 0:
            chunks = self._waiting[: self.longest]
            try:
                elements = self.submission.array(chunks, room)
            except Refused as refusal:
                if self._active():
                    return
                raise UserError(
                    f"--engine slurm: expected sbatch to take the tasks; it says: {refusal}. "
                    "Correct the engine's options; `sinfo` lists partitions and their limits."
                ) from refusal
            del self._waiting[: self.longest]
            self._elements |= {element.id: element for element in elements}
            self._at_once[elements[0].array] = room
            self._news = time.monotonic()

    def _active(self) -> Counter[str]:
        """The number of elements of each array that are not over."""
        elements = self._elements.values()
        return Counter(each.array for each in elements if each.id not in self._ended)

    def _room(self) -> int:
        """How many elements more may run at once."""
        if self.workers is None:
            return self.longest
        active = self._active()
        return self.workers - sum(min(self._at_once[array], active[array]) for array in active)

    def _widen(self) -> None:
        """Give the places of arrays that come to their end to others."""
        for array, left in self._active().items():
            more = min(self._room(), left - self._at_once[array])
            if more > 0:
                self._at_once[array] += more
                self.queue.throttle(array, self._at_once[array])


def _refuse_impossible(config: EngineConfig, job_file: Path) -> None:
    """Raise for what Slurm takes and does not do."""
    if config.gpus_per_task is not None and config.gpus_per_task % 1:
        raise UserError(
            "--engine slurm: expected a whole number of GPUs for each task, got "
            f"gpus_per_task={config.gpus_per_task}."
        )
    if config.minutes is not None and config.minutes < SHORTEST:
        raise UserError(
            f"--engine slurm: expected {SHORTEST} minutes or more for a task, got "
            f"minutes={config.minutes}. A task is warned up to {WARNING / 60:.0f} minutes before "
            "its limit, and stops then."
        )
    if "%" in str(job_file):
        raise UserError(
            f"--engine slurm: expected a run folder without % in its path, got "
            f"{job_file.parent.parent}; Slurm takes it for a pattern. Give another --out."
        )


def require_submitit() -> None:
    if importlib.util.find_spec("submitit") is None:
        raise UserError(
            "--engine slurm: expected the package submitit, which is not installed here. "
            "Install it: pip install 'mjp-privacy[slurm]'."
        )
