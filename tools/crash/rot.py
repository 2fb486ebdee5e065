"""Damage to what is stored: flipped bits, files cut short, files deleted.

Each time some files of a finished run are damaged. Nobody may be shown a wrong row or picture, and
the same command must make the run whole again.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from crash.figures import Figures
from crash.results import shown, wrong
from crash.trial import Trial
from mjp_privacy.cli import main as mjp

FILES = 3  # damaged at a time
NO_RESULTS = (".lock", "log.jsonl", "timings.jsonl", "experiment.yaml", "experiments", "code.json")
"""What holds no results; it is damaged too, and must not break a command."""


def rot(trial: Trial) -> Iterator[Figures]:
    """Bits flip in random files."""
    yield from _damaged(trial, "bits flipped", _flip)


def cut(trial: Trial) -> Iterator[Figures]:
    """Files end early, as after a loss of power."""
    yield from _damaged(trial, "files cut short", _cut)


def gone(trial: Trial) -> Iterator[Figures]:
    """Files are missing."""
    yield from _damaged(trial, "files deleted", lambda path, _: path.unlink())


def _damaged(trial: Trial, name: str, damage: Callable[[Path, Trial], None]) -> Iterator[Figures]:
    line = Figures(name, "attack")
    before, _ = trial.reference("attack")
    whole = trial.place.root / "undisturbed" / "attack"
    torch.set_num_threads(1)  # as in the other processes: float32 rows depend on it
    out = trial.folder("damaged")
    shutil.copytree(whole, out)
    while line.tried < trial.at_least * FILES or trial.has_time:
        files = sorted(p for p in out.rglob("*") if p.is_file() and p.name != ".lock")
        chosen = trial.dice.sample(files, min(FILES, len(files)))
        names = [str(path.relative_to(out)) for path in chosen]
        for path in chosen:
            damage(path, trial)
            line.tried += 1
            line.count("in results" if path.name not in NO_RESULTS else "in other files")
        try:
            if lies := wrong(before, shown(out)):
                line.complain(f"{name} in {names}: {len(lies)} wrong and shown, first {lies[0]}")
        except Exception as error:  # a report would end with it
            line.complain(f"{name} in {names}: reading gave {type(error).__name__}: {error}")
        code, said = _same_command(trial, out)
        if code != 0 or "Traceback" in said:
            line.complain(f"{name} in {names}: exit {code}: {said[-400:]}")
        complaints = len(line.complaints)
        trial.compare("attack", out, line)
        if len(line.complaints) > complaints or code != 0:
            shutil.rmtree(out)
            shutil.copytree(whole, out)
    yield line


def _same_command(trial: Trial, out: Path) -> tuple[int, str]:
    """Run it in this process, which takes a tenth of the time of a new one."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = mjp(trial.place.words("attack", out))
    return code, said.getvalue()


def _flip(path: Path, trial: Trial) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(trial.dice.randint(1, 3) if content else 0):
        content[trial.dice.randrange(len(content))] ^= 1 << trial.dice.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, trial: Trial) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: trial.dice.randrange(len(content) + 1)])
