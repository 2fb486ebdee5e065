"""A line of the tables: a cell of a run and the scores stored for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from torch import Tensor

from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.coded import Coded, Images
from mjp_privacy.report.recent import Recent
from mjp_privacy.report.scores import UNREADABLE, Column, ScoreTable, long_rows

MARKS = {
    "floor": " (control)",
    "ceiling": " (control)",
    "worst_case": " (oracle selection)",
}
"""Suffix of the attack's name on lines that are not attacks, by role."""

T = TypeVar("T")

RECENT = Recent()
"""The scores that a report read last, of all its lines."""


@dataclass(frozen=True)
class Line:
    """One line of the table: a cell of a run and the scores stored for it.

    Images that could not be read have no part in the scores nor in the number of planned images:
    they say nothing of what leaks, and a share that counted them would flatter the client.
    """

    number: int  # from 1, over all runs; the notes refer to it
    run: str  # name of the run folder, made unique
    cell: CellFacts
    table: ScoreTable
    store: RunStore
    unreadable: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Why images could not be read, by their id."""
    left_out: Sequence[Path] = field(default=(), kw_only=True)
    """Damaged files, whose images have no part in the line."""

    @property
    def run_id(self) -> str:
        """The cell's id inside its run, which is also the name of the folder of its rows."""
        return self.cell.run_id

    @property
    def label(self) -> str:
        """Model, setting and attack in words, such as `DeiT-S (a) april`."""
        return f"{self.cell.model.label} ({self.cell.setting}) {self.title}"

    @property
    def role(self) -> str:
        """`attack`; `floor` or `ceiling` for a control; the rule's name for a derived line."""
        return self.cell.attack.role

    @property
    def attack(self) -> str:
        """What tables call the attack."""
        return self.cell.attack.title

    @property
    def title(self) -> str:
        """The attack's label, with a mark on lines that are not attacks."""
        return f"{self.attack}{MARKS.get(self.role, '')}"

    @property
    def uploads(self) -> int:
        """How many uploads the attack uses."""
        return self.cell.attack.uploads or 1

    @property
    def stored(self) -> bool:
        """Whether any rows are stored."""
        return len(self.images) + len(self.unreadable) > 0

    @property
    def images(self) -> Images:
        """The images with rows."""
        return self.table.images

    @property
    def status(self) -> str:
        """The cell's status; `failed` where a cell marked ok has no rows: its run was cut off."""
        if self.cell.outcome.status == "ok" and not len(self.images):
            return "failed"
        return self.cell.outcome.status

    @property
    def reason(self) -> str:
        """Why the line has no scores, even if it has diagnostics; empty if it has some."""
        if self.cell.outcome.reason:
            return self.cell.outcome.reason
        if not len(self.images) and self.left_out:
            return "its rows or pictures are damaged: run the attack again"
        if not len(self.images) and self.unreadable:
            return "none of its images could be read"
        if not len(self.images):
            return "no rows stored: the run ended before this cell; run the same command again"
        if "reason" not in self.reductions:
            scored = (self.column(m, v).statuses for m, v in self._keys if v != "diagnostic")
            some = any(statuses.equal("ok").any() for statuses in scored)
            self.reductions["reason"] = "" if some else self._commonest_reason()
        return str(self.reductions["reason"])

    @property
    def _keys(self) -> list[tuple[str, str]]:
        return sorted(self.table.keys, key=lambda key: (key != ("psnr", "standard"), key))

    def _commonest_reason(self) -> str:
        reasons: Counter[str] = Counter()
        for key in self._keys:
            reasons.update(self.column(*key).reasons.counts())
        reasons.pop("", None)
        return min(reasons, key=lambda reason: (-reasons[reason], reason), default="")

    @cached_property
    def reductions(self) -> dict[object, Any]:
        """What was computed from the scores before, by what was asked: figures and words."""
        return {}

    def column(self, metric: str, variant: str) -> Column:
        """The scores of one metric in the order of the images; empty where it was not computed.

        The residual of batches that an earlier version stored does not count: it took the pictures
        for those of the labels in their order, which nobody knows.
        """
        if metric == "gradient_residual" and (self.cell.client.batch or 1) > 1:
            return EMPTY
        return RECENT.get(
            (self.table, metric, variant),
            lambda: self.table.column(metric, variant) or EMPTY,
            lambda column: (
                column.values.nbytes
                + (0 if column.at is self.images.everywhere else column.at.nbytes)
                + column.statuses.size
                + column.reasons.size
            ),
        )

    def scores(self, metric: str, variant: str) -> pd.DataFrame:
        """image_id, value, status and reason of one metric; empty where it was not computed."""
        column = self.column(metric, variant)
        return pd.DataFrame(
            {
                "image_id": self.images.index[column.at],
                "value": column.values,
                "status": np.array(column.statuses.tolist(), dtype=object),
                "reason": np.array(column.reasons.tolist(), dtype=object),
            }
        )

    def scored(self, metric: str, variant: str) -> pd.Series[float]:
        """The metric's value by image_id, for the images that have one."""
        return RECENT.get(
            (self.table, metric, variant, "scored"),
            lambda: self._scored(metric, variant),
            lambda values: 2 * values.to_numpy().nbytes,
        )

    def _scored(self, metric: str, variant: str) -> pd.Series[float]:
        column = self.column(metric, variant)
        if not column.scored.all():
            column = column.chosen(column.scored)
        every = len(column.at) == len(self.images)  # then all lines share one index
        index = self.images.index if every else self.images.index[column.at]
        return pd.Series(column.values, index=index)

    def reduced(self, name: Hashable, reduce: Callable[[], T]) -> T:
        """What `reduce` returns, computed once under this name: a figure, not the scores."""
        if name not in self.reductions:
            self.reductions[name] = reduce()
        known: T = self.reductions[name]
        return known

    def count(self, metric: str, variant: str) -> int:
        """How many images have a value of the metric."""
        return self.reduced(
            ("count", metric, variant), lambda: int(self.column(metric, variant).scored.sum())
        )

    def some_above_zero(self, diagnostic: str) -> bool:
        """Whether a diagnostic is above 0 on any image."""
        return self.reduced(
            ("above", diagnostic), lambda: bool((self.scored(diagnostic, "diagnostic") > 0).any())
        )

    def reconstruction(self, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image by kind; None where none were stored."""
        return self.store.pictures(self.run_id, image_id)

    @property
    def photographs(self) -> Coded | None:
        """The photograph of each of the images, where several were cut from one; else None."""
        if "photographs" not in self.reductions:
            known = self.table.photographs
            single = known is None or len(known.present().words) == len(known)
            self.reductions["photographs"] = None if single else known
        shared: Coded | None = self.reductions["photographs"]
        return shared

    @cached_property
    def groups(self) -> dict[str, str] | None:
        """Photograph by image_id, where several images were cut from the same one; else None."""
        known = self.photographs
        return None if known is None else dict(zip(self.images.ids, known.tolist(), strict=True))

    @property
    def rows(self) -> pd.DataFrame:
        """A row for each image, metric and variant, with the facts of the cell; not for many."""
        rows = self.stored_rows
        return rows[rows["status"] != UNREADABLE].reset_index(drop=True)

    @property
    def stored_rows(self) -> pd.DataFrame:
        """The same with those of images that could not be read."""
        return long_rows(self.store, self.run_id, self.cell.columns)


EMPTY = Column(
    np.empty(0, dtype=np.int32),
    np.empty(0),
    Coded(np.empty(0, np.int32), ()),
    Coded(np.empty(0, np.int32), ()),
)
"""Scores that were not computed."""
