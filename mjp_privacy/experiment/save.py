"""Writes what `work` makes into the run folder, keeping what is there already.

Rows and pictures of a block are written by whoever made them (`write_block`), everything that is
about the whole run by one process alone (`RunLedger`).
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from mjp_privacy.core.errors import StorageError
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.code_ledger import note_code
from mjp_privacy.experiment.inventory import Inventory
from mjp_privacy.experiment.messages import BlockRead, CellDone, Message, ModelOpened
from mjp_privacy.experiment.source_code import SourceCode
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import BlockResult, Result


def written(store: RunStore, results: Iterable[Result]) -> Generator[Message, None, None]:
    """The same results as messages; the rows and pictures of each are on disk when it is given."""
    for result in results:
        if isinstance(result, BlockResult):
            write_block(store, result)
            yield result.message()
        else:
            yield result


def write_block(store: RunStore, result: BlockResult) -> None:
    """Write one cell's rows and pictures of one block.

    Rows are written last, and name their pictures: an image with rows is finished, so its
    reconstruction is there.
    """
    run_id, index, made = result.facts.run_id, result.block.index, result.made
    kept = result.before.kept.keys()
    order = [record.image_id for record in result.block.records]
    places = [at for at, image_id in enumerate(made.image_ids) if image_id not in kept]
    pictured = [made.image_ids[at] for at in places]
    tensors = {name: tensor[places] for name, tensor in made.tensors.items()}
    without = {*order} - {*pictured} - kept
    store.leave_whole(run_id, index)
    store.pictures.put(run_id, index, tensors, pictured, without)
    rows = result.rows[~result.rows["image_id"].isin(list(kept))]
    store.merge_rows(run_id, index, [rows.assign(code=result.code)], order)


@dataclass(frozen=True)
class RunLedger:
    """Writes what is about a whole run: call `begin` once, then `save` with every message.

    at_once: whether images that another block's files hold too are removed there as soon as they
    are safe; otherwise `end` removes them, because somebody else may be writing these files
    """

    store: RunStore
    inventory: Inventory
    planned: Sequence[CellFacts]  # all cells in table order, as known before any model was opened
    device: torch.device
    threads: int  # of each process that works
    codes: Collection[SourceCode]  # that the cells are made by
    at_once: bool = True
    _moved: list[CellDone] = field(default_factory=list, init=False)
    _done: set[tuple[str, int]] = field(default_factory=set, init=False)
    """run_id and block of all rows that were written."""

    def begin(self) -> None:
        """List all planned cells and their code in the folder, before any of them has rows."""
        note_code(self.store.root, self.codes)
        self._save_cells([])

    def save(self, message: Message) -> None:
        """Write what one message says."""
        if isinstance(message, ModelOpened):
            self._save_cells(message.facts)
        elif isinstance(message, BlockRead):
            self.inventory.note(message.notes)
            self._save_time(message.run_id, "decode", message.seconds, message.usable)
        elif isinstance(message, CellDone):
            for stage, seconds in message.seconds.items():
                self._save_time(message.run_id, stage, seconds, message.images)
            self._done.add((message.run_id, message.block))
            self._moved.append(message)
            if self.at_once:
                self._clear_moved()

    def end(self) -> None:
        """Remove images from files of blocks that they no longer belong to; a StorageError where
        somebody has taken away what was written."""
        self._clear_moved()
        paths = (self.store.rows_path(run_id, block) for run_id, block in sorted(self._done))
        if lost := [path for path in paths if not path.is_file()]:
            raise StorageError(
                f"{len(lost)} file(s) of rows were deleted while the command worked, such as "
                f"{shown(lost[0])}",
                errno.ENOENT,
            )

    def _clear_moved(self) -> None:
        while self._moved:
            done = self._moved.pop(0)
            for other, image_ids in done.elsewhere.items():
                self.store.drop_images(done.run_id, other, image_ids)

    def _save_cells(self, facts: Sequence[CellFacts]) -> None:
        self.store.merge_cells([f.columns for f in facts], [f.columns for f in self.planned])

    def _save_time(self, run_id: str, stage: str, seconds: float, images: int) -> None:
        if images:
            self.store.append_timing(
                {
                    "run_id": run_id,
                    "stage": stage,
                    "seconds": round(seconds, 6),
                    "images": images,
                    "device": str(self.device),
                    "threads": self.threads,
                }
            )
