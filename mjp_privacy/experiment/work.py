"""A run's plan, cells and blocks of images, and who carries it out: model by model, block of images
by block, cell by cell.

    open the model -> read a block's images -> in every cell: attack and score (`cell`), write

A unit, one image in one cell, is finished when its row is on disk. A block is attacked whole, even
where some of its images are finished, so that a run that was killed ends with the same rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import pandas as pd

from attacks import ATTACKS
from attacks.budget import OVER
from mjp_privacy.core.errors import UserError, format_error, format_traceback
from mjp_privacy.core.machine import out_of_memory
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import shown
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.cell import (
    CellResult,
    CellTask,
    attack_cell,
    failed,
    without_scores,
)
from mjp_privacy.experiment.cell_facts import CellFacts, cell_key, describe
from mjp_privacy.experiment.code import SourceCode, SourceReader
from mjp_privacy.experiment.config import Cell, Experiment, expand
from mjp_privacy.experiment.diagnostics import RESIDUAL_OVER
from mjp_privacy.experiment.source import (
    IN_STEP_OF,
    Block,
    ModelUploads,
    UploadSource,
    refused_by_network,
)
from mjp_privacy.experiment.store import RunStore, Unit
from mjp_privacy.interfaces import Control
from mjp_privacy.models import LoadedModel

NO_MEMORY = "memory does not hold the model: expected more memory, or a smaller model"


@dataclass(frozen=True)
class Plan:
    """The cells of a run in table order, and each model's blocks of images."""

    experiment: Experiment
    cells: Sequence[Cell]
    blocks: Mapping[str, Sequence[Block]]  # by model, in the config's order

    @property
    def units(self) -> int:
        """The number of units: images, counted once in each cell."""
        return sum(len(self.images(cell.model)) for cell in self.cells)

    def images(self, model: str) -> list[str]:
        return [record.image_id for block in self.blocks[model] for record in block.records]

    def cells_of(self, model: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.model == model]

    def gradients(self, cell: Cell, model: LoadedModel) -> list[str]:
        """The parameters whose gradients this cell's clients upload.

        They are the union over all attacks that share the upload, finished or not, so that an
        interrupted run computes the same upload again; and the one that residuals are taken over.
        """
        names: list[str] = []
        for peer in self.cells:
            attack = peer.attacker
            if peer.federation != cell.federation or isinstance(attack, Control):
                continue
            if refused_by_network(peer, model) is not None:
                continue  # what it reads is not there
            try:
                needed = attack.needs(model)  # by anybody's code
                if isinstance(needed, str) or not all(isinstance(name, str) for name in needed):
                    got = shown(repr(needed), 100)
                    raise TypeError(f"needs: expected names of parameters, got {got}")
                names += needed
            except Exception:
                if peer is cell:  # another's mistake is that one's own failure
                    raise
        return list(dict.fromkeys([*names, RESIDUAL_OVER]))

    def groups(self, model: str) -> list[list[Cell]]:
        """The model's cells, those together that attack the same uploads: the work of one task.
        Those with the dearest attack come first, so that no worker is left alone with it."""
        groups: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.cells_of(model):
            groups.setdefault(cell.federation, []).append(cell)
        cost = {name: place for place, name in enumerate(ATTACKS)}

        def dearest(cells: list[Cell]) -> int:
            return max(cost.get(cell.attack.name, -1) for cell in cells)  # -1: a control

        return sorted(groups.values(), key=dearest, reverse=True)

    def needs_residual(self, cell: Cell, model: LoadedModel, *, scored: bool) -> bool:
        """Whether a cell's reconstructions are compared with their uploads by gradient, which costs
        as much as the uploads: where several attacks on the client as it trained compete for the
        attacker's choice, where there is no truth to score against, or where the config asks."""
        if "residual" in self.experiment.diagnostics or not scored:
            return True

        def met(peer: Cell) -> tuple[Any, ...] | None:
            """The client as it trained, if the peer's attack meets that."""
            altered = not peer.uploads or (
                peer.victim == "april_block" and model.first_block != "closed_form"
            )
            return None if altered else peer.federation[:-1]

        return met(cell) is not None and sum(met(peer) == met(cell) for peer in self.cells) > 1


