"""The three standard streams of a command, whatever they were when it began."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper

STANDARD = ("stdin", "stdout", "stderr")  # by their descriptors: 0, 1 and 2


def fill() -> None:
    """Put the null device where a stream was closed before the command began, as by `mjp list >&-`:
    the next file to be opened would take its place, and a library's output would go into it."""
    for descriptor, name in enumerate(STANDARD):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
            os.set_inheritable(null, True)  # workers are to have it too
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def bear_any_name() -> None:
    """Print characters that the console's encoding lacks as escapes: names of files may hold any
    bytes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Let nothing more be written to stdout, which Python would do at its end."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
