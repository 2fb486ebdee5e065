"""A cell on the images of a block: all at once, or in parts where memory does not suffice.

Parts are halves, quarters and so on, of whole client steps. Rows of a block that was split carry
the diagnostic `images_together`. Each image's upload is the same, up to rounding; what depends on
the images beside it moves: float32 APRIL and random choices of an attack, which are drawn for the
first image of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.core.machine import free_bytes, out_of_memory, release_memory
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.cell import CellRows, CellWork
from mjp_privacy.experiment.packing import appended
from mjp_privacy.interfaces import Control

TOGETHER = "images_together"
COPIES = 6  # of an image's uploads that are alive at once, counted in the attack's float64
SHARE = 0.5  # of the free memory that uploads may take


@dataclass
class InParts:
    """InParts(task).run(records): the cell's rows, computed at once or in parts.

    together: how many images of a cell memory held in an earlier block, by run_id; what is learnt
    is added
    """

    task: CellWork
    together: dict[str, int] = field(default_factory=dict)
    remark: str = field(default="", init=False)
    """What is said of a block that was split."""

    def run(self, records: Sequence[ImageRecord]) -> CellRows:
        """The rows of these images: whole client steps, in order."""
        if self.task.cell.client.undivided:
            return self._whole(records)
        known = self.together.get(self.task.facts.run_id, len(records))
        together = self._that_fit(min(known, len(records)))
        cause = "" if together == len(records) else "memory holds fewer images"
        parts: list[CellRows] = []
        left = records
        while left:
            part = left[:together]
            made = self._tried(part) if together > self._batch else self._whole(part)
            if made is None:
                cause = f"out of memory with {together} images"
                together = _half(together, self._batch)
                self.together[self.task.facts.run_id] = together
                continue
            parts.append(made if len(part) == len(records) else _marked(made, len(part)))
            left = left[together:]
            if left:
                self._forget()
        if cause:
            self.remark = self._remark(cause, together)
        return joined(parts)

    def _tried(self, records: Sequence[ImageRecord]) -> CellRows | None:
        """The rows of these images, or None if memory ran out."""
        try:
            return self.task.run(records)
        except Exception as error:
            if not out_of_memory(error):
                raise
        self._forget()  # outside of `except`, where the error still holds the tensors of its frames
        return None

    def _whole(self, records: Sequence[ImageRecord]) -> CellRows:
        """What cannot be split: if memory runs out, its images fail."""
        if (made := self._tried(records)) is not None:
            return made
        free = free_bytes(self._device) or 0
        return self.task.failed(
            records,
            f"out of memory with {len(records)} image(s) that belong together, and "
            f"{free / 2**30:.1f} GiB free: expected more memory, or a smaller client.batch",
        )

    def _forget(self) -> None:
        """Drop what cells of the block share; later cells compute it again."""
        self.task.uploads.memo.clear()
        release_memory(self._device)

    def _that_fit(self, images: int) -> int:
        """How many of the images are computed together: as many as memory holds the uploads of."""
        free = free_bytes(self._device)
        each = self._bytes_of_an_upload()
        together = images
        while free and together > self._batch and together * each > SHARE * free:
            together = _half(together, self._batch)
        return together

    def _bytes_of_an_upload(self) -> int:
        """Memory for one image's uploads, its copies included."""
        attack = self.task.attack
        if isinstance(attack, Control):
            return 0
        parameters = dict(self.task.model.named_parameters())
        entries = sum(parameters[n].numel() for n in self.task.gradients if n in parameters)
        return entries * attack.uploads * COPIES * torch.float64.itemsize

    def _remark(self, cause: str, together: int) -> str:
        cell = self.task.facts
        return (
            f"{cell.model.label} {cell.setting} {cell.attack.title} {cell.dtype}: {cause}, "
            f"computed {together} at a time. Their rows say so ({TOGETHER}): float32 APRIL and "
            "random choices of an attack may differ from those of a whole block"
        )

    @property
    def _batch(self) -> int:
        return self.task.cell.client.batch

    @property
    def _device(self) -> torch.device:
        return self.task.model.like.device


def _half(images: int, batch: int) -> int:
    """Half of so many images in whole client steps, at least one step."""
    return max(images // batch // 2, 1) * batch


def _marked(made: CellRows, together: int) -> CellRows:
    """The rows, with the number of images that were computed together."""
    rows = made.rows
    first = rows[rows["status"] == "ok"].drop_duplicates("image_id")
    added = first.assign(metric=TOGETHER, variant="diagnostic", value=float(together))
    return replace(made, rows=pd.concat([rows, added]))


def joined(parts: Sequence[CellRows]) -> CellRows:
    """The results of several parts of a block as those of the whole."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        if part.tensors:
            tensors = appended(tensors, part.tensors) if tensors else dict(part.tensors)
    stages = dict.fromkeys(stage for part in parts for stage in part.seconds)
    return CellRows(
        pd.concat([part.rows for part in parts if len(part.rows)]),
        tensors,
        [image_id for part in parts for image_id in part.image_ids],
        {record: reason for part in parts for record, reason in part.failed.items()},
        {stage: sum(part.seconds.get(stage, 0.0) for part in parts) for stage in stages},
        {reason: trace for part in parts for reason, trace in part.traces.items()},
    )
