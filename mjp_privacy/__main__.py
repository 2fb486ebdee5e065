"""The way in of all commands: `mjp`, `python -m mjp_privacy` (torchrun -m mjp_privacy), scripts.

Ctrl-C, SIGTERM and SIGHUP are answered from the first line on, so nothing large is imported here.
"""

from __future__ import annotations

import os
import sys

from mjp_privacy.core import stop


def main(*words: str) -> int:
    """Run a command and return its exit code; main("attack"): `mjp attack` and what follows."""
    open_missing_streams()
    stop.listen()
    try:
        from mjp_privacy import cli

        code = cli.main([*words, *sys.argv[1:]])
        stop.finish()
        return code
    except BaseException:
        if stop.interrupted():
            return stop.report()
        stop.finish()
        raise


def open_missing_streams() -> None:
    """Put the null device where a stream was closed before the command began, as by `mjp list >&-`:
    the next file to be opened would take its place, and a library's output would go into it."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
            os.set_inheritable(null, True)  # workers are to have it too
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    raise SystemExit(main())
