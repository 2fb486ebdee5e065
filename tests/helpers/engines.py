"""Runs that engines share out: commands and calls that a test stops in their middle, the rows that
have to come, and Slurm, played by scripts or real."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.slurm import SlurmEngine
from mjp_privacy.experiment.engines.worker import task_file
from tests.helpers import runs
from tests.helpers.runs import one_cell
from tests.helpers.trap import Trap

CONFIG = one_cell(attacks=[{"name": "trap"}, {"name": "grey"}], dtypes=["float32", "float64"])
"""Three blocks of three photographs; the trap attacks in two cells of two tasks."""


def same_rows(one: Path, other: Path) -> None:
    """Every row is equal to the last bit, and nothing is left of the workers."""
    runs.same_rows(one, other)
    assert not (other / "work").exists()


@contextmanager
def attack_command(
    config: Mapping[str, Any], images: Path, out: Path, options: Sequence[str], trap: Trap
) -> Iterator[subprocess.Popen[bytes]]:
    """`mjp attack` with these options as a process that is killed at the end; what it says on the
    console goes into a file OUT.log."""
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(config)))
    places = ["--images", str(images), "--out", str(out), "--device", "cpu"]
    with out.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mjp_privacy", "attack", str(path), *places, *options],
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=trap.environment,
            preexec_fn=_hear_interrupts,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _hear_interrupts() -> None:
    """Ctrl-C counts for the new process, also where the tests run in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SCRIPTS = {
    "sbatch": """
if [ -e "$HERE/refusal" ]; then cat "$HERE/refusal" >&2; exit 1; fi
number=$(($(ls "$HERE" | grep -c '[.]sh$') + 1))
cp "$1" "$HERE/$number.sh"
env > "$HERE/$number.environment"
echo "Submitted batch job $number"
""",
    "squeue": 'cat "$HERE/states"',
    "scontrol": """
case "$*" in "show config") echo "MaxArraySize            = $(cat "$HERE/longest")";; esac
""",
    "scancel": "",
    "srun": "",
}


@dataclass(frozen=True)
class FakeSlurm:
    """`slurm = FakeSlurm.installed(tmp_path, monkeypatch); slurm.say({"1_0": "RUNNING"})`"""

    folder: Path

    @classmethod
    def installed(cls, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
        """The commands before all others in the PATH of this process."""
        (folder / "bin").mkdir(parents=True)
        for name, lines in SCRIPTS.items():
            path = folder / "bin" / name
            note = f'echo "{name} $*" >> "$HERE/calls"'
            path.write_text(f"#!/bin/sh\nHERE='{folder}'\n{note}\n{lines}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        slurm = cls(folder)
        slurm.take_arrays_of(1001)
        slurm.say({})
        return slurm

    def take_arrays_of(self, longest: int) -> None:
        (self.folder / "longest").write_text(str(longest))

    def say(self, states: Mapping[str, str]) -> None:
        """What squeue answers: {"1_0": "PENDING|Resources"}."""
        lines = [f"{task}|{state}" for task, state in states.items()]
        (self.folder / "states").write_text("\n".join(lines) + "\n")

    def refuse(self, words: str | None) -> None:
        """What sbatch says and does nothing; None: it takes everything."""
        path = self.folder / "refusal"
        path.unlink(missing_ok=True)
        if words is not None:
            path.write_text(words)

    def be_silent(self) -> None:
        """Let squeue fail, as while the controller starts."""
        (self.folder / "states").unlink()

    def calls(self, name: str) -> list[str]:
        """The arguments with which a command was called."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.split(" ")[0] == name]

    def scripts(self) -> list[str]:
        """The batch scripts that were submitted."""
        return [path.read_text() for path in sorted(self.folder.glob("*.sh"))]

    def environment(self, number: int) -> str:
        """The environment that sbatch had at its n-th call, and would give to the tasks."""
        return (self.folder / f"{number}.environment").read_text()


def engine_in(folder: Path, on_gpu: bool = False, **options: Any) -> SlurmEngine:
    """An engine whose workers have tasks, each the block of its number."""
    job = folder / "my run" / "work" / "job.json"
    job.parent.mkdir(parents=True, exist_ok=True)
    for number in range(10):
        task_file(job, number).write_text(f"0 {number} 0 1")
    made = SlurmEngine.of(EngineConfig("slurm", **options), job, on_gpu)
    made.interval = 0.0
    return made


def arrays(slurm: FakeSlurm) -> list[str]:
    """The sizes of the arrays that were submitted."""
    found = [re.search(r"--array=([^%]+)", script) for script in slurm.scripts()]
    return ["single" if match is None else match[1] for match in found]


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
