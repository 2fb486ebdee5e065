"""Rows of several published files in one, as merge_published([new, published], path_of_all).

So models that were trained on several machines share a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.report.results.columns import without_repetition
from mjp_privacy.report.results.rows import published_facts, write_rows

IMAGES = ("data", "planned_images")
"""Facts of a cell that all lines of a table must share, for its models are compared."""

Facts = dict[str, Any]


def merge_published(
    parts: Sequence[Path],
    path: Path,
    *,
    of_first: Collection[str] | None = None,
    order: Sequence[str] = (),
) -> None:
    """Write the lines of all these files; a model that several hold is taken from the first.

    of_first  the models that are taken from the first file; all of it if not given
    order     models in the order that their lines shall have; others follow as the files have them

    Lines are numbered anew. A run whose name a later file has as well gets a number behind it, and
    keeps the commits of its own file.
    """
    chosen: list[tuple[int, Facts]] = []  # (part, line)
    held: set[str] = set()
    files = [published_facts(part) for part in parts]
    for number, (facts, _) in enumerate(files):
        wanted = of_first if number == 0 else None
        lines = [
            line
            for line in _lines(facts)
            if _model(line) not in held and (wanted is None or _model(line) in wanted)
        ]
        held |= {_model(line) for line in lines}
        chosen += [(number, line) for line in lines]
    _check_images([line for _, line in chosen], parts)
    places = {model: place for place, model in enumerate(order)}
    chosen.sort(key=lambda item: places.get(_model(item[1]), len(places)))
    runs = _named_runs(files, {(number, line["run"]) for number, line in chosen})
    rows = [dict(tuple(frame.groupby("line", sort=False))) for _, frame in files]
    frames: list[pd.DataFrame] = []
    entries: list[Facts] = []
    for place, (number, line) in enumerate(chosen, 1):
        name = runs[number, line["run"]]["name"]
        entries.append({**line, "number": place, "run": name})
        if line["number"] in rows[number]:
            frames.append(rows[number][line["number"]].assign(line=np.int16(place), run=name))
    commits = (commit for run in runs.values() for commit in run["commits"].split(", "))
    facts = {
        "commit": ", ".join(dict.fromkeys(commits)),
        "runs": [*runs.values()],
        **without_repetition(entries),
    }
    write_rows(pd.concat(frames, ignore_index=True), facts, path)


def _lines(facts: Mapping[str, Any]) -> Iterator[Facts]:
    """The lines of a file, each with all facts of its cell."""
    for line in facts["lines"]:
        yield {**line, "cell": {**facts["shared"], **line["cell"]}}


def _model(line: Mapping[str, Any]) -> str:
    return str(line["cell"]["model"])


def _check_images(lines: Sequence[Mapping[str, Any]], parts: Sequence[Path]) -> None:
    for name in IMAGES:
        values = {line["cell"].get(name) for line in lines}
        if len(values) > 1:
            got = " and ".join(sorted(map(repr, values)))
            raise UserError(
                f"{', '.join(map(shown, parts))}: expected rows of the same images, got {name} "
                f"{got}. Attack the same images, or publish into another folder."
            )


def _named_runs(
    files: Sequence[tuple[Facts, pd.DataFrame]], used: Collection[tuple[int, str]]
) -> dict[tuple[int, str], Facts]:
    """The used runs by (file, name there), each with its name among all and its own commits.

    Runs of the last file keep their names, so that a run that is published once is called the same
    for good.
    """
    named: dict[tuple[int, str], Facts] = {}
    taken: set[str] = set()
    for number, (facts, _) in reversed([*enumerate(files)]):
        for run in facts["runs"]:
            if (number, run["name"]) not in used:
                continue
            name, count = str(run["name"]), 1
            while name in taken:
                count += 1
                name = f"{run['name']}-{count}"
            taken.add(name)
            commits = run.get("commits") or facts["commit"]
            named[number, run["name"]] = {**run, "name": name, "commits": commits}
    return named
