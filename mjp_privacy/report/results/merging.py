"""Rows of several published files in one, so that models trained on several machines share a table.

    merge_published([Path("new.parquet"), Path("results/ablations/rows.parquet")], Path("all.parquet"))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mjp_privacy.report.results.columns import without_repetition
from mjp_privacy.report.results.rows import published_facts, write_rows


def merge_published(parts: Sequence[Path], path: Path) -> None:
    """Write the lines of all these files; a model that several of them hold is taken from the first.

    Lines are numbered anew, a run whose name is taken gets a number behind it, and the commits of
    all files from which lines were taken stand in the order of the files.
    """
    held: set[str] = set()
    runs: dict[str, dict[str, Any]] = {}
    frames: list[pd.DataFrame] = []
    entries: list[dict[str, Any]] = []
    commits: list[str] = []
    for part in parts:
        facts, frame = published_facts(part)
        chosen = [entry for entry in _lines(facts) if _model(entry) not in held]
        held |= {_model(entry) for entry in chosen}
        names = _named(facts["runs"], {entry["run"] for entry in chosen}, runs)
        by_line = dict(tuple(frame.groupby("line", sort=False)))
        for entry in chosen:
            number, run = len(entries) + 1, names[entry["run"]]
            entries.append({**entry, "number": number, "run": run})
            if entry["number"] in by_line:
                frames.append(by_line[entry["number"]].assign(line=np.int16(number), run=run))
        commits += facts["commit"].split(", ") if chosen else []
    facts = {
        "commit": ", ".join(dict.fromkeys(commits)),
        "runs": [*runs.values()],
        **without_repetition(entries),
    }
    write_rows(pd.concat(frames, ignore_index=True), facts, path)


def _lines(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of a file, each with all facts of its cell."""
    for entry in facts["lines"]:
        yield {**entry, "cell": {**facts["shared"], **entry["cell"]}}


def _model(entry: Mapping[str, Any]) -> str:
    return str(entry["cell"]["model"])


def _named(
    runs: Sequence[Mapping[str, Any]], used: set[str], taken: dict[str, dict[str, Any]]
) -> dict[str, str]:
    """What each used run of a file is called among those that are taken, to which it is added."""
    names = {}
    for run in runs:
        if run["name"] not in used:
            continue
        name, number = str(run["name"]), 1
        while name in taken and taken[name] != {**run, "name": name}:
            number += 1
            name = f"{run['name']}-{number}"
        taken[name] = {**run, "name": name}
        names[str(run["name"])] = name
    return names