def make_plan(experiment: Experiment, source: UploadSource) -> Plan:
    """Expand the grid into cells and cut each model's images into blocks of whole client steps.

    A cell that appears twice, or images that do not fill the blocks, are errors.
    """
    cells, keys = expand(experiment), set[str]()
    for cell in cells:
        if (key := cell_key(cell, experiment)) in keys:  # they would overwrite each other's rows
            raise UserError(
                f"The grid holds {cell.model}, setting {cell.setting}, gamma {cell.gamma}, "
                f"{cell.dtype}, {cell.attack.title} twice. Expected each cell once."
            )
        keys.add(key)
    used = {cell.model for cell in cells}
    blocks: dict[str, list[Block]] = {}
    for name in (name for name in experiment.models if name in used):
        records, size = source.records(name), experiment.block
        _check_blocks(name, len(records), [c for c in cells if c.model == name], size, source)
        starts = range(0, len(records), size)
        blocks[name] = [Block(n, records[at : at + size]) for n, at in enumerate(starts)]
    return Plan(experiment, cells, blocks)


def _check_blocks(
    name: str, images: int, cells: Sequence[Cell], size: int, source: UploadSource
) -> None:
    """Raise where images do not fill the client steps of a model, or where the last block of a
    simulated client that shuffles its images is one batch: its images would have the same partners
    in every round, as if they were fixed. Recorded clients are as they were."""
    multiple = math.lcm(*(cell.client.batch for cell in cells))
    shuffling = [] if source.recorded else [c for c in cells if c.client.partners == "fresh"]
    least = max((2 * cell.client.batch for cell in shuffling), default=0)

    def fits(number: int) -> bool:
        return number % multiple == 0 and (number % size == 0 or number % size >= least)

    if not fits(images):
        advised = next(n for n in chain(range(images, 0, -1), count(images + 1)) if fits(n))
        batches = ", ".join(map(str, sorted({cell.client.batch for cell in cells})))
        raise UserError(
            f"{images} images do not fill blocks of {size} with the client steps of {name} "
            f"(client.batch {batches}; a client with partners: fresh needs two steps in each). "
            f"Expected another number of images, such as --limit {advised}."
        )


# carrying it out ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class News:
    """What is told of a block: of one of its cells once its rows are on disk, or of a worker's
    task."""

    where: str = ""  # model, setting and precision, as they are shown
    units: int = 0  # images that were attacked
    finished: int = 0  # images that were finished before
    messages: Sequence[tuple[str, str]] = ()
    """What is said of it, each with the traceback that goes into the log, or ""."""
    lost: str = ""  # the model and the block of a task that nobody finished
    error: str = ""  # why, in one line; for a fault its traceback
    storage: int = 0
    """The system's number of the error where a disk did not take what was written: that ends the
    run, and `error` says which file it was."""


class OpenModel:
    """A model of the plan, loaded or not, and the facts of its cells.

    What goes wrong is told by its rows, for other models still run: `uploads` is None then,
    `reason` says why, and `trace` is the traceback, where it is no user's mistake.
    """

    def __init__(self, plan: Plan, source: UploadSource, name: str) -> None:
        self.name, self.reason, self.trace = name, "", ""
        self.uploads: ModelUploads | None = None
        try:
            self.uploads = source.open(name)
        except UserError as error:
            self.reason = str(error)
        except Exception as error:
            if interrupted():
                raise
            self.reason = NO_MEMORY if out_of_memory(error) else format_error(error)
            self.trace = format_traceback(error)
        loaded = None if self.uploads is None else self.uploads.model
        self.facts: Mapping[Cell, CellFacts] = {
            cell: describe(cell, plan.experiment, source, loaded, self.reason)
            for cell in plan.cells_of(name)
        }


