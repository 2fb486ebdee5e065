"""A block, that is a fixed slice of a run's images, and a note on each image that was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mjp_privacy.data import ImageRecord

IN_STEP_OF = "its client step also holds"
"""How the reason of an image begins that was lost with another one of its step."""


@dataclass(frozen=True)
class Block:
    """A fixed slice of the run's images, which holds whole client steps of every cell."""

    index: int
    records: Sequence[ImageRecord]

    def steps(self, batch: int) -> list[Sequence[ImageRecord]]:
        """The client steps of the block, `batch` images each."""
        starts = range(0, len(self.records), batch)
        return [self.records[start : start + batch] for start in starts]

    def broken(self, lost: Mapping[ImageRecord, str], batch: int) -> dict[ImageRecord, str]:
        """Readable images that have no upload, with the reason: their step holds a lost image."""
        reasons: dict[ImageRecord, str] = {}
        for step in self.steps(batch):
            bad = [record.image_id for record in step if record in lost]
            reason = f"{IN_STEP_OF} {', '.join(bad)}, which cannot be used"
            reasons |= {record: reason for record in step if bad and record not in lost}
        return reasons


@dataclass(frozen=True)
class ImageNote:
    """An image as it was read: the hashes that identify it, or why it cannot be used."""

    record: ImageRecord
    sha256: str  # of the file; "" if there is no file
    pixel_sha256: str  # "" if there are no pixels
    reason: str = ""  # why it cannot be used; "" if it can

    @property
    def unreadable(self) -> bool:
        """Whether the file is no image, in contrast to one whose recorded upload is faulty."""
        return bool(self.reason) and not self.pixel_sha256
