"""Carries out a plan: model by model, block of images by block, cell by cell.

    open the model -> read a block's images -> in every cell: observe, attack, score (`cell`)

Each result is given as soon as it is there, and `save` writes it down. A unit, one image in one
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
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.cell import CellRows, CellWork
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.description import describe
from mjp_privacy.experiment.finished import UNRECORDED, BlockState, Finished
from mjp_privacy.experiment.in_parts import InParts
from mjp_privacy.experiment.messages import BlockRead, BlockSkipped, CellDone, ModelOpened
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.rows import reasoned_rows
from mjp_privacy.experiment.source import BlockUploads, ModelUploads, UploadSource
from mjp_privacy.experiment.source_code import SourceCode


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
    remark: str = ""  # what is said of it while the run goes on

    def message(self) -> CellDone:
        """What is told of it once it is on disk."""
        facts = self.facts
        refused = self.rows.loc[self.rows["status"] == "unsupported", ["image_id", "reason"]]
        reasons = refused.drop_duplicates()["reason"].astype(str).value_counts(sort=False)
        return CellDone(
            run_id=facts.run_id,
            model=facts.model.label,
            setting=facts.setting,
            dtype=facts.dtype,
            block=self.block.index,
            units=self.before.left,
            images=self.images,
            failed={record.image_id: reason for record, reason in self.made.failed.items()},
            refused={str(reason): int(count) for reason, count in reasons.items()},
            seconds=dict(self.made.seconds),
            remark=self.remark,
            elsewhere={block: sorted(ids) for block, ids in self.before.elsewhere.items()},
        )


Result = ModelOpened | BlockSkipped | BlockRead | BlockResult


Codes = Mapping[Cell, SourceCode]


@dataclass(frozen=True)
class OpenModel:
    """A model of the plan, loaded or not, and the facts of its cells."""

    name: str
    uploads: ModelUploads | None  # None: it could not be loaded
    facts: Mapping[Cell, CellFacts]
    reason: str = ""  # why it could not be loaded
    together: dict[str, int] = field(default_factory=dict)
    """How many images of a cell are computed together where memory does not hold a block, by
    run_id; learnt while the run goes on."""

    @staticmethod
    def of(plan: Plan, source: UploadSource, name: str) -> OpenModel:
        """Load a model."""
        uploads: ModelUploads | None = None
        reason = ""
        try:
            uploads = source.open(name)
        except UserError as error:
            reason = str(error)
        loaded = None if uploads is None else uploads.model
        facts = {
            cell: describe(cell, plan.experiment, plan.attacks[cell], source, loaded, reason)
            for cell in plan.cells_of(name)
        }
        return OpenModel(name, uploads, facts, reason)

    def message(self) -> ModelOpened:
        """What is told of it."""
        report = None if self.uploads is None else self.uploads.model.card.checkpoint
        return ModelOpened(self.name, list(self.facts.values()), report, self.reason)


def work(plan: Plan, source: UploadSource, finished: Finished, codes: Codes) -> Iterator[Result]:
    """Do everything that is not finished, in the order of the config's models.

    codes: the code that makes each cell's results
    """
    for model in plan.blocks:  # each in a function of its own, so that one is in memory at a time
        yield from _work_model(plan, source, model, finished, codes)


def _work_model(
    plan: Plan, source: UploadSource, model: str, finished: Finished, codes: Codes
) -> Iterator[Result]:
    opened = OpenModel.of(plan, source, model)
    yield opened.message()
    for block in plan.blocks[model]:
        yield from work_block(plan, opened, block, finished, codes)


def work_block(
    plan: Plan, opened: OpenModel, block: Block, finished: Finished, codes: Codes
) -> Iterator[Result]:
    """Do what is not finished of one block in all cells of a model."""
    if opened.uploads is None:
        for cell, facts in opened.facts.items():
            yield _not_run(facts, block, opened.reason, codes[cell].digest)
        return
    states = {
        cell: finished.state(facts.run_id, block, codes[cell].digest)
        for cell, facts in opened.facts.items()
    }
    yield skipped(opened, block, states)
    if pending := [cell for cell, state in states.items() if state.left]:
        yield from _work_cells(plan, opened, opened.uploads, block, codes, states, pending)


def skipped(opened: OpenModel, block: Block, states: Mapping[Cell, BlockState]) -> BlockSkipped:
    """What is told of the units of a block that are finished."""
    return BlockSkipped(
        sum(len(block.records) - state.left for state in states.values()),
        of_other_code=_kept(states, opened.facts, recorded=True),
        unrecorded=_kept(states, opened.facts, recorded=False),
    )


def _work_cells(
    plan: Plan,
    opened: OpenModel,
    model: ModelUploads,
    block: Block,
    codes: Codes,
    states: Mapping[Cell, BlockState],
    pending: Sequence[Cell],
) -> Iterator[Result]:
    device = model.model.cls_token.device
    started = clock(device)
    uploads = model.block(block)
    first = next(iter(opened.facts.values()))
    yield BlockRead(first.run_id, uploads.notes, clock(device) - started)
    for cell in pending:
        yield _work_cell(plan, opened, uploads, block, cell, states[cell], codes[cell].digest)


def _not_run(facts: CellFacts, block: Block, reason: str, code: str) -> BlockResult:
    """Rows of a cell whose model could not be loaded."""
    rows = reasoned_rows(facts, dict.fromkeys(block.records, reason), "failed")
    nothing = BlockState(len(block.records))
    return BlockResult(facts, block, rows, CellRows(rows), 0, nothing, code)


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
    opened: OpenModel,
    uploads: BlockUploads,
    block: Block,
    cell: Cell,
    state: BlockState,
    code: str,
) -> BlockResult:
    """One cell on the whole block, even if some of its images are finished.

    float32 results depend slightly on what is computed together, and those of a continued run must
    equal those of a run that never stopped.
    """
    assert opened.uploads is not None
    model, facts = opened.uploads.model, opened.facts[cell]
    unusable = {note.record: note.reason for note in uploads.notes if note.reason}
    lost: dict[ImageRecord, str] = {**unusable, **block.broken(unusable, cell.client.batch)}
    usable = [record for record in block.records if record not in lost]
    reasons = {record: lost[record] for record in block.records if record in lost}
    no_image = any(note.unreadable for note in uploads.notes)
    parts = [reasoned_rows(facts, reasons, "unreadable" if no_image else "failed")]
    gradients = plan.gradients(cell, model)
    attacked = CellRows(parts[0])
    remark = ""
    if usable:
        task = CellWork(uploads, model, cell, plan.attacks[cell], gradients, facts)
        in_parts = InParts(task, opened.together)
        try:
            attacked = in_parts.run(usable)
        except UserError as error:  # such as images too small to score; other cells still run
            attacked = task.failed(usable, str(error))
        parts.append(attacked.rows)
        remark = in_parts.remark
    rows = pd.concat([part for part in parts if len(part)], ignore_index=True)
    return BlockResult(facts, block, rows, attacked, len(usable), state, code, remark)
