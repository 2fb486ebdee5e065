"""What all commands share: parsing the command line, and one clear message for a user's mistake."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any, TypeVar

from mjp_privacy.core import stops, streams
from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.core.memory import check_address_space, ran_out
from mjp_privacy.core.shown import plain, shown
from mjp_privacy.core.storage import GONE, at_the_door

DONE, BAD_USAGE, SOME_FAILED = 0, 2, 3
"""Exit codes: everything done; a mistake in the command; some image, cell or upload failed."""
FAULT, NO_MEMORY, NO_STORAGE = 70, 71, 74  # a bug of this package; memory; a disk
CLOSED = 141  # nobody reads the output: 128 and the number of the signal, as stops have it
GOES_ON = "the same command goes on from here"
ANEW = "the same command starts anew"
NEW_LINE = "\n"
MOST_THREADS = 4096
MORE_MEMORY = "Close other programs or take less at once"
REASONS_SHOWN = 5  # of images that failed; the others are counted
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # tab and the line's end are none
LONGEST_WORD = 2000
"""Characters in one word of a command line. The parser would repeat it in a box of its own."""
UNFIT = (*GONE, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY)
"""Numbers of errors that say that a path is not what the command line takes it for."""

Arguments = TypeVar("Arguments")


@dataclass(frozen=True)
class Usage:
    """How a command is called: Usage("mjp attack", "mjp attack configs/demo.yaml --out run").

    The command's help starts with the example.
    """

    prog: str  # such as "mjp attack"
    example: str  # a line that can be run as it stands
    again: str = ANEW  # what the same command does after it was stopped

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

        _refuse_empty(argv)
        _refuse_unreadable(argv)
        argv = [_from_home(word) for word in argv]
        defaults: dict[str, Any] = {} if default is None else {"default": default}
        config = () if both_ways else (tyro.conf.FlagCreatePairsOff,)
        try:
            parsed: Arguments = tyro.cli(
                kind,
                args=argv,
                prog=self.prog,
                description=f"Example: {self.example}\n\n{cleandoc(kind.__doc__ or '')}",
                config=config,
                **defaults,
            )
        except SystemExit as end:  # of --help, or of a wrong option that it has named
            raise _Parsed(end.code) from None
        return parsed


def _from_home(word: str) -> str:
    """The word with the home folder in place of ~, which a shell leaves in --out=~/run. Some
    libraries would put it there, and others not."""
    name, equals, value = word.partition("=")
    if equals and value.startswith("~"):
        return f"{name}={os.path.expanduser(value)}"  # noqa: PTH111
    return os.path.expanduser(word) if word.startswith("~") else word  # noqa: PTH111


def _refuse_empty(argv: Sequence[str]) -> None:
    """Raise for an option without a word in it: as a path, no text is the folder one stands in."""
    option = ""
    for word in argv:
        name, equals, value = word.partition("=")
        if not word.strip() or (name.startswith("--") and equals and not value.strip()):
            where = name if equals else option or "the command line"
            raise UserError(
                f"{shown(where)}: expected a value, got an empty text, as an unset variable of a "
                "shell gives. Name a value, or leave the option out."
            )
        option = word if word.startswith("-") else option


def _refuse_unreadable(argv: Sequence[str]) -> None:
    """Raise for a word that nobody can read on a terminal: too long, or with control characters."""
    for word in argv:
        if len(word) > LONGEST_WORD:
            raise UserError(
                f"{shown(word, 80)}: expected at most {LONGEST_WORD} characters, got {len(word)}. "
                "Give a shorter word, or a path from another folder."
            )
        if CONTROL.search(word):
            raise UserError(
                f"{shown(word, 80)}: expected no control characters on the command line. Rename "
                "the file, or leave them out."
            )


class _Parsed(SystemExit):
    """The command line's parser ends the command; an exit from anywhere else is a fault."""


Command = Callable[[list[str], Usage], int]
"""A function from the command's arguments to its exit code."""


