"""A process that has imported everything and forks a child for each command: a tenth of a second
instead of five. Started by `forks.ForkServer`; it reads and writes a line of JSON for each command.

    {"id": 1, "module": "mjp_privacy", "argv": ["list"], "folder": "/tmp", "seconds": 60, "cpu": 20}
    {"id": 1, "code": 0, "seconds": 0.04, "cpu": 0.03, "memory": 250000000, "hung": false}

What the command printed is in the folder, in STDOUT and STDERR.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import resource
import runpy
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

STDOUT, STDERR = ".stdout", ".stderr"
MOST_MEMORY = 6 << 30  # address space
MOST_FILE = 256 << 20
OUTER = ("flower", "engines.ray", "engines.slurm", "results")  # need libraries of their own
LIBRARIES = ("PIL.Image", "matplotlib.pyplot", "pyarrow.parquet", "safetensors.torch", "tyro")


def import_all() -> None:
    """Import every module of the package, so that no child has to."""
    for name in ("mjp_privacy", "attacks"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not any(part in module.name for part in OUTER) and "__main__" not in module.name:
                importlib.import_module(module.name)
    for name in LIBRARIES:
        importlib.import_module(name)
    from PIL import Image

    Image.init()


def serve(jobs: int) -> None:
    """Do the commands that arrive on standard input, so many at once, until it ends."""
    running: dict[int, tuple[dict[str, Any], float]] = {}
    waiting: list[dict[str, Any]] = []
    buffer, is_open = b"", True
    while is_open or waiting or running:
        ready = select.select([0], [], [], 0.01 if running else 0.2)[0] if is_open else []
        if ready:
            arrived = os.read(0, 1 << 16)
            is_open = bool(arrived)
            *lines, buffer = (buffer + arrived).split(b"\n")
            waiting += [json.loads(line) for line in lines]
        elif running and not is_open:
            time.sleep(0.01)
        while waiting and len(running) < jobs:
            job = waiting.pop(0)
            running[_start(job)] = (job, time.monotonic())
        for process in list(running):
            job, began = running[process]
            done, status, usage = os.wait4(process, os.WNOHANG)
            late = time.monotonic() - began > job["seconds"]
            if not done and late:
                os.killpg(process, signal.SIGKILL)
                _, status, usage = os.wait4(process, 0)
            if done or late:
                del running[process]
                _answer(job, process, status, usage, time.monotonic() - began, late and not done)


def _answer(
    job: dict[str, Any],
    process: int,
    status: int,
    usage: resource.struct_rusage,
    seconds: float,
    hung: bool,
) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # what the command left running
    said = {
        "id": job["id"],
        "code": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "cpu": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss * 1024,
        "hung": hung or os.waitstatus_to_exitcode(status) == -signal.SIGXCPU,
    }
    os.write(3, json.dumps(said).encode() + b"\n")


def _start(job: dict[str, Any]) -> int:
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        folder = Path(job["folder"])
        for number, name in ((1, STDOUT), (2, STDERR)):
            place = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(place, number)
            os.close(place)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.close(3)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu"], job["cpu"] + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        code = _command(job["module"], job["argv"])
    except BaseException:  # the child must never go back into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(module: str, argv: list[str]) -> int:
    """The exit code of `python -m MODULE ARGV`, as the interpreter would give it."""
    sys.argv = ["mjp", *argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    os.dup2(1, 3)  # answers go here; what libraries print while they are imported does not
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    import_all()
    os.write(3, b'{"ready": true}\n')
    serve(int(sys.argv[1]))
