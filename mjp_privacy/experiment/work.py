"""A plan carried out: model by model, block of images by block, cell by cell.

    open the model -> read a block's images -> in every cell: observe, attack, score

What is done is handed out piece by piece; `save` writes it down. A unit, one image in one cell, is
finished when its rows are on disk (`finished`). Blocks are fixed by the config, so a killed run
goes on where it stopped and ends with the same rows.
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
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.description import describe
from mjp_privacy.experiment.facts import CellFacts
from mjp_privacy.experiment.finished import Finished
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.rows import reasoned_rows
from mjp_privacy.experiment.source import BlockUploads, ModelUploads, UploadSource
from mjp_privacy.models.checkpoints import CheckpointReport


@dataclass(frozen=True)
class ModelOpened:
    """A model's cells are definite: their facts, and how its checkpoint was read or why not."""

    model: str
    facts: Sequence[CellFacts]
    report: CheckpointReport | None
    reason: str = ""


@dataclass(frozen=True)
class BlockSkipped:
    """Units that an earlier command finished."""

    units: int


@dataclass(frozen=True)
class BlockRead:
    """A block's images were read."""

    facts: CellFacts  # of the first of its cells
    notes: Sequence[ImageNote]
    seconds: float

    @property
    def usable(self) -> int:
        return sum(not note.reason for note in self.notes)


@dataclass(frozen=True)
class BlockResult:
    """One cell's rows of one block."""

    facts: CellFacts
    block: Block
    rows: pd.DataFrame
    made: CellRows
    images: int  # that were attacked
    units: int  # that were not finished before


Result = ModelOpened | BlockSkipped | BlockRead | BlockResult


def work(plan: Plan, source: UploadSource, finished: Finished) -> Iterator[Result]:
    """Everything that is not finished, in the order of the config's models."""
    for model, blocks in plan.blocks.items():
        cells = plan.cells_of(model)
        opened: ModelUploads | None
        try:
            opened, reason = source.open(model), ""
        except UserError as error:
            opened, reason = None, str(error)
        loaded = None if opened is None else opened.model
        facts = {
            cell: describe(cell, plan.experiment, plan.attacks[cell], source, loaded, reason)
            for cell in cells
        }
        report = None if loaded is None else loaded.card.checkpoint
        yield ModelOpened(model, list(facts.values()), report, reason)
        for block in blocks:
            if opened is None:
                yield from (_not_run(facts[cell], block, reason) for cell in cells)
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
    left = {cell: len(finished.left(known.run_id, block)) for cell, known in facts.items()}
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
    """The whole block, also where some of its images are finished: their float32 numbers move
    with the batch, and must be those of a run that never stopped."""
    unreadable = {note.record: note.reason for note in uploads.notes if note.reason}
    lost: dict[ImageRecord, str] = {**unreadable, **block.broken(unreadable, cell.client.batch)}
    usable = [record for record in block.records if record not in lost]
    reasons = {record: lost[record] for record in block.records if record in lost}
    parts = [reasoned_rows(facts, reasons, "failed")]
    gradients = plan.gradients(cell, opened.model)
    made = CellRows(parts[0])
    if usable:
        one = CellWork(uploads, opened.model, cell, plan.attacks[cell], gradients, facts)
        try:
            made = one.run(usable)
        except UserError as error:  # such as images too small to score: the other cells run
            made = one.failed(usable, str(error))
        parts.append(made.rows)
    rows = pd.concat([part for part in parts if len(part)], ignore_index=True)
    return BlockResult(facts, block, rows, made, len(usable), units)
