"""Read run folders as lines of a table, with a message for every way a folder can be wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from mjp_privacy.client.recorded.groups import REFUSED
from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.coded import Images
from mjp_privacy.models.tensor_files import check_digest
from mjp_privacy.report.folders import check_folders, run_names
from mjp_privacy.report.line import Line
from mjp_privacy.report.scores import STAGE, JoinedTable, ScoreTable, cell_scores

__all__ = ["Line", "Loaded", "load_runs"]

AGAIN = "Run the attack again; it continues where it stopped."
EXPERIMENT = FileKind("the experiment of a run", "Run the attack again.", 1 << 24)


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
        damaged = RunStore(run).damaged()
        store = RunStore(run).without(damaged)
        cells = _read_cells(store)
        loaded = [_line(store, name, cell, len(lines) + i) for i, cell in enumerate(cells, 1)]
        if all(not line.stored and line.cell.outcome.status == "ok" for line in loaded):
            _refuse_empty(store, loaded)
        lines += [line for line in loaded if not _is_refused(line)]
        remarks += _refused(name, loaded)
        timings += [_timings(line) for line in loaded]
        remarks += [f"DAMAGED: {name}: {words}" for words in _damaged_lists(store)]
    return Loaded(lines, pd.concat(timings, ignore_index=True), remarks)


def _refuse_empty(store: RunStore, lines: Sequence[Line]) -> None:
    damaged = [path for line in lines for path in line.left_out]
    if damaged:
        place = shown(damaged[0].relative_to(store.root))
        raise UserError(f"{store.root}: all of its rows are damaged ({place}). {AGAIN}")
    raise UserError(
        f"{store.root} is an empty run: expected rows of its {len(lines)} cell(s) under "
        f"{store.root / 'rows'}, but there are none. {AGAIN}"
    )


def _refused(name: str, lines: Sequence[Line]) -> list[str]:
    """A sentence for uploads that could not be attacked: they are no client's line."""
    cells = [line.cell for line in lines if _is_refused(line)]  # one for each attack
    count = max((cell.outcome.planned_images for cell in cells), default=0)
    if not count:
        return []
    return [
        f"REFUSED: {name}: {count} upload(s) could not be attacked and are in no figure. "
        "`mjp check` names what is wrong with each; mended, the same attack takes them in."
    ]


def _is_refused(line: Line) -> bool:
    return line.cell.model.label == REFUSED


def _damaged_lists(store: RunStore) -> Iterator[str]:
    """A sentence for each damaged file beside the rows."""
    for path in sorted(store.left_out):
        if path.parent == store.root:
            yield f"{shown(path.name)}: cells are those that rows tell of; a run lists them again"
    for path in (store.root / "experiment.yaml", *sorted((store.root / "experiments").glob("*"))):
        try:
            if is_there(path):
                check_digest(path, EXPERIMENT, needed=False)
        except BadFile as error:
            place = shown(path.relative_to(store.root))
            yield f"{place} ({error.got}): the run of that experiment writes it again"


def _read_cells(store: RunStore) -> list[CellFacts]:
    cells = store.read_cells()
    if not cells:
        raise UserError(
            f"{store.root} is an empty run: expected at least one cell in its list, but there is "
            "none. Run the attack again, with at least one model, setting and attack."
        )
    return [CellFacts.read(cell) for cell in cells]


def _line(store: RunStore, name: str, cell: CellFacts, number: int) -> Line:
    table: ScoreTable = cell_scores(store, cell.run_id)
    unreadable = table.unreadable
    outcome = cell.outcome
    left = max(0, outcome.planned_images - len(unreadable))
    counted = replace(cell, outcome=replace(outcome, planned_images=left))
    if unreadable:
        readable = Images.of(image for image in table.images.ids if image not in unreadable)
        table = JoinedTable([table], readable)
    folder = store.folder(cell.run_id)
    damaged = sorted(path for path in store.left_out if path.parent == folder)
    return Line(number, name, counted, table, store, unreadable=unreadable, left_out=damaged)


def _timings(line: Line) -> pd.DataFrame:
    """A row for each block and stage: how many seconds an image took, and on what device.

    The images of a block share its time equally.
    """
    names = [n for n in line.store.cell(line.run_id).columns if n.startswith(STAGE)]
    if not names:
        return pd.DataFrame()
    blocks = line.store.read(line.run_id, ["block", *names]).groupby("block")[names]
    seconds, images = blocks.mean(), blocks.count()
    made_with = line.store.about(line.run_id)[-1].get("made_with", {})
    return pd.concat(
        pd.DataFrame(
            {"stage": name.removeprefix(STAGE), "seconds": seconds[name], "images": images[name]}
        )
        for name in names
    ).assign(line=line.number, device=made_with.get("device", ""))
