"""Read run folders as lines of a table, with a message for every way a folder can be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import ROW_COLUMNS, RunStore

REQUIRED = ("run_id", "model", "setting", "gamma", "attack", "dtype", "seed", "status")
"""Columns that every cell must have, so that its line can be told from the others."""

MARKS = {
    "floor": " (control)",
    "ceiling": " (control)",
    "worst_case": " (oracle selection)",
}
"""Suffix of the attack's name on lines that are not attacks, by role."""


@dataclass(frozen=True)
class Line:
    """One line of the table: a cell of a run and the rows stored for it.

    Images that could not be read have no part in `rows` nor in the number of planned images: they
    say nothing of what leaks, and a share that counted them would flatter the client.
    """

    number: int  # from 1, over all runs; the notes refer to it
    run: str  # name of the run folder, made unique
    cell: CellFacts
    rows: pd.DataFrame
    store: RunStore
    unreadable: pd.DataFrame = field(default_factory=pd.DataFrame, kw_only=True)
    """The stored rows of images that could not be read."""

    @property
    def run_id(self) -> str:
        """The cell's id inside its run, which is also the name of the folder of its rows."""
        return self.cell.run_id

    @property
    def label(self) -> str:
        """Model, setting and attack in words, such as `DeiT-S (a) april`."""
        return f"{self.cell.model.label} ({self.cell.setting}) {self.title}"

    @property
    def role(self) -> str:
        """`attack`; `floor` or `ceiling` for a control; the rule's name for a derived line."""
        return self.cell.attack.role

    @property
    def attack(self) -> str:
        """What tables call the attack."""
        return self.cell.attack.title

    @property
    def title(self) -> str:
        """The attack's label, with a mark on lines that are not attacks."""
        return f"{self.attack}{MARKS.get(self.role, '')}"

    @property
    def uploads(self) -> int:
        """How many uploads the attack uses."""
        return self.cell.attack.uploads or 1

    @property
    def stored(self) -> bool:
        """Whether any rows are stored."""
        return len(self.rows) + len(self.unreadable) > 0

    @property
    def status(self) -> str:
        """The cell's status; `failed` where a cell marked ok has no rows: its run was cut off."""
        if self.cell.outcome.status == "ok" and self.rows.empty:
            return "failed"
        return self.cell.outcome.status

    @property
    def reason(self) -> str:
        """Why the line has no scores, even if it has diagnostics; empty if it has some."""
        if self.cell.outcome.reason:
            return self.cell.outcome.reason
        if self.rows.empty and len(self.unreadable):
            return "none of its images could be read"
        if self.rows.empty:
            return "no rows stored: the run ended before this cell; run the same command again"
        scores = self.rows[self.rows["variant"] != "diagnostic"]
        return "" if (scores["status"] == "ok").any() else self._commonest_reason()

    def _commonest_reason(self) -> str:
        reasons = Counter(self.rows["reason"].dropna().astype(str))
        reasons.pop("", None)
        return min(reasons, key=lambda reason: (-reasons[reason], reason), default="")

    @cached_property
    def by_metric(self) -> dict[tuple[str, str], pd.DataFrame]:
        """Rows by (metric, variant), sorted by image so that the order of writing has no effect."""
        ordered = self.rows.sort_values("image_id", kind="stable")
        return {
            (str(metric), str(variant)): part
            for (metric, variant), part in ordered.groupby(["metric", "variant"], sort=False)
        }

    def scores(self, metric: str, variant: str) -> pd.DataFrame:
        """Rows of one metric; empty where it was not computed."""
        rows = self.by_metric.get((metric, variant))
        return self.rows.head(0) if rows is None else rows

    @cached_property
    def reductions(self) -> dict[object, Any]:
        """What was computed from the rows before, by what was asked; rows never change."""
        return {}

    def scored(self, metric: str, variant: str) -> pd.Series[float]:
        """The metric's value by image_id, for the images that have one."""
        key = "scored", metric, variant
        if key not in self.reductions:
            self.reductions[key] = self._scored(metric, variant)
        values: pd.Series[float] = self.reductions[key]
        return values

    def _scored(self, metric: str, variant: str) -> pd.Series[float]:
        rows = self.scores(metric, variant)
        rows = rows.loc[(rows["status"] == "ok") & rows["value"].notna()]
        values: pd.Series[float] = pd.Series(
            rows["value"].to_numpy(dtype=float), index=rows["image_id"].astype(str)
        )
        return values

    def reconstruction(self, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image by kind; None where none were stored."""
        return self.store.find_reconstruction(self.run_id, image_id)

    @cached_property
    def groups(self) -> dict[str, str] | None:
        """Photograph by image_id, where several images were cut from the same one; else None."""
        if "group" not in self.rows or self.rows["group"].isna().all():
            return None
        images = self.rows.drop_duplicates("image_id")
        photographs = images["group"].fillna(images["image_id"])
        if photographs.nunique() == len(photographs):
            return None
        return dict(zip(images["image_id"].astype(str), photographs.astype(str), strict=True))


@dataclass(frozen=True)
class Loaded:
    """The lines of all runs, and how long their stages took."""

    lines: Sequence[Line]
    timings: pd.DataFrame

    @property
    def many_runs(self) -> bool:
        """Whether the lines come from more than one run, so that tables need a column for it."""
        return len({line.run for line in self.lines}) > 1


def load_runs(runs: Sequence[Path]) -> Loaded:
    """Lines of all runs, concatenated in the order given."""
    _check_folders(runs)
    lines: list[Line] = []
    timings = []
    for run, name in zip(runs, _names(runs), strict=True):
        store = RunStore(run)
        cells = _read_cells(store)
        loaded = [_line(store, name, cell, len(lines) + i) for i, cell in enumerate(cells, 1)]
        if all(not line.stored and line.cell.outcome.status == "ok" for line in loaded):
            raise UserError(
                f"{run} is an empty run: expected rows of its {len(cells)} cell(s) under "
                f"{run / 'rows'}, but there are none. Run the attack again; it continues where it "
                "stopped."
            )
        lines += loaded
        timings.append(store.read_timings().assign(run=name))
    return Loaded(lines, pd.concat(timings, ignore_index=True))


def _check_folders(runs: Sequence[Path]) -> None:
    if not runs:
        raise UserError("Expected one or more run folders, got none. Give the --out of a run.")
    seen: dict[Path, Path] = {}
    for run in runs:
        if not run.is_dir():
            fault = "is a file" if run.exists() else "does not exist"
            raise UserError(
                f"Expected a run folder, but {run} {fault}. Give the folder that was the --out of "
                "`mjp attack`."
            )
        first = seen.setdefault(run.resolve(), run)
        if first is not run:
            raise UserError(
                f"Expected different runs, but {run} is the same folder as {first}: its lines "
                "would be in the table twice. Name it once."
            )


def _names(runs: Sequence[Path]) -> list[str]:
    names = [run.resolve().name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [str(run) for run in runs]


def _read_cells(store: RunStore) -> list[CellFacts]:
    cells = store.read_cells()
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise UserError(
            f"{store.root / 'cells.json'} cannot be read: expected a list of cells. "
            "Run the attack again."
        )
    if not cells:
        raise UserError(
            f"{store.root} is an empty run: expected at least one cell in cells.json, but there is "
            "none. Run the attack again, with at least one model, setting and attack."
        )
    for cell in cells:
        missing = [key for key in REQUIRED if key not in cell]
        if missing:
            raise UserError(
                f"A cell in {store.root / 'cells.json'} lacks {', '.join(missing)}; expected "
                f"{', '.join(REQUIRED)}. It was written by another version: run the attack again."
            )
    return [CellFacts.read(cell) for cell in cells]


def _line(store: RunStore, name: str, cell: CellFacts, number: int) -> Line:
    run_id = cell.run_id
    folder = store.root / "rows" / run_id
    try:
        rows = store.read_rows(run_id)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise UserError(
            f"The rows in {folder} cannot be read ({error}). Delete that folder and run the attack "
            "again; only this cell is computed again."
        ) from error
    missing = [column for column in ROW_COLUMNS if column not in rows]
    if missing:
        raise UserError(
            f"The rows in {folder} lack the column(s) {', '.join(missing)}. They were written by "
            "another version: delete that folder and run the attack again."
        )
    twice = rows[rows.duplicated(["image_id", "metric", "variant"])]
    if len(twice):
        row = twice.iloc[0]
        raise UserError(
            f"Expected one row per image and metric, but {folder} holds image "
            f"{row['image_id']!r} twice for {row['metric']} ({row['variant']}). Delete that folder "
            "and run the attack again."
        )
    no_image = rows["status"] == "unreadable"
    unreadable = rows[no_image].reset_index(drop=True)
    outcome = cell.outcome
    left = max(0, outcome.planned_images - unreadable["image_id"].nunique())
    counted = replace(cell, outcome=replace(outcome, planned_images=left))
    rows = rows[~no_image].reset_index(drop=True)
    return Line(number, name, counted, rows, store, unreadable=unreadable)
