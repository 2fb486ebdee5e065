"""A slice of a run's images, and what was learnt of each of them when it was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mjp_privacy.data import ImageRecord


@dataclass(frozen=True)
class Block:
    """A fixed slice of the run's images: whole client steps of every cell."""

    index: int
    records: Sequence[ImageRecord]

    def steps(self, batch: int) -> list[Sequence[ImageRecord]]:
        starts = range(0, len(self.records), batch)
        return [self.records[start : start + batch] for start in starts]

    def broken(self, lost: Mapping[ImageRecord, str], batch: int) -> dict[ImageRecord, str]:
        """Why images that can be read have no upload: another one of their step cannot."""
        reasons: dict[ImageRecord, str] = {}
        for step in self.steps(batch):
            bad = [record.image_id for record in step if record in lost]
            reason = f"its client step also holds {', '.join(bad)}, which cannot be used"
            reasons |= {record: reason for record in step if bad and record not in lost}
        return reasons


@dataclass(frozen=True)
class ImageNote:
    """An image as it was read: by which it is known again, or why it cannot be used."""

    record: ImageRecord
    sha256: str  # of the file; "" where there is none
    pixel_sha256: str
    reason: str = ""  # "": it can be used
