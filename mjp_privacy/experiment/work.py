"""Carries out a plan: model by model, block of images by block, cell by cell.

    open the model -> read a block's images -> in every cell: observe, attack, score (`cell`)

Each result is yielded as soon as it is there, and `save` writes it down. A unit, one image in one
cell, is finished when its rows are on disk (`finished`). The config fixes the blocks, so a run that
was killed continues where it stopped and ends with the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from mjp_privacy.core.device import clock
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import Block, ImageNote
from mjp_privacy.experiment.cell import CellRows, CellWork
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.description import describe
from mjp_privacy.experiment.finished import Finished
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.rows import reasoned_rows
from mjp_privacy.experiment.source import BlockUploads, ModelUploads, UploadSource
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
    units: int  # number of images that were not finished before


Result = ModelOpened | BlockSkipped | BlockRead | BlockResult


def work(plan: Plan, source: UploadSource, finished: Finished) -> Iterator[Result]:
    """Do everything that is not finished, in the order of the config's models."""
    for model in plan.blocks:  # each in a function of its own, so that one is in memory at a time
        yield from _work_model(plan, source, model, finished)


def _work_model(
    plan: Plan, source: UploadSource, model: str, finished: Finished
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
            yield from (_not_run(of_cell, block, reason) for of_cell in facts.values())
        else:
            yield from _work_block(plan, opened, block, facts, finished)


def _not_run(facts: CellFacts, block: Block, reason: str) -> BlockResult:
    """Rows of a cell whose model could not be loaded."""
    rows = reasoned_rows(facts, dict.fromkeys(block.records, reason), "failed")
    return BlockResult(facts, block, rows, CellRows(rows), 0, len(block.records))


def _work_block(
    plan: Plan,
    opened: ModelUploads,
    block: Block,
    facts: Mapping[Cell, CellFacts],
    finished: Finished,
) -> Iterator[Result]:
    left = {cell: len(finished.left(facts[cell].run_id, block)) for cell in facts}
    yield BlockSkipped(sum(len(block.records) - units for units in left.values()))
    pending = [cell for cell, units in left.items() if units]
    if not pending:
        return
    device = opened.model.cls_token.device
    started = clock(device)
    uploads = opened.block(block)
    yield BlockRead(next(iter(facts.values())), uploads.notes, clock(device) - started)
    for cell in pending:
        yield _work_cell(plan, opened, uploads, block, cell, facts[cell], left[cell])


def _work_cell(
    plan: Plan,
    opened: ModelUploads,
    uploads: BlockUploads,
    block: Block,
    cell: Cell,
    facts: CellFacts,
    units: int,
) -> BlockResult:
    """One cell on the whole block, even if some of its images are finished.

    float32 results depend slightly on what is computed together, and those of a continued run must
    equal those of a run that never stopped.
    """
    unreadable = {note.record: note.reason for note in uploads.notes if note.reason}
    lost: dict[ImageRecord, str] = {**unreadable, **block.broken(unreadable, cell.client.batch)}
    usable = [record for record in block.records if record not in lost]
    reasons = {record: lost[record] for record in block.records if record in lost}
    parts = [reasoned_rows(facts, reasons, "failed")]
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
    return BlockResult(facts, block, rows, attacked, len(usable), units)
