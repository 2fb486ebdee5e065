"""A disk that is full, read-only or taken away while a command writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from crash.figures import Figures
from crash.processes import Ended, Running, run
from crash.trial import Trial, check_broken
from crash.workplace import RESUMING, WRITING

NO_STORAGE = 74


def full(trial: Trial) -> Iterator[Figures]:
    """A disk of random size fills up: exit 74 in one line; with more space the command goes on."""
    if not _can_mount():
        yield _not_tried("disk full", "mounting a small disk needs root")
        return
    for command in WRITING:
        line = Figures("disk full", command)
        size = _size(trial, command)
        while line.tried < trial.at_least:
            with _small_disk(trial, int(size * trial.dice.uniform(0.02, 0.9)) + 8192) as disk:
                line.tried += 1
                out = disk / "out"
                ended = run(trial.place.words(command, out))
                _judge(ended, line, f"disk full, {command}")
                _mount("-o", "remount,size=512m", str(disk))
                trial.finish(command, out, line)
        yield line


def read_only(trial: Trial) -> Iterator[Figures]:
    """The disk becomes read-only in mid-run; once it is writable again the command goes on."""
    if not _can_mount():
        yield _not_tried("read-only", "mounting a disk needs root")
        return
    for command in WRITING:
        line = Figures("read-only", command)
        _, seconds = trial.reference(command)
        while line.tried < trial.at_least:
            with _small_disk(trial, 512 << 20) as disk:
                line.tried += 1
                out = disk / "out"
                with Running(trial.place.words(command, out)) as running:
                    running.work_for(trial.dice.uniform(0, seconds))
                    made = _mount("-o", "remount,ro", str(disk))
                    ended = running.ended()
                if not made:  # a file was open for writing just then, which the system refuses
                    line.count("busy")
                else:
                    _judge(ended, line, f"read-only, {command}")
                _mount("-o", "remount,rw", str(disk))
                trial.finish(command, out, line)
        yield line


def deleted(trial: Trial) -> Iterator[Figures]:
    """Somebody deletes the output folder while the command works in it: exit 74."""
    for command in (*RESUMING, "report"):
        line = Figures("folder deleted", command)
        _, seconds = trial.reference(command)
        while line.tried < trial.at_least:
            out = trial.folder(f"deleted-{command}")
            line.tried += 1
            with Running(trial.place.words(command, out)) as running:
                running.wait_until(partial(_holds_a_file, out))  # before, nothing can be lost
                running.work_for(trial.dice.uniform(0, 0.3 * seconds))
                working = running.process.poll() is None and not running.has_answered()
                moved = out.with_name(f"{out.name}-moved")
                out.rename(moved)  # at once, whatever is written there meanwhile
                shutil.rmtree(moved)
                ended = running.ended()
            if not working:
                line.count("done before it came")
            else:
                _judge(ended, line, f"folder deleted, {command}", refused_only=True)
            trial.finish(command, out, line)
        yield line


def _holds_a_file(folder: Path) -> bool:
    return any(folder.glob("*"))


def _judge(ended: Ended, line: Figures, what: str, *, refused_only: bool = False) -> None:
    """Count exit 74 in one line; 0 is right only where the command had written everything."""
    if check_broken(ended, line, what):
        return
    last = (ended.errors.strip().splitlines() or [""])[-1]
    if ended.code == NO_STORAGE and last.startswith("error: "):
        line.count("exit 74")
    elif ended.code == 0 and not refused_only:
        line.count("fitted")
    else:
        line.complain(f"{what}: exit {ended.code}: {ended.errors[-400:]}")


def _size(trial: Trial, command: str) -> int:
    """Bytes that the undisturbed command has written."""
    trial.reference(command)
    out = trial.place.root / "undisturbed" / command
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


@contextmanager
def _small_disk(trial: Trial, size: int) -> Iterator[Path]:
    disk = trial.folder("disk")
    disk.mkdir(parents=True)
    if not _mount("-t", "tmpfs", "-o", f"size={size}", "crash-test", str(disk)):
        raise SystemExit("a small disk could not be mounted")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _mount(*options: str) -> bool:
    return subprocess.run(["mount", *options], capture_output=True).returncode == 0


def _can_mount() -> bool:
    if not hasattr(os, "geteuid") or os.geteuid() or not shutil.which("mount"):
        return False
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        if not _mount("-t", "tmpfs", "-o", "size=64k", "crash-test", place):
            return False
        subprocess.run(["umount", place], check=True)
    return True


def _not_tried(trial: str, why: str) -> Figures:
    line = Figures(trial, "all")
    line.count(f"not tried: {why}", 0)
    return line
