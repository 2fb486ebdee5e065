"""All uploads of a view as the spans of their batches, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attacks.equations.batch_span import BatchSpan, batch_span, pictures_by_rank
from attacks.equations.patch_system import PatchSystem, patch_system
from mjp_privacy.interfaces import AttackerView


@dataclass(frozen=True)
class BatchUploads:
    """R rounds of n steps: upload r n + s is that of step s in round r.

    In one of several rounds every picture stands in one upload. Of a single round this is not
    known: uploads that a user gives from anywhere come as one.
    """

    spans: Sequence[BatchSpan]
    steps: int  # n
    batch: int  # B, as the client declares it
    by_rank: Sequence[int | None]  # B of each upload of the first round, as its rank shows it
    first: PatchSystem  # of the first round
    rounds: Sequence[int] | None  # of each upload; None: uploads of a round may share pictures

    @classmethod
    def of(cls, view: AttackerView) -> BatchUploads:
        """Read all uploads of the view. An upload that shows more pictures than are declared is
        taken for one of that many."""
        spans: list[BatchSpan] = []
        by_rank: list[int | None] = []
        for update in view.updates:
            system = patch_system(view, update)
            precision = torch.finfo(update.dtype).eps
            can_mask = view.model.unk_embed is not None
            for step, total in enumerate(system.total):
                shown = pictures_by_rank(total, len(system.rows[step]), precision)
                batch = max(update.batch, shown or 1)
                spans.append(batch_span(system, step, batch, precision, can_mask=can_mask))
                by_rank.append(shown)
        first = view.updates[0]
        steps = first.steps_in_all
        several = len(view.updates) > 1
        rounds = [number // steps for number in range(len(spans))] if several else None
        return cls(spans, steps, first.batch, by_rank[:steps], patch_system(view, first), rounds)
