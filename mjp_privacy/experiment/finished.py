"""Which units are finished, and by which code: a unit is one image in one cell.

It is finished when its rows are on disk and none of them failed. Rows name the code that made them
(`source_code`). Those of versions that did not record it have UNRECORDED in its place: they count
as finished, and as made by other code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.stored_units import read_units

UNRECORDED = ""
"""What stands for the digest of code that was not recorded."""


@dataclass(frozen=True)
class BlockState:
    """What a run folder holds of one cell's block."""

    left: int  # number of images that are to be done
    kept: Mapping[str, str] = field(default_factory=dict)
    """Images that other code finished and that are not to be done again, with its digest."""
    elsewhere: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Images that files of other blocks hold, by block: the run's images were others then. Where
    the block is done, they are to be removed there."""


class Finished:
    """The finished units of a run folder; each cell's rows are read once, when first asked for.

    again: whether units that other code finished are to be done again
    """

    def __init__(self, store: RunStore, *, again: bool = False) -> None:
        self.store, self.again = store, again
        self._cells: dict[str, Mapping[str, Mapping[int, str]]] = {}

    def state(self, run_id: str, block: Block, code: str) -> BlockState:
        """What is there of the block in the cell of this run_id, which this code would do now."""
        by_image = self._finished(run_id)
        kept = {} if self.again else self.of_other_code(run_id, block, code)
        elsewhere: dict[int, frozenset[str]] = {}
        for image_id in [record.image_id for record in block.records]:
            for index in by_image.get(image_id, {}):
                if index != block.index and image_id not in kept:
                    elsewhere[index] = elsewhere.get(index, frozenset()) | {image_id}
        return BlockState(len(self.left(run_id, block, code)), kept, elsewhere)

    def left(self, run_id: str, block: Block, code: str = UNRECORDED) -> list[ImageRecord]:
        """The images of the block that are to be done: their rows are missing, failed, or stand in
        two files, which a killed run can leave behind."""
        by_image = self._finished(run_id)
        done = {image_id for image_id, blocks in by_image.items() if len(blocks) == 1}
        if self.again:
            done -= self.of_other_code(run_id, block, code).keys()
        return [record for record in block.records if record.image_id not in done]

    def of_other_code(self, run_id: str, block: Block, code: str) -> dict[str, str]:
        """The images of the block that other code finished, with that code's digest, or UNRECORDED
        if it is not known which code it was."""
        by_image = self._finished(run_id)
        blocks = {record.image_id: by_image.get(record.image_id, {}) for record in block.records}
        made_by = {name: next(iter(of.values())) for name, of in blocks.items() if len(of) == 1}
        return {name: digest for name, digest in made_by.items() if digest != code}

    def codes(self) -> set[str]:
        """The digests of all code that finished units of the folder, whatever command ran it."""
        cells = [self._finished(run_id) for run_id in self.store.stored_cells()]
        digests = {code for cell in cells for blocks in cell.values() for code in blocks.values()}
        return digests - {UNRECORDED}

    def _finished(self, run_id: str) -> Mapping[str, Mapping[int, str]]:
        """{image_id: {block whose file holds finished rows of it: digest of their code}}."""
        if run_id not in self._cells:
            by_image: dict[str, dict[int, str]] = {}
            for unit in read_units(self.store.row_files(run_id)):
                if not unit.failed:
                    by_image.setdefault(unit.image_id, {})[unit.block] = unit.code
            self._cells[run_id] = by_image
        return self._cells[run_id]