def answered(load: Callable[[], Command], argv: list[str], usage: Usage) -> int:
    """Import a command, run it and return its exit code: the last door of every command.

    Whatever it raises becomes one line on stderr: a user's mistake, a stop, a disk or a memory that
    is full. All else is a fault of this package, and its traceback goes into a file.
    """
    stops.then(usage.again)
    streams.bear_any_name()
    try:
        _stand_somewhere()
        check_address_space()
        code = load()(argv, usage)
        sys.stdout.flush()
        return code
    except BaseException as error:
        if isinstance(error, _Parsed) and not stops.stopped():
            raise
        return _code_of(error, argv, usage)


def _stand_somewhere() -> None:
    """Raise if the current folder was deleted: libraries that look for their files from there end
    the process."""
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(
            "The current folder cannot be used: expected a folder to stand in, got: "
            f"{os.strerror(error.errno or 0)}. Go to one that exists with cd, and call again."
        ) from None


def _code_of(error: BaseException, argv: Sequence[str], usage: Usage) -> int:
    """Say what ended a command; its exit code."""
    if stops.stopped() or isinstance(error, KeyboardInterrupt):
        return stops.told()
    if isinstance(error, UserError):
        return _said(f"error: {plain(str(error), keep=NEW_LINE)}", BAD_USAGE)
    if isinstance(error, BrokenPipeError):  # whoever reads the output, such as `head`, saw enough
        streams.drop_output()
        return CLOSED
    if mistake := _of_a_named_path(error, argv):
        return _said(f"error: {mistake}", BAD_USAGE)
    if storage := at_the_door(error):
        streams.drop_output()  # it may be the output that has no room
        return _said(f"error: {storage.what}. {storage.do}; then {usage.again}", NO_STORAGE)
    if ran_out(error):
        return _said(
            f"error: memory ran out ({shown(' '.join(str(error).split()) or 'MemoryError', 200)}). "
            f"{getattr(error, 'advice', MORE_MEMORY)}; then {usage.again}",
            NO_MEMORY,
        )
    from mjp_privacy.core.faults import fault_line

    return _said(fault_line(error, [*usage.prog.split(), *argv]), FAULT)


def _of_a_named_path(error: BaseException, argv: Sequence[str]) -> str:
    """What is wrong with a path that the command line names, or with one below it; "" if the error
    is about something else."""
    if not isinstance(error, OSError) or isinstance(error, StorageError):
        return ""
    name = error.filename2 or error.filename  # of a file that is renamed, its new name
    if not isinstance(name, str) or error.errno not in UNFIT:
        return ""
    place = Path(name).absolute()
    words = [_from_home(word) for word in argv if "\0" not in word]
    named = [Path(word.partition("=")[2] or word).absolute() for word in words]
    if not any(path == place or path in place.parents for path in named):
        return ""
    return f"{shown(name)} cannot be used ({os.strerror(error.errno).lower()}). Give another path."


def _said(line: str, code: int) -> int:
    with suppress(OSError, ValueError):  # nobody may be listening
        print(line, file=sys.stderr, flush=True)
    return code


@dataclass(frozen=True)
class Outcome:
    """What a command prints, and what it could not use: the reasons, by the name of an image."""

    text: str
    failed: Mapping[str, str]


def ended(failed: Mapping[str, str], what: str) -> int:
    """The exit code of a command that is done but for what failed; it says that on stderr:
    ended({"a.png": "it is cut off"}, "images not scored; rows say why")."""
    if not failed:
        return DONE
    print(f"{len(failed)} {what}:", file=sys.stderr)
    for name, reason in list(failed.items())[:REASONS_SHOWN]:
        print(f"  {shown(name)}: {shown(reason.removeprefix(f'{name}: '))}", file=sys.stderr)
    if (further := len(failed) - REASONS_SHOWN) > 0:
        print(f"  … and {further} more", file=sys.stderr)
    return SOME_FAILED


def use_threads(threads: int | None) -> None:
    """Let torch use this many CPU threads; None keeps torch's own number."""
    if threads is None:
        return
    if not 1 <= threads <= MOST_THREADS:
        raise UserError(f"--threads: expected 1 to {MOST_THREADS}, got {shown(threads, 40)}.")
    import torch

    torch.set_num_threads(threads)
