"""What all commands share: parsing the command line, and one clear message for a user's mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, TypeVar

from mjp_privacy.core.errors import UserError

DONE, BAD_USAGE, SOME_FAILED = 0, 2, 3
"""Exit codes: everything done; a mistake in the command; some image, cell or upload failed."""
INTERRUPTED, CLOSED = 130, 141  # as a shell names them: 128 and the number of the signal

Arguments = TypeVar("Arguments")


@dataclass(frozen=True)
class Usage:
    """How a command is called: Usage("mjp attack", "mjp attack configs/demo.yaml --out run").

    The command's help starts with the example.
    """

    prog: str  # such as "mjp attack"
    example: str  # a line that can be run as it stands

    def parse(
        self,
        kind: type[Arguments],
        argv: list[str],
        default: Arguments | None = None,
        *,
        both_ways: bool = False,
    ) -> Arguments:
        """Parse `argv` into the dataclass `kind`; `--help` prints its docstring and exits.

        default    an instance whose values apply to options that are not given
        both_ways  every switch exists as --name and --no-name, so that a default of True can be
                   switched off
        """
        import tyro

        defaults: dict[str, Any] = {} if default is None else {"default": default}
        config = () if both_ways else (tyro.conf.FlagCreatePairsOff,)
        parsed: Arguments = tyro.cli(
            kind,
            args=argv,
            prog=self.prog,
            description=f"Example: {self.example}\n\n{cleandoc(kind.__doc__ or '')}",
            config=config,
            **defaults,
        )
        return parsed


Command = Callable[[list[str], Usage], int]
"""A function from the command's arguments to its exit code."""


def answered(command: Command, argv: list[str], usage: Usage) -> int:
    """Run a command and return its exit code; a user's mistake is printed without a traceback."""
    try:
        return command(argv, usage)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except BrokenPipeError:  # whoever reads the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


def use_threads(threads: int | None) -> None:
    """Let torch use this many CPU threads; None keeps torch's own number."""
    if threads is None:
        return
    if threads < 1:
        raise UserError(f"--threads: expected 1 or more, got {threads}.")
    import torch

    torch.set_num_threads(threads)