@dataclass
class Worker:
    """What does a plan's work in one process: Worker(experiment, source, store, ...).

    again: whether images that other code finished are done again
    """

    experiment: Experiment
    source: UploadSource
    store: RunStore
    made_with: Mapping[str, str | int]
    """Software and machine, which stand in the metadata of every file."""
    again: bool = False
    opened: OpenModel | None = None
    known: dict[str, dict[str, Unit]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Plan the work, and see which code would do it; recorded uploads were made before."""
        self.plan, reader = make_plan(self.experiment, self.source), SourceReader()
        made_before = self.source.recorded
        self.codes: Mapping[Cell, SourceCode] = {
            cell: reader.code_of(cell.attack.name, () if made_before else cell.client.defenses)
            for cell in self.plan.cells
        }

    def open(self, name: str) -> OpenModel:
        """The model of this name; the one before is forgotten first, so that one is in memory."""
        if self.opened is None or self.opened.name != name:
            self.opened = None
            self.opened = OpenModel(self.plan, self.source, name)
        return self.opened

    def finished(self, run_id: str) -> dict[str, Unit]:
        """The finished images of a cell, as they were when it was first asked for."""
        if run_id not in self.known:
            self.known[run_id] = self.store.finished(run_id)
        return self.known[run_id]

    def of_other_code(self, run_ids: Mapping[Cell, str]) -> dict[Cell, set[str]]:
        """The cells that hold finished images of other code, each with the digests of that code;
        "": it was not recorded."""
        made: dict[Cell, set[str]] = {}
        for cell, run_id in run_ids.items():
            known, images = self.finished(run_id), self.plan.images(cell.model)
            digests = {known[name].code for name in images if name in known}
            made[cell] = digests - {self.codes[cell].digest}
        return {cell: digests for cell, digests in made.items() if digests}

    def left(self, opened: OpenModel, block: Block, cell: Cell) -> list[str]:
        """The images of a block that are to be done in a cell: they have no rows, failed, were made
        by other code if that is not to stay, were ended after less time than there is now, or now
        have another attack beside theirs that they are to be compared with."""
        known, code = self.finished(opened.facts[cell].run_id), self.codes[cell].digest
        compares = self._compares(opened, cell)
        allowed = math.inf if cell.attack.seconds is None else cell.attack.seconds
        return [
            name
            for name in (record.image_id for record in block.records)
            if (unit := known.get(name)) is None
            or 0 < unit.late < allowed
            or (compares and not unit.compared)
            or (self.again and unit.code != code)
        ]

    def _compares(self, opened: OpenModel, cell: Cell) -> bool:
        """Whether the cell's reconstructions are compared with their uploads by gradient."""
        uploads = opened.uploads
        return uploads is not None and self.plan.needs_residual(
            cell, uploads.model, scored=uploads.scored
        )

    def work_block(self, opened: OpenModel, block: Block, cells: Sequence[Cell]) -> Iterator[News]:
        """Do what is not finished of one block in these cells of a model."""
        left = {cell: self.left(opened, block, cell) for cell in cells}
        images, uploads = len(block.records), opened.uploads
        if done := sum(images - len(ids) for ids in left.values()):
            yield News(opened.name, finished=done)
        pending = [cell for cell in cells if left[cell]]
        error: Exception | None = None
        seconds = 0.0
        if pending and uploads is not None:
            try:
                seconds = uploads.open(block)
            except Exception as caught:  # other blocks still run
                if interrupted() or out_of_memory(caught):
                    raise
                error = caught
        for cell in pending:
            if error is not None:
                result = failed(block.records, error)
            elif uploads is not None:
                result = self._work_cell(opened, uploads, block, cell)
                if seconds:
                    result.rows["stage_seconds.decode"] = seconds / images
                    seconds = 0.0
            else:
                result = without_scores(block.records, "failed", opened.reason)
                reasons = self.source.reasons(opened.name)
                own = [reasons.get(record.image_id, opened.reason) for record in block.records]
                result.rows["reason"] = own
            self._write(opened, cell, block, result, left[cell])
            where = f"{opened.name} {cell.setting} {cell.dtype}"
            messages = [(result.remark, "")] if result.remark else []
            for reason, text in result.traces.items():
                messages.append((f"{where}, block {block.index}: FAILED. {reason}.", text))
            yield News(where, len(left[cell]), messages=messages)

    def _work_cell(
        self, opened: OpenModel, uploads: ModelUploads, block: Block, cell: Cell
    ) -> CellResult:
        """One cell on a block: rows of the images that cannot be used, and of those attacked."""
        unusable = {note.record: note for note in uploads.notes if note.reason}
        lost: dict[ImageRecord, str] = {record: note.reason for record, note in unusable.items()}
        for start in range(0, len(block.records), cell.client.batch):
            step = block.records[start : start + cell.client.batch]
            bad = [record.image_id for record in step if record in unusable]
            reason = f"{IN_STEP_OF} {', '.join(bad)}, which cannot be used"
            lost |= {record: reason for record in step if bad and record not in unusable}
        usable = [record for record in block.records if record not in lost]
        # a file that is no image has no pixels, in contrast to one whose upload is faulty
        no_image = any(not note.pixel_sha256 for note in unusable.values())
        status = "unreadable" if no_image else "failed"
        rows = without_scores(block.records, status, "").rows
        rows["reason"] = [lost.get(record, "") for record in block.records]
        if not usable:
            return CellResult(rows)
        try:
            gradients: Sequence[str] = ()
            if refused_by_network(cell, uploads.model) is None:
                gradients = self.plan.gradients(cell, uploads.accuracy_model(cell, "intact"))
            compares = self._compares(opened, cell)
            task = CellTask(uploads, cell, gradients, opened.facts[cell], compares)
        except Exception as error:  # of the attack's own `needs`, or of a copy of the model
            if interrupted():
                raise
            result = failed(usable, error)
        else:
            result = attack_cell(task, usable)
        if not lost:
            return result
        places = [at for at, record in enumerate(block.records) if record not in lost]
        attacked = result.rows.set_axis(places)
        whole = pd.concat([rows.drop(index=places), attacked]).sort_index()
        return replace(result, rows=whole)

    def _write(
        self,
        opened: OpenModel,
        cell: Cell,
        block: Block,
        result: CellResult,
        left: Sequence[str],
    ) -> None:
        """Write the rows and pictures of the images that were left to be done, and of those that
        were made again beside them."""
        records, facts, code = block.records, opened.facts[cell], self.codes[cell]
        notes = {note.record: note for note in opened.uploads.notes} if opened.uploads else {}
        known = [notes.get(record) for record in records]
        of_image = pd.DataFrame(
            {
                "image_id": [record.image_id for record in records],
                "label": pd.array([record.label for record in records], dtype="Int64"),
                "label_source": [
                    "prediction" if r.label is None else r.label_source for r in records
                ],
                "group": [record.group for record in records],
                "sha256": ["" if note is None else note.sha256 for note in known],
                "pixel_sha256": ["" if note is None else note.pixel_sha256 for note in known],
                "code": code.digest,
            }
        )
        rows = pd.concat([of_image, result.rows.reset_index(drop=True)], axis=1)
        # Numbers move with the images they are computed with, so that all rows of a block should
        # be of one attack on it: what this code finished before and has now made as well goes, too.
        # What failed now, or was ended by less time, stays as it was.
        finished = self.finished(facts.run_id)
        well = rows["status"].isin(("ok", "unscored"))
        if f"{OVER}.diagnostic" in rows:
            well &= rows[f"{OVER}.diagnostic"] != 1
        made = rows.loc[well, "image_id"]
        again = [name for name in made if name in finished and finished[name].code == code.digest]
        wanted = {*left, *again}
        rows = rows[rows["image_id"].isin(wanted)].assign(run_id=facts.run_id)
        pictures = {name: of for name, of in result.pictures.items() if name in wanted}
        about = {
            "cell": facts.columns,
            "code": {code.digest: dict(code.files)},
            "made_with": dict(self.made_with),
            "compared": self._compares(opened, cell),
            "written": time.time(),
        }
        self.store.write(facts.run_id, block.index, rows, pictures, about)
