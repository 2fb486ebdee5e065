"""Slurm's commands as a test plays them: scripts that note how they are called."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.slurm import SlurmEngine
from mjp_privacy.experiment.engines.worker import task_file

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
