"""What every command does with a mistake of its user."""

from __future__ import annotations

import sys
from collections.abc import Callable

from mjp_privacy.core.errors import UserError

DONE, BAD_USAGE, SOME_FAILED = 0, 2, 3


def kindly(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """User errors without a traceback."""
    try:
        return command(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
