"""Read run folders as lines of a table, with a message for every way a folder can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from mjp_privacy.client.recorded.groups import REFUSED
from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.damage import fault_lines, find_damage
from mjp_privacy.experiment.damaged_lists import damaged_lists
from mjp_privacy.experiment.image_names import Images
from mjp_privacy.experiment.places import check_places
from mjp_privacy.experiment.row_files import LeftOut
from mjp_privacy.experiment.score_table import JoinedTable, ScoreTable
from mjp_privacy.experiment.store import ROW_COLUMNS, RunStore
from mjp_privacy.report.folders import check_folders, run_names
from mjp_privacy.report.line import Line

__all__ = ["Line", "Loaded", "load_runs"]

AGAIN = "Run the attack again; it continues where it stopped."


@dataclass(frozen=True)
class Loaded:
    """The lines of all runs, how long their stages took, and what else of the runs is damaged."""

    lines: Sequence[Line]
    timings: pd.DataFrame
    remarks: Sequence[str] = ()

    @property
    def many_runs(self) -> bool:
        """Whether the lines come from more than one run, so that tables need a column for it."""
        return len({line.run for line in self.lines}) > 1


def load_runs(runs: Sequence[Path]) -> Loaded:
    """Lines of all runs, concatenated in the order given."""
    check_folders(runs)
    lines: list[Line] = []
    timings, remarks = [], []
    for run, name in zip(runs, run_names(runs), strict=True):
        check_places(run)
        store = RunStore(run)
        cells = _read_cells(store)
        damage = find_damage(store, [cell.run_id for cell in cells if cell.run_id])
        loaded = [
            _line(store, name, cell, len(lines) + i, damage.left_out(cell.run_id))
            for i, cell in enumerate(cells, 1)
        ]
        if all(not line.stored and line.cell.outcome.status == "ok" for line in loaded):
            if damage.faults:
                fault = "; ".join(fault_lines(store, damage.faults, 1))
                raise UserError(f"{run}: all of its rows are damaged ({fault}). {AGAIN}")
            raise UserError(
                f"{run} is an empty run: expected rows of its {len(cells)} cell(s) under "
                f"{run / 'rows'}, but there are none. {AGAIN}"
            )
        lines += [line for line in loaded if not _is_refused(line)]
        remarks += _refused(name, loaded)
        said, times = _lists(store)
        timings.append(times.assign(run=name))
        remarks += [f"DAMAGED: {name}: {words}" for words in (*damage.remarks, *said)]
    return Loaded(lines, pd.concat(timings, ignore_index=True), remarks)


def _refused(name: str, lines: Sequence[Line]) -> list[str]:
    """A sentence for uploads that could not be attacked: they are no client's line."""
    count = sum(line.cell.outcome.planned_images for line in lines if _is_refused(line))
    if not count:
        return []
    return [
        f"REFUSED: {name}: {count} upload(s) could not be attacked and are in no figure. "
        "`mjp check` names what is wrong with each; mended, the same attack takes them in."
    ]


def _is_refused(line: Line) -> bool:
    return line.cell.model.label == REFUSED


def _lists(store: RunStore) -> tuple[list[str], pd.DataFrame]:
    """What is damaged of the files beside the rows, and how long stages took."""
    said = list(damaged_lists(store))
    try:
        return said, store.read_timings()
    except BadFile:  # which was said
        return said, pd.DataFrame()


def _read_cells(store: RunStore) -> list[CellFacts]:
    cells = store.read_cells()
    if not cells:
        raise UserError(
            f"{store.root} is an empty run: expected at least one cell in cells.json, but there is "
            "none. Run the attack again, with at least one model, setting and attack."
        )
    return [CellFacts.read(cell) for cell in cells]


def _line(store: RunStore, name: str, cell: CellFacts, number: int, left_out: LeftOut) -> Line:
    table = _table(store, cell.run_id, left_out)
    unreadable = table.unreadable
    outcome = cell.outcome
    left = max(0, outcome.planned_images - len(unreadable))
    counted = replace(cell, outcome=replace(outcome, planned_images=left))
    if unreadable:
        readable = Images.of(image for image in table.images.ids if image not in unreadable)
        table = JoinedTable([table], readable)
    return Line(number, name, counted, table, store, unreadable=unreadable, left_out=left_out)


def _table(store: RunStore, run_id: str, left_out: LeftOut) -> ScoreTable:
    """The rows of a cell by metric, if they can be read and hold what they should."""
    folder = store.rows_folder(run_id)
    try:
        table, columns = store.score_table(run_id, left_out)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise UserError(
            f"The rows in {folder} cannot be read ({error}). Delete that folder and run the attack "
            "again; only this cell is computed again."
        ) from error
    missing = [column for column in ROW_COLUMNS if column not in columns]
    if missing:
        raise UserError(
            f"The rows in {folder} lack the column(s) {', '.join(missing)}. They were written by "
            "another version: delete that folder and run the attack again."
        )
    if table.twice:
        image, (metric, variant) = table.twice
        raise UserError(
            f"Expected one row per image and metric, but {folder} holds image "
            f"{image!r} twice for {metric} ({variant}). Delete that folder "
            "and run the attack again."
        )
    return table
