"""Writes the results of `work` into the run folder, one by one, keeping what is there already."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.code_ledger import note_code
from mjp_privacy.experiment.inventory import Inventory
from mjp_privacy.experiment.source_code import SourceCode
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import BlockRead, BlockResult, ModelOpened, Result


@dataclass(frozen=True)
class Saver:
    """Writes the results of one command: call `begin` once, then `save` with every result."""

    store: RunStore
    inventory: Inventory
    planned: Sequence[CellFacts]  # all cells in table order, as known before any model was opened
    device: torch.device
    codes: Collection[SourceCode]  # that the cells are made by

    def begin(self) -> None:
        """List all planned cells and their code in the folder, before any of them has rows."""
        note_code(self.store.root, self.codes)
        self._save_cells([])

    def save(self, result: Result) -> None:
        """Write one result."""
        if isinstance(result, ModelOpened):
            self._save_cells(result.facts)
        elif isinstance(result, BlockRead):
            self.inventory.note(result.notes)
            self._save_time(result.facts, "decode", result.seconds, result.usable)
        elif isinstance(result, BlockResult):
            self._save_block(result)

    def _save_cells(self, facts: Sequence[CellFacts]) -> None:
        self.store.merge_cells([f.columns for f in facts], [f.columns for f in self.planned])

    def _save_block(self, result: BlockResult) -> None:
        """Rows are written last: an image with rows is finished, so its reconstruction is there.

        Images that another block's files hold are removed from these when they are safe here.
        """
        run_id, index, made = result.facts.run_id, result.block.index, result.made
        kept = result.before.kept.keys()
        order = [record.image_id for record in result.block.records]
        places = [at for at, image_id in enumerate(made.image_ids) if image_id not in kept]
        pictured = [made.image_ids[at] for at in places]
        without_picture = {*order} - {*pictured} - kept
        self.store.drop_reconstructions(run_id, index, without_picture)
        if pictured:
            tensors = {name: tensor[places] for name, tensor in made.tensors.items()}
            self.store.merge_reconstructions(run_id, index, tensors, pictured)
        for stage, seconds in made.seconds.items():
            self._save_time(result.facts, stage, seconds, result.images)
        rows = result.rows[~result.rows["image_id"].isin(list(kept))]
        self.store.merge_rows(run_id, index, [rows.assign(code=result.code)], order)
        for other, image_ids in result.before.elsewhere.items():
            self.store.drop_reconstructions(run_id, other, image_ids)
            self.store.drop_rows(run_id, other, image_ids)

    def _save_time(self, facts: CellFacts, stage: str, seconds: float, images: int) -> None:
        if images:
            self.store.append_timing(
                {
                    "run_id": facts.run_id,
                    "stage": stage,
                    "seconds": round(seconds, 6),
                    "images": images,
                    "device": str(self.device),
                    "threads": torch.get_num_threads(),
                }
            )
