"""A line of the tables: a cell of a run, the scores of its images, and its facts in words.

line.scored("psnr", "standard")          PSNR by image, of the images that have one
line.frame["status"].value_counts()      what became of the images
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from attacks import traits_of
from attacks.budget import OVER
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
from mjp_privacy.metrics.statistics import categorical

if TYPE_CHECKING:
    from torch import Tensor

Scalar = str | float | int | bool | None
Key = tuple[str, str]
"""Metric and variant."""
# scores -------------------------------------------------------------------------------------------

UNREADABLE = "unreadable"
DIAGNOSTIC = "diagnostic"
OF_PICTURE = ("standard", "paper")
"""The variants of scores: every image of a cell has them, or a reason why not."""
STAGE = "stage_seconds."
"""How the names of columns begin that say how long a stage took for an image."""
IMAGE = ("image_id", "status", "reason", "code", "group", "label_source")
"""The columns that are read of every image beside its scores."""
NO_NUMBER = "its scores are not numbers"


def scores_of(frame: Iterable[Any]) -> list[str]:
    """The columns of a table that are those of metrics."""
    return [name for name in map(str, frame) if "." in name and not name.startswith(STAGE)]


def split(column: str) -> Key:
    """The metric and variant of a column: split("psnr.standard") is ("psnr", "standard")."""
    metric, _, variant = column.rpartition(".")
    return metric, variant


def read_frame(store: RunStore, run_id: str) -> pd.DataFrame:
    """A row for each image of a cell, by its id, with a column for each metric and variant."""
    return image_frame(store.read(run_id, [*IMAGE, *scores_of(store.cell(run_id).columns)]))


def image_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """The same of rows as they are stored. Images that are marked ok and have no score at all count
    as failed."""
    frame = rows.set_index("image_id").sort_index(kind="stable")
    scores = scores_of(frame)
    frame["reason"] = frame["reason"].fillna("").astype(object)
    of_picture = [name for name in scores if split(name)[1] in OF_PICTURE]
    if of_picture:
        lost = (frame["status"] == "ok") & frame[of_picture].isna().all(axis=1)
        frame.loc[lost, "status"], frame.loc[lost, "reason"] = "failed", NO_NUMBER
    kinds: dict[str, Any] = dict.fromkeys(("status", "reason", "code", "label_source"), "category")
    kinds |= dict.fromkeys(scores, np.float64)
    other = {n: kind for n, kind in kinds.items() if n in frame and frame[n].dtype != kind}
    return frame.astype(other)


def keys_of(frame: pd.DataFrame) -> list[Key]:
    """The metrics and variants of a frame: an image that is not ok has all, with a reason in place
    of the score. Whether the model was right counts as asked where no image has a label: then there
    are rows that say so."""
    from mjp_privacy.metrics.scores import METRICS

    scores = scores_of(frame)
    known = frame[scores].notna().any()
    asked = [name for name in scores if known[name] or name.startswith("top1.")]
    if not (frame["status"] == "ok").all():
        asked += ["top1.intact", "top1.altered"]
        asked += [f"{METRICS[key].name}.{METRICS[key].variant}" for key in METRICS]
    return sorted(map(split, {*asked}))


# facts --------------------------------------------------------------------------------------------

DEFAULTS: Mapping[str, Scalar] = {"role": "attack", "uploads": 1, **defaults_of(ClientFacts)}
"""The values of facts that a cell does not state, so that older runs compare with newer ones."""

CLIENT_FACTS = columns_of(ClientFacts)
"""Facts that describe the attacked client, apart from its model."""

ATTACK_FACTS = frozenset((*columns_of(AttackFacts), *columns_of(OutcomeFacts)))
"""Facts of the attack and its outcome; they are no part of the target that is attacked."""

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


def target_of(cell: CellFacts, without: Collection[str] = ()) -> tuple[tuple[str, Scalar], ...]:
    """What is attacked: every fact except those of the attack and of the command, and `without`
    those in which two targets may differ and still be alike.

    Facts that `CellFacts` has no field for count as well, so that two different clients are never
    taken for one.
    """
    keys = sorted({*cell.columns} - ATTACK_FACTS - {*columns_of(CommandFacts), *without})
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


def options_of(text: Any) -> dict[str, Any] | None:
    """Options of an attack, stored as JSON; None where they are none."""
    try:
        parsed = json.loads(text or "{}")
    except (TypeError, ValueError):
        return None
    return parsed if isinstance(parsed, dict) else None


def options_text(text: Any) -> str:
    """Options of an attack, stored as JSON, in words: `prior=fitted, steps=300`."""
    options = options_of(text)
    if options is None:
        return scalar_text(text)
    said = {k: v if isinstance(v, str) else json.dumps(v) for k, v in options.items()}
    return ", ".join(f"{key}={value}" for key, value in said.items()) or "–"


# a line -------------------------------------------------------------------------------------------

MARKS = {
    "floor": " (control)",
    "ceiling": " (control)",
    "worst_case": " (oracle selection)",
}
"""Suffix of the attack's name on lines that are not attacks, by role."""


