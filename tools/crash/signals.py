"""Kills, Ctrl-C and SIGTERM at random moments, and a worker that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from crash.figures import Figures
from crash.processes import Running, descendants
from crash.trial import Trial, check_broken
from crash.workplace import EVERY, RESUMING

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def kills(trial: Trial) -> Iterator[Figures]:
    """SIGKILL again and again, until the command comes to its end; all results are equal."""
    for command in RESUMING:
        line = Figures("SIGKILL", command)
        _, seconds = trial.reference(command)
        while line.tried < trial.at_least or (trial.has_time and command == "attack"):
            out = trial.folder(f"kill-{command}")
            for _ in range(max(4, trial.at_least)):
                with Running(trial.place.words(command, out)) as running:
                    moment = trial.dice.uniform(0, seconds)
                    line.tried += 1
                    if running.signal_after(moment, signal.SIGKILL):
                        line.count("killed")
                    else:
                        line.count("at its end already")
                    check_broken(ended := running.ended(), line, f"SIGKILL of {command}")
                if ended.code not in (0, -signal.SIGKILL):
                    line.complain(f"SIGKILL of {command}: exit {ended.code}: {ended.errors[-400:]}")
            trial.finish(command, out, line)
        yield line


def stops(trial: Trial) -> Iterator[Figures]:
    """Ctrl-C and SIGTERM to every command: one line, 130 or 143, and the same results after."""
    for command in EVERY:
        line = Figures("Ctrl-C, SIGTERM", command)
        _, seconds = trial.reference(command)
        out = trial.folder(f"stop-{command}")
        for turn in range(2 * trial.at_least):
            number = (signal.SIGINT, signal.SIGTERM)[turn % 2]
            with Running(trial.place.words(command, out)) as running:
                sent = running.signal_after(trial.dice.uniform(0, seconds), number)
                ended = running.ended(60)
            line.tried += 1
            what = f"{number.name} to {command}"
            if check_broken(ended, line, what):
                continue
            if ended.code == 0:
                line.count("done before it came")
                if command in RESUMING:  # a finished one would be done at once the next time
                    trial.compare(command, out, line)
                    out = trial.folder(f"stop-{command}")
            elif not sent or ended.code != CODES[number]:
                line.complain(f"{what}: exit {ended.code}: {ended.errors[-400:]}")
            elif ended.errors.count("stopped by") != 1 or "Exception ignored" in ended.errors:
                line.complain(f"{what}: not one line: {ended.errors[-400:]}")
            else:
                line.count(f"exit {ended.code}")
        if command in RESUMING:
            trial.finish(command, out, line)
        yield line


def workers(trial: Trial) -> Iterator[Figures]:
    """A worker of `--engine local` is killed; then the command, and no worker outlives it."""
    line = Figures("lost worker", "attack --engine local")
    options = ("--engine", "local", "--workers", "2")
    _, seconds = trial.reference("attack")
    while line.tried < trial.at_least:
        line.tried += 1
        out = trial.folder("workers")
        with Running(trial.place.words("attack", out, *options)) as running:
            pid = running.process.pid
            if not running.wait_until(partial(descendants, pid)):
                line.complain("no worker came")
            running.work_for(trial.dice.uniform(0, seconds))
            if victims := descendants(pid):
                os.kill(trial.dice.choice(victims), signal.SIGKILL)
                line.count("workers killed")
            ended = running.ended()
        if check_broken(ended, line, "lost worker") or ended.code != 0:
            line.complain(f"lost worker: exit {ended.code}: {ended.errors[-400:]}")
        trial.compare("attack", out, line)
    yield line
    yield _killed_with_its_workers(trial, options)


def _killed_with_its_workers(trial: Trial, options: tuple[str, ...]) -> Figures:
    line = Figures("SIGTERM, SIGKILL", "attack --engine local")
    _, seconds = trial.reference("attack")
    out = trial.folder("workers")
    for turn in range(2 * trial.at_least):
        number = (signal.SIGTERM, signal.SIGKILL)[turn % 2]
        with Running(trial.place.words("attack", out, *options)) as running:
            pid = running.process.pid
            running.wait_until(partial(descendants, pid))
            running.work_for(trial.dice.uniform(0, seconds / 2))
            victims = descendants(pid)
            running.process.send_signal(number)
            ended = running.ended(60)
            line.tried += 1
        check_broken(ended, line, f"{number.name} to attack with workers")
        if ended.code not in (0, 143, -signal.SIGKILL):
            line.complain(f"{number.name} to attack with workers: exit {ended.code}")
        line.count("ended" if ended.code else "done before it came")
        if left := [victim for victim in victims if not _ends(victim)]:
            line.complain(f"{len(left)} worker(s) outlived the command")
    trial.finish("attack", out, line)
    return line


def _ends(pid: int, seconds: float = 10) -> bool:
    """Whether a process ends within this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
