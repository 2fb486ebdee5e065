"""A line of the tables: a cell of a run with its scores, and which of its facts describe what."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from torch import Tensor

from mjp_privacy.experiment.cell_facts import (
    AttackFacts,
    CellFacts,
    ClientFacts,
    CommandFacts,
    ModelFacts,
    OutcomeFacts,
    columns_of,
    defaults_of,
)
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.coded import Coded, Images
from mjp_privacy.report.rows import UNREADABLE, Column, Scores, long_rows, score_rows

Scalar = str | float | int | bool | None

DEFAULTS: Mapping[str, Scalar] = {"role": "attack", "uploads": 1, **defaults_of(ClientFacts)}
"""The values of facts that a cell does not state, so that older runs compare with newer ones."""

CLIENT_FACTS = columns_of(ClientFacts)
"""Facts that describe the attacked client, apart from its model."""

ATTACK_FACTS = frozenset((*columns_of(AttackFacts), *columns_of(OutcomeFacts)))
"""Facts of the attack and its outcome; they are no part of the target that is attacked."""

COMMAND_FACTS = frozenset(columns_of(CommandFacts))
MODEL_FACTS = frozenset(columns_of(ModelFacts))


def fact(columns: Mapping[str, Any], key: str) -> Scalar:
    """The value of a column; lists are joined by ` + `, what is no scalar gives the default."""
    value = columns.get(key)
    if isinstance(value, (list, tuple)):
        return " + ".join(map(str, value))
    if key == "withhold" and isinstance(value, str):
        return value.replace(", ", " + ")  # stored as words separated by commas
    if value is None or not isinstance(value, (str, float, int, bool)):
        return DEFAULTS.get(key)
    return value


def target_of(cell: CellFacts) -> tuple[tuple[str, Scalar], ...]:
    """What is attacked: every fact except those of the attack and of the command.

    Facts that `CellFacts` has no field for count as well, so that two different clients are never
    taken for one.
    """
    keys = sorted({*cell.columns, *DEFAULTS} - ATTACK_FACTS - COMMAND_FACTS)
    return tuple((key, value) for key in keys if (value := fact(cell.columns, key)) is not None)


def scalar_text(value: Any) -> str:
    """A value as text: `–` if it is missing, yes or no, a float with at most six digits."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def client_text(columns: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The columns `keys` in words, without missing values and defaults.

    For example `DAL in the loss, augment flip`, or `–` if nothing is left.
    """
    parts = []
    for key in keys:
        value = fact(columns, key)
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        if missing or (key in DEFAULTS and value == DEFAULTS[key]):
            continue
        if key == "dal":
            parts += ["DAL in the loss"] if value else []
        else:
            text = str(value).replace("_", " ") if key == "upload" else scalar_text(value)
            parts.append(f"{key.replace('_', ' ')} {text}")
    return ", ".join(parts) or "–"


def options_text(options: Any) -> str:
    """Options of an attack, stored as JSON, in words: `prior=fitted, steps=300`."""
    try:
        parsed = json.loads(options)
    except (TypeError, ValueError):
        return scalar_text(options)
    if not isinstance(parsed, dict):
        return scalar_text(options)
    parts = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in parsed.items()
    ]
    return ", ".join(parts) or "–"


# a line -------------------------------------------------------------------------------------------

MARKS = {
    "floor": " (control)",
    "ceiling": " (control)",
    "worst_case": " (oracle selection)",
}
"""Suffix of the attack's name on lines that are not attacks, by role."""

T = TypeVar("T")


KEPT = 96
"""Metrics of lines that are kept after they were read: a report asks for the same ones often, and
this many of 50,000 images are 40 MB."""


