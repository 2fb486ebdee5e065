"""What all commands share: the command line, exit codes, and one line for whatever went wrong."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import math
import os
import platform
import re
import secrets
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from inspect import cleandoc
from io import TextIOWrapper
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args

from mjp_privacy.core import stop
from mjp_privacy.core.errors import (
    GONE,
    StorageError,
    Unreadable,
    UserError,
    format_traceback,
    storage_error,
)
from mjp_privacy.core.machine import out_of_memory
from mjp_privacy.core.text import one_line, plain, shown

DONE, BAD_USAGE, SOME_FAILED = 0, 2, 3
"""Exit codes: everything done; a mistake in the command; some image, cell or upload failed."""
FAULT, NO_MEMORY, NO_STORAGE = 70, 71, 74
"""A bug of this package; memory; a disk. The numbers are those of sysexits.h, so that a scheduler
can tell a full disk, after which to try again, from a mistake, after which not."""
CLOSED = 141  # nobody reads the output: 128 and the number of the signal, as with interruptions
GOES_ON = "the same command goes on from here"
ANEW = "the same command starts anew"
MORE_MEMORY = "Close other programs, raise ulimit -v where it is set, or take less at once"
REASONS_SHOWN = 5  # of images that failed; the others are counted
LONGEST_WORD = 2000
"""Characters in one word of a command line. The parser would repeat it in a box of its own."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # tab and the line's end are none
UNFIT = (*GONE, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY)
"""Numbers of errors that say that a path is not what the command line takes it for."""
NONE = ["None"]  # on a command line
PACKAGES = ("mjp-privacy", "torch", "numpy", "pandas", "pyarrow", "safetensors", "pydantic")
"""Whose versions the report of a fault holds."""

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
        """Parse `argv` into the dataclass `kind`, whose values without an option are those of
        `default`; `--help` prints its docstring and exits. both_ways: every switch exists as --name
        and --no-name, so that a default of True can be switched off."""
        import tyro

        _check_words(argv)
        registry = tyro.constructors.ConstructorRegistry()
        registry.primitive_rule(_of_an_option)
        defaults: dict[str, Any] = {} if default is None else {"default": default}
        try:
            with registry:
                parsed: Arguments = tyro.cli(
                    kind,
                    args=[_from_home(word) for word in argv],
                    prog=self.prog,
                    description=f"Example: {self.example}\n\n{cleandoc(kind.__doc__ or '')}",
                    config=() if both_ways else (tyro.conf.FlagCreatePairsOff,),
                    **defaults,
                )
        except SystemExit as end:  # of --help, or of a wrong option that it has named
            raise _Parsed(end.code) from None
        return parsed


def _of_an_option(info: Any) -> Any:
    """How tyro reads a value that may be left out (`int | None`): as the value, or the word None.
    By its own rule what is no number is answered with Python's names of types."""
    from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo

    kinds = [kind for kind in get_args(info.type) if kind is not type(None)]
    if info.type_origin not in (Union, UnionType) or len(kinds) != 1:
        return None
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    if isinstance(spec, Exception):  # tyro's, for a type that no word can have
        return spec
    return dataclasses.replace(
        spec,
        choices=spec.choices and (*spec.choices, *NONE),
        instance_from_str=lambda text: None if text == NONE else spec.instance_from_str(text),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: NONE if value is None else spec.str_from_instance(value),
    )


class _Parsed(SystemExit):
    """The command line's parser ends the command; an exit from anywhere else is a fault."""


def _from_home(word: str) -> str:
    """The word with the home folder in place of ~, which a shell leaves in --out=~/run. Some
    libraries would put it there, and others not."""
    name, equals, value = word.partition("=")
    if equals and value.startswith("~"):
        return f"{name}={os.path.expanduser(value)}"  # noqa: PTH111
    return os.path.expanduser(word) if word.startswith("~") else word  # noqa: PTH111


def _check_words(argv: Sequence[str]) -> None:
    """Raise for an option without a word in it, for as a path no text is the folder one stands in;
    for a word that nobody can read on a terminal; and for an option that stands twice, of which the
    parser would take the last one without a word."""
    option, given, fault = "the command line", set[str](), ""
    for word in argv:
        name, equals, value = word.partition("=")
        is_option = name.startswith("--")
        option = name if word.startswith("-") else option
        if is_option and name.replace("_", "-") in given:
            fault = "one, with all its values behind it; got two, of which the last would count"
        elif not word.strip() or (is_option and equals and not value.strip()):
            fault = "a value, or the option left out; got an empty text, as an unset variable gives"
        elif len(word) > LONGEST_WORD or CONTROL.search(word):
            fault = f"at most {LONGEST_WORD} characters, and no control characters, in a word"
            fault += f", got {len(word)} ({shown(word, 80)})"
        if fault:
            raise UserError(f"{shown(option, 80)}: expected {fault}.")
        given.add(name.replace("_", "-"))


Command = Callable[[list[str], Usage], int]
"""A function from the command's arguments to its exit code."""


