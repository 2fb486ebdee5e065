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

from mjp_privacy.core.errors import UserError, format_error, format_traceback
from mjp_privacy.core.machine import clock, out_of_memory
from mjp_privacy.core.stop import interrupted
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.cell import CellRows, CellWork
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.description import describe
from mjp_privacy.experiment.finished import UNRECORDED, BlockState, Finished
from mjp_privacy.experiment.in_parts import InParts, joined
from mjp_privacy.experiment.messages import BlockRead, BlockSkipped, CellDone, ModelOpened
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.refusals import refused_by_network
from mjp_privacy.experiment.rows import reasoned_rows
from mjp_privacy.experiment.source import (
    BlockUploads,
    EachRefused,
    ModelUploads,
    UploadSource,
)
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
            traces=dict(self.made.traces),
        )


NO_MEMORY = "memory does not hold the model: expected more memory, or a smaller model"

Result = ModelOpened | BlockSkipped | BlockRead | BlockResult


Codes = Mapping[Cell, SourceCode]


@dataclass(frozen=True)
class OpenModel:
    """A model of the plan, loaded or not, and the facts of its cells."""

    name: str
    uploads: ModelUploads | None  # None: it could not be loaded
    facts: Mapping[Cell, CellFacts]
    reason: str = ""  # why it could not be loaded
    trace: str = ""  # the traceback, where it is no user's mistake
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Where images have reasons of their own: why each of them cannot be attacked, by image_id."""
    together: dict[str, int] = field(default_factory=dict)
    """How many images of a cell are computed together where memory does not hold a block, by
    run_id; learnt while the run goes on."""

    @staticmethod
    def of(plan: Plan, source: UploadSource, name: str) -> OpenModel:
        """Load a model."""
        uploads: ModelUploads | None = None
        reason, traceback, reasons = "", "", dict[str, str]()
        try:
            uploads = source.open(name)
        except EachRefused as error:
            reason, reasons = str(error), dict(error.reasons)
        except UserError as error:
            reason = str(error)
        except Exception as error:  # other models still run
            if interrupted():
                raise
            reason = NO_MEMORY if out_of_memory(error) else format_error(error)
            traceback = format_traceback(error)
        loaded = None if uploads is None else uploads.model
        facts = {
            cell: describe(cell, plan.experiment, plan.attacks[cell], source, loaded, reason)
            for cell in plan.cells_of(name)
        }
        return OpenModel(name, uploads, facts, reason, traceback, reasons)

    def message(self) -> ModelOpened:
        """What is told of it."""
        report = None if self.uploads is None else self.uploads.model.card.checkpoint
        return ModelOpened(self.name, list(self.facts.values()), report, self.reason, self.trace)


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
            yield _not_run(facts, block, opened, codes[cell].digest)
        return
    states = {
        cell: finished.state(facts.run_id, block, codes[cell].digest, cell.attack.seconds)
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
    device = model.model.like.device
    started = clock(device)
    try:
        uploads = model.block(block)
    except Exception as error:  # other blocks still run
        if interrupted() or out_of_memory(error):
            raise
        for cell in pending:
            yield _not_read(opened.facts[cell], block, error, states[cell], codes[cell].digest)
        return
    first = next(iter(opened.facts.values()))
    yield BlockRead(first.run_id, uploads.notes, clock(device) - started)
    for cell in pending:
        yield _work_cell(plan, opened, uploads, block, cell, states[cell], codes[cell].digest)


def _not_run(facts: CellFacts, block: Block, opened: OpenModel, code: str) -> BlockResult:
    """Rows of a cell whose model could not be loaded, or whose images were refused."""
    own = opened.reasons
    reasons = {record: own.get(record.image_id, opened.reason) for record in block.records}
    rows = reasoned_rows(facts, reasons, "failed")
    failed = {record: why for record, why in reasons.items() if record.image_id in own}
    nothing = BlockState(len(block.records))
    return BlockResult(facts, block, rows, CellRows(rows, failed=failed), 0, nothing, code)


def _not_read(
    facts: CellFacts, block: Block, error: Exception, state: BlockState, code: str
) -> BlockResult:
    """Rows of a cell whose block of images could not be read."""
    reason, traceback = _said(error)
    reasons = dict.fromkeys(block.records, reason)
    rows = reasoned_rows(facts, reasons, "failed")
    made = CellRows(rows, failed=reasons, traces={reason: traceback} if traceback else {})
    return BlockResult(facts, block, rows, made, 0, state, code)


def _said(error: Exception) -> tuple[str, str]:
    """The reason that rows give, and the traceback where it is no user's mistake."""
    return (
        (str(error), "")
        if isinstance(error, UserError)
        else (format_error(error), format_traceback(error))
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
    facts = opened.facts[cell]
    unusable = {note.record: note.reason for note in uploads.notes if note.reason}
    lost: dict[ImageRecord, str] = {**unusable, **block.broken(unusable, cell.client.batch)}
    usable = [record for record in block.records if record not in lost]
    reasons = {record: lost[record] for record in block.records if record in lost}
    no_image = any(note.unreadable for note in uploads.notes)
    parts = [reasoned_rows(facts, reasons, "unreadable" if no_image else "failed")]
    attacked = CellRows(parts[0])
    remark = ""
    if usable:
        attacked, remark = _attacked(plan, opened, uploads, cell, usable)
        parts.append(attacked.rows)
    rows = pd.concat([part for part in parts if len(part)], ignore_index=True)
    return BlockResult(facts, block, rows, attacked, len(usable), state, code, remark)


def _attacked(
    plan: Plan,
    opened: OpenModel,
    uploads: BlockUploads,
    cell: Cell,
    records: Sequence[ImageRecord],
) -> tuple[CellRows, str]:
    """What a cell has for these images, and what is said of it. If that fails, it is tried for
    each client step alone: what one image, attack or defence breaks stays with it."""
    assert opened.uploads is not None
    model, facts, attack = opened.uploads.model, opened.facts[cell], plan.attacks[cell]
    gradients: Sequence[str] = ()
    try:
        if refused_by_network(cell, model, attack) is None:
            gradients = plan.gradients(cell, uploads.accuracy_model(cell, "intact"))
    except Exception as error:  # of the attack's own `needs`
        task = CellWork(uploads, model, cell, attack, (), facts)
        return task.failed(records, *_said(error)), ""
    task = CellWork(uploads, model, cell, attack, gradients, facts)
    in_parts = InParts(task, opened.together)
    try:
        return in_parts.run(records), in_parts.remark
    except Exception as error:
        if interrupted() or out_of_memory(error):
            raise
        batch = cell.client.batch
        if len(records) == batch or cell.client.undivided:
            return task.failed(records, *_said(error)), in_parts.remark
    steps = [records[at : at + batch] for at in range(0, len(records), batch)]
    alone = [_attacked(plan, opened, uploads, cell, step) for step in steps]
    return joined([rows for rows, _ in alone]), next((said for _, said in alone if said), "")
