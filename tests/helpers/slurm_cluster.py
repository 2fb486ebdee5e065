"""The real cluster of tools/slurm-here, and how one of its nodes dies."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SLURM_HERE = Path(__file__).parents[2] / "tools" / "slurm-here"


def slurm_here() -> ModuleType:
    """The script as a module."""
    loader = SourceFileLoader("slurm_here", str(SLURM_HERE))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setitem(sys.modules, loader.name, module)  # dataclasses look themselves up there
        loader.exec_module(module)
    return module


def kill_node(cluster: Any, name: str) -> None:
    """What a power cut does: the daemon, the processes that watch tasks, and the tasks."""
    cluster.daemons[name].kill()
    of_tasks = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (place / "environ").read_bytes().split(b"\0")
            if f"SLURM_CONF={cluster.folder}/slurm.conf".encode() not in variables:
                continue
            if f"SLURMD_NODENAME={name}".encode() in variables:
                of_tasks.append(int(place.name))
            elif (place / "cmdline").read_bytes().startswith(b"slurmstepd"):
                files = [str(file.readlink()) for file in (place / "fd").iterdir()]
                if f"{cluster.folder}/{name}.log" in files:
                    os.kill(int(place.name), signal.SIGKILL)
    for pid in of_tasks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