class Column(NamedTuple):
    """One metric of a line's images."""

    values: pd.Series[float]  # by image; NaN for none
    statuses: pd.Categorical
    photographs: pd.Categorical | None  # that each was cut from; None where each is one of its own


@dataclass(frozen=True, eq=False)
class Line:
    """One line of the table: a cell of a run and what is stored of its images.

    Images that could not be read have no part in the scores nor in the number of planned images:
    they say nothing of what leaks, and a share that counted them would flatter the client.
    """

    number: int  # from 1, over all runs; the notes refer to it
    run: str  # name of the run folder, made unique
    cell: CellFacts
    stored: pd.DataFrame = field(repr=False)
    """A row for each image, as `read_frame` gives them."""
    store: RunStore
    left_out: Sequence[Path] = field(default=(), kw_only=True)
    """Damaged files, whose images have no part in the line."""

    @property
    def label(self) -> str:
        """Model, setting and attack in words, such as `DeiT-S (a) april`."""
        return f"{self.cell.model} ({self.cell.setting}) {self.title}"

    @property
    def attack(self) -> str:
        """What tables call the attack."""
        return self.cell.attack

    @property
    def title(self) -> str:
        """The attack's label, with a mark on lines that are not attacks."""
        return f"{self.attack}{MARKS.get(self.cell.role, '')}"

    @property
    def uploads(self) -> int:
        """How many uploads the attack uses."""
        return self.cell.uploads or 1

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows of images that could be read, those that are not ok without scores."""
        readable, failed = self._readable, self._readable["status"] != "ok"
        if not failed.any():
            return readable
        scores = [name for name in scores_of(readable) if split(name)[1] != DIAGNOSTIC]
        return readable.assign(**{name: readable[name].mask(failed) for name in scores})

    @cached_property
    def _readable(self) -> pd.DataFrame:
        unreadable = self.stored["status"] == UNREADABLE
        return self.stored[~unreadable] if unreadable.any() else self.stored

    @property
    def images(self) -> pd.Index:
        """The ids of these images."""
        return self._readable.index

    @cached_property
    def unreadable(self) -> dict[str, str]:
        """Why images could not be read, by their id."""
        reasons: dict[str, str] = self.stored["reason"].drop(self.images).to_dict()
        return reasons

    @property
    def planned(self) -> int:
        """How many images that can be read the run's last command planned."""
        return max(0, self.cell.planned_images - len(self.unreadable))

    @property
    def not_run(self) -> int:
        """How many of them have no rows yet."""
        return max(0, self.planned - len(self.images))

    @property
    def status(self) -> str:
        """The cell's status; `failed` where a cell marked ok has no rows: its run was cut off."""
        if self.cell.status == "ok" and not len(self.images):
            return "failed"
        return self.cell.status

    @cached_property
    def reason(self) -> str:
        """Why the line has no scores, even if it has diagnostics; empty if it has some."""
        if self.cell.reason:
            return self.cell.reason
        if not len(self.images) and self.left_out:
            return "its rows or pictures are damaged: run the attack again"
        if not len(self.images) and self.unreadable:
            return "none of its images could be read"
        if not len(self.images):
            return "no rows stored: the run ended before this cell; run the same command again"
        reasons = self.frame["reason"][self.frame["status"] != "ok"].astype(object).value_counts()
        if reasons.empty or reasons.sum() < len(self.images):
            return ""
        return str(min(reasons.index, key=lambda reason: (-reasons[reason], reason)))

    def column(self, metric: str, variant: str) -> Column:
        """The values of a metric, and what became of each of the images; of what only some images
        have, those. It is empty where the metric was not computed."""
        name = f"{metric}.{variant}"
        values = self.frame[name] if name in self.frame else pd.Series(np.nan, self.images)
        if variant in OF_PICTURE and (metric, variant) in self.keys:
            return Column(values, pd.Categorical(self.frame["status"]), self.photographs)
        known = values.notna().to_numpy()
        ok = categorical(["ok"]).repeat(int(known.sum()))
        of_known = None if self.photographs is None else self.photographs[known]
        return Column(values[known], ok, of_known)

    @cached_property
    def photographs(self) -> pd.Categorical | None:
        """That each image was cut from; None where each is a photograph of its own."""
        return None if self.groups is None else pd.Categorical(self.groups)

    @property
    def units(self) -> int:
        """How many photographs that is, or images: what intervals of means count."""
        return len(self.images) if self.groups is None else self.groups.nunique()

    @cached_property
    def keys(self) -> frozenset[Key]:
        """The metrics and variants that some image has, be it with a reason in their place."""
        return frozenset(keys_of(self.frame))

    def scored(self, metric: str, variant: str) -> pd.Series[float]:
        """The metric's value by image, for the images that have one."""
        name = f"{metric}.{variant}"
        return self.frame[name].dropna() if name in self.frame else pd.Series(dtype=np.float64)

    def count(self, metric: str, variant: str) -> int:
        """How many images have a value of the metric."""
        name = f"{metric}.{variant}"
        return int(self.frame[name].count()) if name in self.frame else 0

    def some_above_zero(self, diagnostic: str) -> bool:
        """Whether a diagnostic is above 0 on any image."""
        return bool((self.scored(diagnostic, DIAGNOSTIC) > 0).any())

    @cached_property
    def groups(self) -> pd.Series[Any] | None:
        """Photograph by image, where several images were cut from the same one; else None."""
        if "group" not in self.frame or self.frame["group"].isna().all():
            return None
        names = self.frame["group"].where(self.frame["group"].notna(), self.images.to_series())
        return names.astype("category") if names.nunique() < len(names) else None

    @cached_property
    def traits(self) -> frozenset[str]:
        """What the attack knows and assumes."""
        return traits_of(self.cell.known_as)

    @property
    def meets_trained_model(self) -> bool:
        """Whether the attack met the model that a client trains: not one whose block 0 was altered
        for the attack, unless the model was trained with that block."""
        return self.cell.victim != "april_block" or self.cell.first_block == "closed_form"

    @property
    def competes(self) -> bool:
        """Whether it met that model to make pictures: one that names masked positions alone says
        of no picture whether it leaks."""
        return self.meets_trained_model and "no picture" not in self.traits

    # pictures -------------------------------------------------------------------------------------

    @cached_property
    def picture_ids(self) -> list[str]:
        """The images for which a reconstruction is stored, scored or not, sorted."""
        return sorted(self.store.pictured(self.cell.run_id))

    def reconstruction(self, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image by kind; None where none were stored."""
        return self.store.pictures(self.cell.run_id, image_id)

    @property
    def shown_attacks(self) -> tuple[Line, ...]:
        """The attacks whose pictures the line shows: its own, or those that a derived one took."""
        return (self,)

    @property
    def reconstructs(self) -> bool:
        """Whether the attack made a picture: scored, with a residual, or stored."""
        scored = self.count("psnr", "standard") + self.count("gradient_residual", DIAGNOSTIC)
        return scored > 0 or (len(self.images) > 0 and len(self.picture_ids) > 0)

    @property
    def has_truth(self) -> bool:
        """Whether the private images behind the line were given, as its rows and pictures tell; a
        line without pictures says nothing: True."""
        if ("psnr", "standard") in self.keys and (self.frame["status"] == "ok").any():
            return True
        tensors = self.reconstruction(self.picture_ids[0]) if self.picture_ids else None
        return tensors is None or "target" in tensors

    # images of which something is to be said ------------------------------------------------------

    @cached_property
    def exact_images(self) -> frozenset[str]:
        """The images that are equal to the compared picture in every 8-bit value."""
        scored = self.scored("psnr", "paper")
        return frozenset(scored.index[np.isposinf(scored)])

    @property
    def failed_images(self) -> frozenset[str]:
        """The images that have a row of status failed."""
        return frozenset(self.images[self.frame["status"] == "failed"])

    @property
    def late_images(self) -> frozenset[str]:
        """The images on which the attack's time ran out, whatever it had by then."""
        late = self.scored(OVER, DIAGNOSTIC)
        return frozenset(late.index[late == 1])

    @property
    def unshuffled_images(self) -> frozenset[str]:
        """The images of which the attack read an upload in which nothing was shuffled, as the
        uploads themselves or the client's own mask of the first one say."""
        seen = (self.scored(name, DIAGNOSTIC) for name in ("unshuffled_uploads", "empty_mask"))
        return frozenset(image for counts in seen for image in counts.index[counts > 0])


once = lru_cache(maxsize=4096)
"""A figure of a line, which is equal to itself alone, is computed once for the same arguments."""