@dataclass(frozen=True)
class Line:
    """One line of the table: a cell of a run and the scores stored for it.

    Images that could not be read have no part in the scores nor in the number of planned images:
    they say nothing of what leaks, and a share that counted them would flatter the client.
    """

    number: int  # from 1, over all runs; the notes refer to it
    run: str  # name of the run folder, made unique
    cell: CellFacts
    table: Scores
    store: RunStore
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
    def unreadable(self) -> Mapping[str, str]:
        """Why images could not be read, by their id."""
        return self.table.unreadable

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
        return self._commonest_reason

    @cached_property
    def _commonest_reason(self) -> str:
        """Empty where an image has a score."""
        keys = sorted(self.table.keys, key=lambda key: (key != ("psnr", "standard"), key))
        scored = (self.column(m, v).statuses for m, v in keys if v != "diagnostic")
        if any(statuses.equal("ok").any() for statuses in scored):
            return ""
        reasons: Counter[str] = Counter()
        for key in keys:
            reasons.update(self.column(*key).reasons.counts())
        reasons.pop("", None)
        return min(reasons, key=lambda reason: (-reasons[reason], reason), default="")

    @cached_property
    def reductions(self) -> dict[object, Any]:
        """What was computed from the scores before, by what was asked: figures and words."""
        return {}

    def column(self, metric: str, variant: str) -> Column:
        """The scores of one metric in the order of the images; empty where it was not computed."""
        return _column(self.table, metric, variant)

    def scored(self, metric: str, variant: str) -> pd.Series[float]:
        """The metric's value by image_id, for the images that have one."""
        return _scored(self.table, metric, variant)

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

    @cached_property
    def photographs(self) -> Coded | None:
        """The photograph of each of the images, where several were cut from one; else None."""
        known = self.table.photographs
        return None if known is None or len(known.present().words) == len(known) else known

    @cached_property
    def groups(self) -> dict[str, str] | None:
        """Photograph by image_id, where several images were cut from the same one; else None."""
        known = self.photographs
        return None if known is None else dict(zip(self.images.ids, known.tolist(), strict=True))

    @property
    def rows(self) -> pd.DataFrame:
        """A row for each image, metric and variant, with the facts of the cell; not for many."""
        rows = long_rows(self.store, self.run_id, self.cell.columns)
        return rows[rows["status"] != UNREADABLE].reset_index(drop=True)

    @property
    def stored_rows(self) -> pd.DataFrame:
        """The same with those of images that could not be read, and without the cell's facts."""
        return score_rows(self.store, self.run_id)


NOTHING = Coded(np.empty(0, np.int32), ())
EMPTY = Column(np.empty(0, dtype=np.int32), np.empty(0), NOTHING, NOTHING)
"""Scores that were not computed."""


@lru_cache(KEPT)
def _column(table: Scores, metric: str, variant: str) -> Column:
    return table.column(metric, variant) or EMPTY


@lru_cache(KEPT)
def _scored(table: Scores, metric: str, variant: str) -> pd.Series[float]:
    column = _column(table, metric, variant)
    column = column.chosen(column.scored)
    every = len(column.at) == len(table.images)  # then all lines share one index
    index = table.images.index if every else table.images.index[column.at]
    return pd.Series(column.values, index=index)


def exact_images(line: Line) -> frozenset[str]:
    """The images that are equal to the compared picture in every 8-bit value."""
    scored = line.scored("psnr", "paper")
    return frozenset(map(str, scored.index[np.isposinf(scored.to_numpy())]))


def failed_images(line: Line) -> frozenset[str]:
    """The images that have a row of status failed."""
    columns = (line.column(*key) for key in line.table.keys)
    places = {at for c in columns for at in c.at[c.statuses.equal("failed")].tolist()}
    return frozenset(line.images.ids[at] for at in places)


def late_images(line: Line) -> frozenset[str]:
    """The images on which the attack's time ran out, whatever it had by then."""
    late = line.scored("over_budget", "diagnostic")
    return frozenset(map(str, late.index[late == 1]))


def not_run(line: Line) -> int:
    """How many images the run's last command planned that have no rows yet."""
    planned = line.cell.outcome.planned_images
    return max(0, planned - len(line.images))
