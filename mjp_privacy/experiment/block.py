"""A slice of a run's images, and what one cell made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
from torch import Tensor

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
class BlockResult:
    """Rows of every image of the block, and the tensors of those that were reconstructed."""

    rows: pd.DataFrame
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    image_ids: list[str] = field(default_factory=list)
    failed: Mapping[ImageRecord, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
