"""Which units are finished: a unit is one image in one cell, finished when its rows are on disk and
none of them failed."""

from __future__ import annotations

from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.store import RunStore


class Finished:
    """The finished units of a run folder; each cell's rows are read once, when first asked for."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._images: dict[str, set[str]] = {}

    def left(self, run_id: str, block: Block) -> list[ImageRecord]:
        """The images of the block whose rows are missing or failed in the cell of this run_id."""
        if run_id not in self._images:
            rows = self.store.read_rows(run_id)
            failed = rows["status"] == "failed"
            self._images[run_id] = set(rows.loc[~failed, "image_id"]) - set(
                rows.loc[failed, "image_id"]
            )
        return [r for r in block.records if r.image_id not in self._images[run_id]]
