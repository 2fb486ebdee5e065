"""Which units are finished, and by which code: a unit is one image in one cell.

It is finished when its rows are on disk and none of them failed. Rows name the code that made them
(`source_code`). Those of versions that did not record it have UNRECORDED in its place: they count
as finished, and as made by other code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.damage import Damage
from mjp_privacy.experiment.image_names import Images
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.stored_units import StoredUnit, read_units
from mjp_privacy.metrics.coded import Coded

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
    damage: what is damaged of the folder, if it was examined: units in it are not finished
    """

    def __init__(
        self, store: RunStore, *, again: bool = False, damage: Damage | None = None
    ) -> None:
        self.store, self.again = store, again
        self.damage = damage or Damage({})
        self._cells: dict[str, _CellUnits] = {}

    def state(
        self, run_id: str, block: Block, code: str, seconds: float | None = None
    ) -> BlockState:
        """What is there of the block in the cell of this run_id, which this code would do now.

        seconds: how long its attack may take over an image; None: any time
        """
        by_image = self._finished(run_id)
        kept = {} if self.again else self.of_other_code(run_id, block, code)
        elsewhere: dict[int, frozenset[str]] = {}
        for image_id in [record.image_id for record in block.records]:
            for index in by_image.get(image_id):
                if index != block.index and image_id not in kept:
                    elsewhere[index] = elsewhere.get(index, frozenset()) | {image_id}
        return BlockState(len(self.left(run_id, block, code, seconds)), kept, elsewhere)

    def left(
        self,
        run_id: str,
        block: Block,
        code: str = UNRECORDED,
        seconds: float | None = None,
    ) -> list[ImageRecord]:
        """The images of the block that are to be done: their rows are missing, failed, or stand in
        two files, which a killed run can leave behind; or the attack was ended after less time
        than it has now."""
        by_image = self._finished(run_id)
        ids = [record.image_id for record in block.records]
        done = {image_id for image_id in ids if len(by_image.get(image_id)) == 1}
        allowed = math.inf if seconds is None else seconds
        if by_image.late:
            done -= {name for name in ids if by_image.late.get(name, math.inf) < allowed}
        if self.again:
            done -= self.of_other_code(run_id, block, code).keys()
        return [record for record in block.records if record.image_id not in done]

    def of_other_code(self, run_id: str, block: Block, code: str) -> dict[str, str]:
        """The images of the block that other code finished, with that code's digest, or UNRECORDED
        if it is not known which code it was."""
        by_image = self._finished(run_id)
        blocks = {record.image_id: by_image.get(record.image_id) for record in block.records}
        made_by = {name: next(iter(of.values())) for name, of in blocks.items() if len(of) == 1}
        return {name: digest for name, digest in made_by.items() if digest != code}

    def images(self) -> set[str]:
        """The images with finished units in the folder, whatever command made them."""
        run_ids = self.store.stored_cells()
        return {image_id for run_id in run_ids for image_id in self._finished(run_id).images.ids}

    def codes(self) -> set[str]:
        """The digests of all code that finished units of the folder, whatever command ran it."""
        run_ids = self.store.stored_cells()
        return {code for run_id in run_ids for code in self._finished(run_id).codes} - {UNRECORDED}

    def _finished(self, run_id: str) -> _CellUnits:
        """By image: {block whose file holds finished rows of it: digest of their code}."""
        if run_id not in self._cells:
            left_out = self.damage.left_out(run_id)
            parts, blocks = left_out.files_left(self.store.rows_folder(run_id))
            units = (unit for unit in read_units(parts, blocks) if not unit.failed)
            whole = (unit for unit in units if unit.block not in left_out.blocks)
            self._cells[run_id] = _CellUnits.of(whole)
        return self._cells[run_id]


@dataclass(frozen=True)
class _CellUnits:
    """The finished units of one cell, in few bytes each: a run has millions."""

    images: Images
    blocks: NDArray[np.int32]
    made_by: Coded
    several: Mapping[str, Mapping[int, str]]
    """Images that several blocks hold, which a killed run can leave behind."""
    late: Mapping[str, float]
    """Images at which the attack was ended for lack of time, with the seconds that it had."""

    @classmethod
    def of(cls, units: Iterable[StoredUnit]) -> _CellUnits:
        """The units of a cell, in any order."""
        known: dict[str, StoredUnit] = {}
        several: dict[str, dict[int, str]] = {}
        for unit in units:
            first = known.setdefault(unit.image_id, unit)
            if first is not unit:
                of_image = several.setdefault(unit.image_id, {first.block: first.code})
                of_image[unit.block] = unit.code
        images = Images.of(known)
        ordered = [known[image_id] for image_id in images.ids]
        blocks = np.fromiter((unit.block for unit in ordered), np.int32, len(ordered))
        late = {unit.image_id: unit.late for unit in ordered if unit.late}
        return cls(images, blocks, Coded.of([unit.code for unit in ordered]), several, late)

    def get(self, image_id: str) -> Mapping[int, str]:
        """{block that holds it: digest of its code}; empty if it is not finished."""
        if image_id in self.several:
            return self.several[image_id]
        at = self.images.place.get(image_id)
        if at is None:
            return {}
        return {int(self.blocks[at]): self.made_by.words[self.made_by.codes[at]]}

    @property
    def codes(self) -> set[str]:
        """The digests of all code that made some unit."""
        further = {code for blocks in self.several.values() for code in blocks.values()}
        return {*self.made_by.words, *further}
