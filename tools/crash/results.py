"""What a command has left, in a form that two runs can be compared by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.loading import load_runs

Results = Mapping[str, Any]

CLOCK = ("timing", "check")
"""Fields of a line of metrics.jsonl that the clock decides: the checksum counts the seconds."""
"""By name of a row, a picture or a file: its value, or its content's digest."""


def results(command: str, out: Path) -> Results:
    """All that counts of a command's output; empty for commands that write nothing."""
    if command == "attack":
        return {**rows(out), **pictures(out)}
    if command == "train":
        return {**digests(out, "model.safetensors"), **journal(out)}
    if command == "federate":
        attacked = {**rows(out / "attack"), **pictures(out / "attack")}
        kept = digests(out, "model.safetensors", "uploads/*/*", "uploads/*/*/*")
        return {**kept, **journal(out), **attacked}
    if command in ("score", "sample", "fit-prior"):
        return digests(out, "*", "*/*")
    if command == "report":
        return digests(out, "table.md", "table.csv", "samples.csv", "pictures/*/*/*.png")
    return {}


def rows(run: Path) -> Results:
    """Every row of a run by cell, image, metric and variant: its value, status and reason."""
    store = RunStore(run)
    cells = (str(cell["run_id"]) for cell in store.read_cells())
    return {k: v for run_id in cells for k, v in _rows(run_id, store.read_rows(run_id)).items()}


def _rows(run_id: str, table: pd.DataFrame) -> Results:
    every = {}
    for row in table.to_dict("records"):
        key = "/".join([run_id, *(str(row[name]) for name in ("image_id", "metric", "variant"))])
        every[f"row {key}"] = json.dumps({str(k): repr(v) for k, v in row.items()}, sort_keys=True)
    return every


def pictures(run: Path) -> Results:
    """The digest of every stored tensor of a run by cell, image and name."""
    store = RunStore(run)
    every: dict[str, Any] = {}
    for run_id in (str(cell["run_id"]) for cell in store.read_cells()):
        for image in store.reconstructed(run_id):
            every |= _picture(run_id, image, store.find_reconstruction(run_id, image))
    return every


def _picture(run_id: str, image: str, stored: Mapping[str, Tensor] | None) -> Results:
    return {
        f"picture {run_id}/{image}/{name}": hashlib.sha256(
            tensor.contiguous().numpy().tobytes()
        ).hexdigest()
        for name, tensor in (stored or {}).items()
    }


def shown(run: Path) -> Results:
    """What a report of the run would show now: nothing where it refuses the run with a word."""
    try:
        lines = load_runs([run]).lines
        seen: dict[str, Any] = {}
        for line in lines:
            seen |= _rows(line.run_id, line.rows)
            for image in line.images.ids:
                seen |= _picture(line.run_id, image, line.reconstruction(image))
    except UserError:
        return {}
    return seen


def journal(out: Path) -> Results:
    """The lines of metrics.jsonl without what the clock says."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {f"line {at}": {**line, **dict.fromkeys(CLOCK)} for at, line in enumerate(lines)}


def digests(out: Path, *patterns: str) -> Results:
    """The digests of the files of these names."""
    paths = {path for pattern in patterns for path in out.glob(pattern) if path.is_file()}
    return {
        f"file {path.relative_to(out)}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
    }


def differences(before: Results, now: Results) -> list[str]:
    """Names whose values differ, or that only one of the two has."""
    names = before.keys() | now.keys()
    return sorted(name for name in names if before.get(name) != now.get(name))


def wrong(before: Results, now: Results) -> list[str]:
    """Names whose values are others than before; what is missing is not wrong."""
    return sorted(name for name in now if name in before and before[name] != now[name])
