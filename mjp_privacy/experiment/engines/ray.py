"""Workers of a Ray cluster: each is a remote function, given a path and its number.

    --engine ray                        start Ray on this machine, and stop it at the end
    --engine ray --address auto         the cluster that this machine is part of
    --engine ray --address HOST:PORT    the cluster whose head listens there

The command runs on a machine of the cluster. All machines see the same files by the same paths and
have this package for the same Python; no code is sent. Ray gives nothing again by itself.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.tasks import serve

WAIT = 3.0  # seconds in which a cluster's head answers
LOOK = 5.0  # seconds between two questions whether the cluster is there
OBJECT_STORE = 80_000_000  # bytes; workers give nothing back, so the least that Ray allows


@dataclass
class RayEngine:
    """RayEngine(EngineConfig("ray", workers=4), job.path, on_gpu=False).start([0, 1])"""

    config: EngineConfig
    job_file: Path
    on_gpu: bool
    interval: float = 0.1
    _running: dict[Any, int] = field(default_factory=dict, init=False)
    _room: int = field(default=1, init=False)
    _looked: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        config = self.config
        if config.gpus_per_task and not self.on_gpu:
            raise UserError(
                "gpus_per_task: this command computes on the CPU, so its tasks would hold GPUs "
                "and not use them. Leave it out, or give the command on a machine with a GPU."
            )
        self.gpus = (config.gpus_per_task or 1.0) if self.on_gpu else 0.0  # beside one CPU
        self.connected_here = not ray.is_initialized()  # else whoever calls was connected before
        if self.connected_here:
            _connect(config.address, config.workers)
        self.head = ray.get_runtime_context().gcs_address  # HOST:PORT

    @property
    def most(self) -> int:
        """As many workers as were asked for, or as the cluster has CPUs or GPUs for."""
        self._look()
        return self.config.workers or self._room

    def start(self, workers: Sequence[int]) -> None:
        remote = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=0)(serve)
        for number in workers:
            self._running[remote.remote(str(self.job_file), number)] = number

    def gone(self) -> Mapping[int, str]:
        """Workers that ended, by themselves or by an error; UserError if the cluster is gone."""
        self._look()
        running = list(self._running)
        over = ray.wait(running, num_returns=len(running), timeout=0)[0] if running else []
        gone = {}
        for reference in over:
            words = "its worker ended without an answer"
            try:
                ray.get(reference)
            except Exception as error:  # whatever it is, the run goes on
                cause = getattr(error, "cause", None) or error  # what the worker raised, or Ray
                said = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
                words = f"its worker ended: {cause if isinstance(cause, UserError) else said}"
            gone[self._running.pop(reference)] = words
        return gone

    def close(self) -> None:
        """Stop what is under way and leave the cluster, which may be gone; one that was started
        here ends."""
        leaving = threading.Thread(target=self._leave, daemon=True)
        leaving.start()
        leaving.join(3 * WAIT)

    def _leave(self) -> None:
        with suppress(Exception):  # the cluster may go meanwhile
            running = list(self._running) if _answers(self.head) else []
            for reference in running:
                ray.cancel(reference, force=True)
            ray.wait(running, num_returns=len(running), timeout=WAIT)
        if self.connected_here:
            ray.shutdown()

    def _look(self) -> None:
        """See now and then what the cluster has; UserError if it is gone or has nothing."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        if not _answers(self.head):
            raise UserError(
                f"The Ray cluster at {self.head} is gone: its head no longer answers. "
                "What was done is kept; start a cluster and give the same command again."
            )
        has = ray.cluster_resources()
        self._room = int(has.get("GPU", 0) / self.gpus if self.gpus else has.get("CPU", 0))
        if self._room < 1:
            raise UserError(
                f"No machine of the Ray cluster at {self.head} has a CPU and {self.gpus:g} GPU(s), "
                "which a task needs. Give a smaller --gpus-per-task, or add a machine; what was "
                "done is kept."
            )


def _connect(address: str | None, workers: int | None) -> None:
    """Connect to the cluster of this address, or start one on this machine, which ends with this
    process; UserError where there is none."""
    own = {"num_cpus": workers, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    options: dict[str, Any] = own if address is None else {}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it asks for the network
    logging.getLogger("ray").setLevel(logging.ERROR)  # `ray.init` speaks before it reads this
    try:
        if address not in (None, "auto") and not _answers(address):  # Ray would try for minutes
            raise ConnectionError("no answer")
        terminate = signal.getsignal(signal.SIGTERM)  # Ray takes it for itself
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"--address {address}" if address else "--engine ray"
        raise UserError(
            f"{where}: no Ray cluster could be used ({' '.join(str(error).split()[:40])}). "
            "Expected auto or HOST:PORT of the head of a cluster with the same versions of Ray and "
            "Python, and this command on one of its machines (`ray start --address HOST:PORT`); "
            "without --address, Ray is started on this machine."
        ) from error


def _answers(address: str) -> bool:
    """Whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=WAIT).close()
    except (OSError, ValueError):
        return False
    return True
