"""One bad input: how it is made, the command that meets it, and what the command has to do."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mjp_privacy.core.text import cut
from tests.inputs.forks import SECONDS, Job, Outcome
from tests.inputs.server import STDERR, STDOUT

USUAL_CODES = (0, 2, 3)
FAULT, NO_STORAGE = 70, 74
MOST_LINES = 40
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b\u202a-\u202e\u2066-\u2069]")
SHELL = re.compile(r"^[A-Za-z0-9_./=:,-]+$")

Expected = Literal["refused", "survived"]


@dataclass(frozen=True)
class Case:
    """A command line whose input is bad.

    spoil     makes the input bad, in a copy of the base inputs
    copied    files and folders of the base inputs that are copied, "*" for all; others are links
    expected  refused: exit code 2 or 3; survived: also 0, for the input may be legal
    names     words of which the message has to hold one: the file, the option
    field     a word that it has to hold as well
    """

    room: str
    name: str
    argv: tuple[str, ...]
    spoil: Callable[[Path], None] = lambda folder: None
    copied: tuple[str, ...] = ()
    expected: Expected = "survived"
    names: tuple[str, ...] = ()
    field: str = ""
    devices: bool = False
    seconds: float = SECONDS
    codes: tuple[int, ...] = USUAL_CODES

    @property
    def title(self) -> str:
        """Its name among all cases."""
        return f"{self.room}/{cut(self.argv[0], 30) if self.argv else 'mjp'}/{self.name}"

    def prepare(self, base: Path, folder: Path) -> Job:
        """Make the input in a new folder; the command that meets it."""
        folder.mkdir(parents=True)
        for entry in base.iterdir():
            if entry.name in (STDOUT, STDERR, ".cache"):
                continue
            place = folder / entry.name
            if not {entry.name, "*"} & set(self.copied):
                place.symlink_to(entry)
            elif entry.is_dir():
                shutil.copytree(entry, place)
            else:
                shutil.copy(entry, place)
        self.spoil(folder)
        return Job(self.title, list(self.argv), folder, self.seconds)

    def faults(self, outcome: Outcome) -> list[str]:
        """What the command did wrong; empty if nothing."""
        found = []
        said = outcome.said
        if outcome.hung:
            return [f"HANG after {outcome.seconds:.0f} s (cpu {outcome.cpu:.0f} s)"]
        if "Traceback (most recent call last)" in said:
            return [f"TRACEBACK {last_frame(said)}"]
        if outcome.code == FAULT:
            return [f"EXIT 70: {last_line(said)} {last_frame(_named_file(outcome))}"]
        if outcome.code not in self.codes:
            found.append(f"EXIT {outcome.code}: {last_line(said)}")
        elif outcome.code == 0 and self.expected == "refused":
            found.append("ACCEPTED: exit 0 for a bad input")
        if outcome.code and len(said.splitlines()) > MOST_LINES:
            found.append(f"LONG: {len(said.splitlines())} lines")
        if CONTROL.search(said.replace("\r", "")):
            found.append(f"CONTROL CHARACTERS: {_around(said)!r}")
        if outcome.code and self.expected == "refused" and not found:
            if self.names and not any(name in said for name in self.names):
                found.append(f"NAMES NEITHER OF {self.names}: {last_line(said)}")
            if self.field and self.field not in said:
                found.append(f"DOES NOT NAME THE FIELD {self.field}: {last_line(said)}")
        if outcome.memory > 3 << 30:
            found.append(f"MEMORY: {outcome.memory >> 20} MiB")
        return found


def _around(said: str) -> str:
    match = CONTROL.search(said.replace("\r", ""))
    return said[max(0, match.start() - 40) : match.end() + 40] if match else ""


def _named_file(outcome: Outcome) -> str:
    """What the file holds that the last door names: the traceback."""
    for word in re.findall(r"\S*\w\.(?:txt|log)\b", outcome.said):
        path = outcome.job.folder / word
        if path.is_file():
            return path.read_text(errors="replace")
    return ""


def last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1][:240] if lines else "(nothing was said)"


def last_frame(said: str) -> str:
    """The error of a traceback and the last line of the project's code in it."""
    places = re.findall(
        r'File "[^"]*?/((?:mjp_privacy|attacks)/[^"]+)", line (\d+), in (\S+)', said
    )
    error = [
        line
        for line in said.splitlines()
        if re.match(r"^[\w.]+(Error|Exception|Warning|Exit|Panic\w*|Interrupt|Iteration)\b", line)
    ]
    where = ":".join(places[-1][:2]) + f" in {places[-1][2]}" if places else "?"
    return f"{(error or ['?'])[-1][:200]} at {where}"


def shell(argv: list[str] | tuple[str, ...]) -> str:
    """The command line as it is typed."""
    words = (word if SHELL.match(word) else repr(word[:60]) for word in argv)
    return "mjp " + " ".join(words)


def relink(path: Path, content: bytes) -> None:
    """Write a file in place of a link to the base inputs."""
    if path.is_symlink() or path.exists():
        path.unlink()
    path.write_bytes(content)


def remove(folder: Path) -> None:
    """Delete a case's folder, whatever lies in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        os.system(f"chmod -R u+rwx '{folder}'")
        shutil.rmtree(folder, ignore_errors=True)
