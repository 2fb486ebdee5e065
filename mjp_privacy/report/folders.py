"""The folders that a report is asked for: which are runs, and what the others are instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import is_there, reason
from mjp_privacy.core.text import plain, shown

RUN = ("cells.*.parquet", "rows/*/*.parquet", "cells.json")
"""What makes a folder a run: one of these files; the last is that of an earlier version."""

OTHERS = {
    "index.html": "the folder of a report",
    "uploads.jsonl": "a folder of uploads",
    "metrics.jsonl": "the folder of a training or a federation",
    "federation.json": "the folder of a federation",
}
"""What a folder is that holds one of these files."""

NAMED = 5
"""Runs inside a folder that are called by their paths."""

MOST_LOOKED_AT = 1000
"""Entries of a folder among which runs are looked for."""


def check_folders(runs: Sequence[Path]) -> None:
    """Raise unless these are run folders, each of them once."""
    if not runs:
        raise UserError("Expected one or more run folders, got none. Give the --out of a run.")
    seen: dict[Path, Path] = {}
    for run in runs:
        _check_folder(run)
        first = seen.setdefault(run.resolve(), run)
        if first is not run:
            raise UserError(
                f"Expected different runs, but {shown(run)} is the same folder as {shown(first)}: "
                "its lines would be in the table twice. Name it once."
            )


def run_names(runs: Sequence[Path]) -> list[str]:
    """What a report calls these runs: their folders' names, or paths where names are equal."""
    names = [plain(run.resolve().name) for run in runs]
    return names if len(set(names)) == len(names) else [plain(str(run)) for run in runs]


def check_out(out: Path, runs: Sequence[Path]) -> None:
    """Raise where a report cannot be written: over a run, or among its rows and pictures."""
    try:
        is_file = out.exists() and not out.is_dir()
    except (OSError, ValueError) as error:
        raise UserError(
            f"Expected a folder to write the report into, but {shown(out)} is "
            f"{reason(error)}. Give another --out."
        ) from error
    if is_file:
        raise UserError(
            f"Expected a folder to write the report into, but {shown(out)} is a file. Give "
            "another --out."
        )
    place = out.resolve()
    for run in runs:
        if place == run.resolve():
            raise UserError(
                f"Expected a folder of its own for the report, but {shown(out)} is the run itself. "
                f"Give another --out, such as {shown(out / 'report')}."
            )
        for part in ("rows", "experiments"):
            if place.is_relative_to(run.resolve() / part):
                raise UserError(
                    f"Expected a folder of its own for the report, but {shown(out)} lies among "
                    f"the {part} of the run. Give another --out, such as {shown(run / 'report')}."
                )


@contextmanager
def nothing_in_the_way(out: Path) -> Iterator[None]:
    """Name the file or folder that stands where the report wants to write another kind of thing."""
    try:
        yield
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(
            f"The report cannot be written into {shown(out)}: {error.strerror} "
            f"({shown(error.filename2 or error.filename)}). Give another --out, or take it away."
        ) from error


def _check_folder(run: Path) -> None:
    give = "Give the folder that was the --out of `mjp attack`."
    try:
        is_folder, exists = run.is_dir(), run.exists()
    except (OSError, ValueError) as error:
        raise UserError(
            f"Expected a run folder, but {shown(run)} is {reason(error)}. {give}"
        ) from error
    if not is_folder:
        fault = "is a file" if exists else "does not exist"
        raise UserError(f"Expected a run folder, but {shown(run)} {fault}. {give}")
    if _is_run(run):
        return
    try:
        instead = _what_it_is(run)
    except OSError as error:
        instead = f"it cannot be listed ({reason(error)})"
    raise UserError(
        f"{shown(run)} is not a run folder: expected cells.….parquet in it; {instead}. "
        f"{_runs_inside(run) or give}"
    )


def _is_run(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in RUN)


def _what_it_is(folder: Path) -> str:
    for name, words in OTHERS.items():
        if is_there(folder / name):
            return f"it is {words}"
    return "got other files" if any(folder.iterdir()) else "the folder is empty"


def _runs_inside(folder: Path) -> str:
    """Which runs lie in the folder, as advice; empty where none does."""
    try:
        entries = sorted(islice(folder.iterdir(), MOST_LOOKED_AT))
    except OSError:
        return ""
    inside = [path for path in entries if _is_run(path)]
    if not inside:
        return ""
    named = " ".join(shown(path) for path in inside[:NAMED])
    more = f" … ({len(inside)} in all)" if len(inside) > NAMED else ""
    return f"Give what lies in it: {named}{more}."
