"""What every command does alike: parse its line, and answer a user's mistake in one message."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mjp_privacy.core.errors import UserError

DONE, BAD_USAGE, SOME_FAILED = 0, 2, 3
"""Exit codes: all done; a mistake in the command; some image, cell or upload failed."""

Arguments = TypeVar("Arguments")


@dataclass(frozen=True)
class Usage:
    """How a command is called. Its help opens with the example."""

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
        """The command line as a dataclass; `--help` prints its docstring and ends the program.

        both_ways: switches can be given as --name and as --no-name, for defaults that a file sets.
        """
        import tyro

        given: dict[str, Any] = {} if default is None else {"default": default}
        config = () if both_ways else (tyro.conf.FlagCreatePairsOff,)
        return tyro.cli(
            kind,
            args=argv,
            prog=self.prog,
            description=f"Example: {self.example}\n\n{kind.__doc__}",
            config=config,
            **given,
        )


Command = Callable[[list[str], Usage], int]
"""From the command's arguments to its exit code."""


def answered(command: Command, argv: list[str], usage: Usage) -> int:
    """The command's exit code; a user's mistake is a message and no traceback."""
    try:
        return command(argv, usage)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def use_threads(threads: int | None) -> None:
    """Give torch this many CPU threads; None leaves it as it is."""
    if threads is None:
        return
    if threads < 1:
        raise UserError(f"--threads: expected 1 or more, got {threads}.")
    import torch

    torch.set_num_threads(threads)
