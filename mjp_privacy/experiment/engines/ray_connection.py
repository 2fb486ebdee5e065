"""The Ray cluster that a command uses: found or started, watched, and left as it was.

cluster = RayConnection.open("auto", cpus=2, gpus=0)
cluster.room_for(cpus=1, gpus=0)      how many such tasks its machines can do at once
cluster.close()
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mjp_privacy.core.errors import UserError

INSTALL = (
    "The engine `ray` needs the package ray, which is not installed: expected "
    "pip install 'mjp-privacy[ray]'."
)
WAIT = 3.0  # seconds in which a cluster's head answers
OBJECT_STORE = 80_000_000  # bytes; tasks give nothing back, so the least that Ray allows is enough
NOT_FOUND = "no answer"


@dataclass(frozen=True)
class RayConnection:
    """A cluster that this process is connected to."""

    head: str  # HOST:PORT
    connected_here: bool  # False: whoever calls had connected to it before

    @staticmethod
    def open(address: str | None, cpus: int, gpus: int) -> RayConnection:
        """Connect to the cluster of this address, or start one on this machine.

        address    "auto": the cluster that this machine is part of; "HOST:PORT" of a head; None:
                   start one with these CPUs and GPUs, which ends with this process
        """
        ray = imported_ray()
        if ray.is_initialized():
            return RayConnection(ray.get_runtime_context().gcs_address, False)
        _check_address(address)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of it
        options: dict[str, Any] = {"address": address, "log_to_driver": False}
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it asks for the network
            options |= {
                "address": "local",
                "num_cpus": cpus,
                "num_gpus": gpus,
                "object_store_memory": OBJECT_STORE,
                "include_dashboard": False,
            }
        logging.getLogger("ray").setLevel(logging.ERROR)  # `ray.init` speaks before it reads this
        try:
            handler = signal.getsignal(signal.SIGTERM)
            ray.init(logging_level="ERROR", **options)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray takes SIGTERM for itself
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UserError(_refused(address, error)) from error
        return RayConnection(ray.get_runtime_context().gcs_address, True)

    def room_for(self, cpus: int, gpus: float) -> int:
        """How many tasks that need this much the living machines can do at once."""
        nodes = [node["Resources"] for node in imported_ray().nodes() if node["Alive"]]
        return sum(_room(node, cpus, gpus) for node in nodes)

    def is_there(self) -> bool:
        """Whether the cluster's head answers."""
        return _answers(self.head)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self.connected_here:
            within(WAIT, imported_ray().shutdown)


def imported_ray() -> Any:
    """The package, imported when it is used; UserError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UserError(INSTALL) from error
    return ray


def within(seconds: float, call: Callable[[], Any]) -> None:
    """Call something that may wait for a cluster that is gone; go on after this time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _room(node: dict[str, float], cpus: int, gpus: float) -> int:
    """How many tasks fit on a machine with these resources."""
    by_cpu = int(node.get("CPU", 0) // cpus)
    if not gpus:
        return by_cpu
    whole = int(node.get("GPU", 0))  # a task does not lie across two GPUs
    by_gpu = whole * int(1 / gpus + 1e-9) if gpus <= 1 else int(whole // gpus)
    return min(by_cpu, by_gpu)


def _check_address(address: str | None) -> None:
    if address in (None, "auto"):
        return
    host, _, port = str(address).rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise UserError(
            f"--address: expected auto or HOST:PORT of a Ray cluster's head, got {address!r}. "
            "Without it, Ray is started on this machine."
        )
    if not _answers(str(address)):
        raise UserError(_refused(address, ConnectionError(NOT_FOUND)))


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=WAIT).close()
    except OSError:
        return False
    return True


def _refused(address: str | None, error: Exception) -> str:
    """Why no cluster could be used, and what to do."""
    what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if address is None:
        return (
            f"Ray could not be started on this machine ({what}). See ray's own log for the cause."
        )
    return (
        f"--address {address}: no Ray cluster could be used there ({what}). Expected a cluster of "
        "the same versions of Ray and Python, and this command on one of its machines: `ray start "
        "--address HOST:PORT` makes this machine one. Without --address, Ray is started here."
    )
