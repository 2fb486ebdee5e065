"""Carries out a plan: model by model, block of images by block, cell by cell.

    open the model -> read a block's images -> in every cell: observe, attack, score (`cell`)

Each result is yielded as soon as it is there, and `save` writes it down. A unit, one image in one
cell, is finished when its rows are on disk (`finished`). The config fixes the blocks, so a run that
was killed continues where it stopped and ends with the same rows. Each result names its code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from mjp_privacy.core.device import clock
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import Block, ImageNote
from mjp_privacy.experiment.cell import CellRows, CellWork
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.description import describe
from mjp_privacy.experiment.finished import UNRECORDED, BlockState, Finished
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.rows import reasoned_rows
from mjp_privacy.experiment.source import BlockUploads, ModelUploads, UploadSource
from mjp_privacy.experiment.source_code import SourceCode
from mjp_privacy.models.checkpoints import CheckpointReport


@dataclass(frozen=True)
class ModelOpened:
    """A model was loaded, or could not be: now all facts of its cells are known."""

    model: str
    facts: Sequence[CellFacts]
    report: CheckpointReport | None  # None: it could not be loaded
    reason: str = ""  # why not


@dataclass(frozen=True)
class BlockSkipped:
    """Units of a block that an earlier command finished."""

    units: int
    of_other_code: Mapping[str, int] = field(default_factory=dict)
    """How many of them other code made, by run_id of their cell."""
    unrecorded: Mapping[str, int] = field(default_factory=dict)
    """How many were made by code that was not recorded, by run_id of their cell."""


@dataclass(frozen=True)
class BlockRead:
    """A block's images were read."""

    facts: CellFacts  # of the block's first cell, under which the time is recorded
    notes: Sequence[ImageNote]
    seconds: float

    @property
    def usable(self) -> int:
        """How many of the images can be attacked."""
        return sum(not note.reason for note in self.notes)


@dataclass(frozen=True)
class BlockResult:
    """What one cell has for one block."""

    facts: CellFacts
    block: Block
    rows: pd.DataFrame  # of all images of the block, also of those that could not be attacked
    made: CellRows  # of the images that were attacked
    images: int  # number of images that were attacked
    before: BlockState  # what was on disk
    code: str  # the digest of the code that made it

    @property
    def units(self) -> int:
        """Number of images that were not finished before."""
        return self.before.left


Result = ModelOpened | BlockSkipped | BlockRead | BlockResult


Codes = Mapping[Cell, SourceCode]


def work(plan: Plan, source: UploadSource, finished: Finished, codes: Codes) -> Iterator[Result]:
    """Do everything that is not finished, in the order of the config's models.

    codes: the code that makes each cell's results
    """
    for model in plan.blocks:  # each in a function of its own, so that one is in memory at a time
        yield from _work_model(plan, source, model, finished, codes)


def _work_model(
    plan: Plan, source: UploadSource, model: str, finished: Finished, codes: Codes
) -> Iterator[Result]:
    opened: ModelUploads | None = None
    reason = ""
    try:
        opened = source.open(model)
    except UserError as error:
        reason = str(error)
    loaded = None if opened is None else opened.model
    facts = {
        cell: describe(cell, plan.experiment, plan.attacks[cell], source, loaded, reason)
        for cell in plan.cells_of(model)
    }
    report = None if loaded is None else loaded.card.checkpoint
    yield ModelOpened(model, list(facts.values()), report, reason)
    for block in plan.blocks[model]:
        if opened is None:
            for cell, of_cell in facts.items():
                yield _not_run(of_cell, block, reason, codes[cell].digest)
        else:
            yield from _work_block(plan, opened, block, facts, finished, codes)


def _not_run(facts: CellFacts, block: Block, reason: str, code: str) -> BlockResult:
    """Rows of a cell whose model could not be loaded."""
    rows = reasoned_rows(facts, dict.fromkeys(block.records, reason), "failed")
    nothing = BlockState(len(block.records))
    return BlockResult(facts, block, rows, CellRows(rows), 0, nothing, code)


def _work_block(
    plan: Plan,
    opened: ModelUploads,
    block: Block,
    facts: Mapping[Cell, CellFacts],
    finished: Finished,
    codes: Codes,
) -> Iterator[Result]:
    states = {
        cell: finished.state(of_cell.run_id, block, codes[cell].digest)
        for cell, of_cell in facts.items()
    }
    yield BlockSkipped(
        sum(len(block.records) - state.left for state in states.values()),
        of_other_code=_kept(states, facts, recorded=True),
        unrecorded=_kept(states, facts, recorded=False),
    )
    pending = [cell for cell, state in states.items() if state.left]
    if not pending:
        return
    device = opened.model.cls_token.device
    started = clock(device)
    uploads = opened.block(block)
    yield BlockRead(next(iter(facts.values())), uploads.notes, clock(device) - started)
    for cell in pending:
        yield _work_cell(
            plan, opened, uploads, block, cell, facts[cell], states[cell], codes[cell].digest
        )


def _kept(
    states: Mapping[Cell, BlockState], facts: Mapping[Cell, CellFacts], *, recorded: bool
) -> dict[str, int]:
    """The number of kept images of each cell, by its run_id: those whose code was recorded, or the
    others; cells without any are left out."""
    numbers = {
        facts[cell].run_id: sum(
            (digest != UNRECORDED) == recorded for digest in state.kept.values()
        )
        for cell, state in states.items()
    }
    return {run_id: number for run_id, number in numbers.items() if number}


def _work_cell(
    plan: Plan,
    opened: ModelUploads,
    uploads: BlockUploads,
    block: Block,
    cell: Cell,
    facts: CellFacts,
    state: BlockState,
    code: str,
) -> BlockResult:
    """One cell on the whole block, even if some of its images are finished.

    float32 results depend slightly on what is computed together, and those of a continued run must
    equal those of a run that never stopped.
    """
    unusable = {note.record: note.reason for note in uploads.notes if note.reason}
    lost: dict[ImageRecord, str] = {**unusable, **block.broken(unusable, cell.client.batch)}
    usable = [record for record in block.records if record not in lost]
    reasons = {record: lost[record] for record in block.records if record in lost}
    no_image = any(note.unreadable for note in uploads.notes)
    parts = [reasoned_rows(facts, reasons, "unreadable" if no_image else "failed")]
    gradients = plan.gradients(cell, opened.model)
    attacked = CellRows(parts[0])
    if usable:
        task = CellWork(uploads, opened.model, cell, plan.attacks[cell], gradients, facts)
        try:
            attacked = task.run(usable)
        except UserError as error:  # such as images too small to score; other cells still run
            attacked = task.failed(usable, str(error))
        parts.append(attacked.rows)
    rows = pd.concat([part for part in parts if len(part)], ignore_index=True)
    return BlockResult(facts, block, rows, attacked, len(usable), state, code)