def answered(load: Callable[[], Command], argv: list[str], usage: Usage) -> int:
    """Import a command, run it and return its exit code.

    Whatever it raises becomes one line on stderr: a user's mistake, an interruption, a disk or a
    memory that is full. All else is a fault of this package, and its traceback goes into a file.
    """
    stop.state.again = usage.again
    for stream in (sys.stdout, sys.stderr):  # names of files may hold any bytes
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            Path.cwd()
        except OSError as error:  # libraries that look for their files from there end the process
            raise UserError(
                "The current folder cannot be used: expected a folder to stand in, got: "
                f"{os.strerror(error.errno or 0)}. Go to one that exists with cd, and call again."
            ) from None
        warnings.filterwarnings("ignore", message=".*torch.jit.script")  # torch's word to itself
        gc.set_threshold(50_000)  # what imports and tables make stays; looking it over takes .5 s
        code = load()(argv, usage)
        sys.stdout.flush()
        return code
    except _Parsed:
        if not stop.interrupted():
            raise
        return stop.report()
    except BaseException as error:
        return _exit_code(error, argv, usage)


def _exit_code(error: BaseException, argv: Sequence[str], usage: Usage) -> int:
    """The exit code of a command that ended with this error, and a line that says why."""
    if stop.interrupted() or isinstance(error, KeyboardInterrupt):
        return stop.report()
    if isinstance(error, BrokenPipeError):  # whoever reads the output, such as `head`, saw enough
        _drop_output()
        return CLOSED
    if isinstance(error, UserError):
        line = f"error: {plain(str(error), keep=chr(10))}"
        code = NO_STORAGE if isinstance(error, Unreadable) else BAD_USAGE
    elif mistake := _of_a_named_path(error, argv):
        line, code = f"error: {mistake}", BAD_USAGE
    elif storage := storage_error(error):
        _drop_output()  # it may be the output that has no room
        line, code = f"error: {storage} Then {usage.again}", NO_STORAGE
    elif out_of_memory(error):
        text = one_line(error, 200) or "MemoryError"
        line = f"error: memory ran out ({text}). {MORE_MEMORY}; then {usage.again}"
        code = NO_MEMORY
    else:
        line, code = _fault_line(error, [*usage.prog.split(), *argv]), FAULT
    with suppress(OSError, ValueError):  # nobody may be listening
        print(line, file=sys.stderr, flush=True)
    return code


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


def _fault_line(error: BaseException, words: Sequence[str]) -> str:
    """The line for an error that nobody expected; command line, versions and traceback go into a
    file that it names, or behind it where none can be written; nothing of the environment."""
    text = one_line(error)
    line = f"a fault of mjp-privacy, please report: {type(error).__name__}{text and f': {text}'}"
    versions = ""
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions += f"{name} {metadata.version(name)}, "
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    trace = format_traceback(error)
    report = f"command: {shlex.join(words)}\nversions: {versions}{python}\n\n{trace}"
    name = f"mjp-fault-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(3)}.txt"
    path = Path(tempfile.gettempdir()) / name
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(report)
    except OSError:
        return f"{line}; the traceback follows\n{report}"
    return f"{line}; the traceback is in {shown(path)}"


def _drop_output() -> None:
    """Let nothing more be written to stdout, which Python would do at its end."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_idle(arguments: Any, options: Collection[str], why: str) -> None:
    """Raise where one of these options of a command was given, for it would change nothing; why:
    what comes before them, as the end of a sentence."""
    for option in dataclasses.fields(arguments):
        if option.name in options and getattr(arguments, option.name) != option.default:
            name = option.name.replace("_", "-")
            raise UserError(f"--{name} would change nothing: {why}. Leave it out.")


# what could not be used --------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a command prints, and what it could not use: the reasons, by the name of an image."""

    text: str
    failed: Mapping[str, str]
    lines: Sequence[Mapping[Any, object]] = ()  # the same for programs: a line for each model


def report_failed(failed: Mapping[str, str], what: str) -> int:
    """The exit code of a command that is done but for what failed; it says that on stderr:
    report_failed({"a.png": "it is cut off"}, "images not scored; rows say why")."""
    if not failed:
        return DONE
    print(f"{len(failed)} {what}:", file=sys.stderr)
    for name, reason in list(failed.items())[:REASONS_SHOWN]:
        print(f"  {shown(name)}: {shown(reason.removeprefix(f'{name}: '))}", file=sys.stderr)
    if (further := len(failed) - REASONS_SHOWN) > 0:
        print(f"  … and {further} more", file=sys.stderr)
    return SOME_FAILED


# answers for programs ---------------------------------------------------------------------------


def print_json(kind: str, content: object) -> None:
    """Print a mapping or a dataclass under its schema: print_json("list", {"attacks": {}})."""
    fields = {"schema": f"mjp-privacy/{kind}/1", **plain_value(content)}
    print(json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False))


def plain_value(value: object) -> Any:
    """A value as JSON has it: dataclasses are objects, NaN is null, infinity "inf" or "-inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_value(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_value(of_key) for key, of_key in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_value(of) for of in value]
    if hasattr(value, "item"):  # a number of NumPy or pandas
        return plain_value(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, Path) else value
