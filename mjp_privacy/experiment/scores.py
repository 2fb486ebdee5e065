"""Rows of one cell by metric, as numbers: what is computed with when there are millions of them.

    table = store.score_table("0b3a689adbb159cb")
    scores = table.column("psnr", "standard")
    scores.values[scores.statuses.equal("ok")].mean()

A `MemoryTable` holds rows as arrays, `part_file.PartTable` reads one metric at a time from a file,
and a `JoinedTable` is several of them, or a part of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.experiment.image_names import Images
from mjp_privacy.metrics.coded import Coded

Key = tuple[str, str]
"""Metric and variant."""

UNREADABLE = "unreadable"


class Column(NamedTuple):
    """The rows of one metric and variant, in the order of their images."""

    at: NDArray[np.int32]  # places among the table's images
    values: NDArray[np.float64]
    statuses: Coded
    reasons: Coded

    def chosen(self, which: NDArray[np.bool_]) -> Column:
        """The rows that are marked."""
        rows = np.flatnonzero(which)
        if len(rows) == len(which):
            return self
        return Column(self.at[rows], self.values[rows], self.statuses[rows], self.reasons[rows])

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Which rows have a value that counts."""
        return self.statuses.equal("ok") & ~np.isnan(self.values)


class ScoreTable(Protocol):
    """The rows of one cell, or of what is put together from several."""

    @property
    def images(self) -> Images:
        """All images with rows."""

    @property
    def keys(self) -> Sequence[Key]:
        """The metrics and variants that some image has."""

    @property
    def photographs(self) -> Coded | None:
        """The photograph that each image was cut from; None where that is not known."""

    @property
    def codes(self) -> Coded | None:
        """The digest of the code that made each image, "" for unknown; None for all unknown."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why images could not be read, by their id."""

    @property
    def twice(self) -> tuple[str, Key] | None:
        """An image that one file holds twice, with the metric; it should not happen."""

    def column(self, metric: str, variant: str) -> Column | None:
        """The rows of one metric; None where it was not computed."""


class MemoryTable:
    """Rows held as arrays: MemoryTable(store.read_rows(run_id)). Strings may be categories."""

    def __init__(self, rows: pd.DataFrame) -> None:
        ids = coded(rows["image_id"])
        self.images = Images.of(ids.present().words)
        unit = self.images.places(ids.words)[ids.codes] if len(rows) else np.empty(0, np.int32)
        metric, variant = coded(rows["metric"]), coded(rows["variant"])
        pair = metric.codes.astype(np.int64) * max(1, len(variant.words)) + variant.codes
        different, key = np.unique(pair, return_inverse=True)
        split = [divmod(int(both), max(1, len(variant.words))) for both in different]
        self.keys: Sequence[Key] = [(metric.words[m], variant.words[v]) for m, v in split]
        order = np.lexsort((unit, key))
        self._unit, key = unit[order], key[order]
        self._ends = np.searchsorted(key, np.arange(len(self.keys) + 1))
        self._values = rows["value"].to_numpy(dtype=np.float64)[order]
        self._statuses, self._reasons = coded(rows["status"])[order], coded(rows["reason"])[order]
        same = (np.diff(key) == 0) & (np.diff(self._unit) == 0)
        self.twice: tuple[str, Key] | None = None
        if same.any():
            at = int(np.flatnonzero(same)[0])
            self.twice = self.images.ids[self._unit[at]], self.keys[key[at]]
        first = np.full(len(self.images), len(rows), dtype=np.int64)
        np.minimum.at(first, unit, np.arange(len(rows)))
        self.photographs = _of_images(rows, "group", first)
        self.codes = _of_images(rows, "code", first)

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why images could not be read, by their id."""
        which = np.flatnonzero(self._statuses.equal(UNREADABLE))
        reasons = self._reasons
        return {
            self.images.ids[self._unit[row]]: reasons.words[reasons.codes[row]]
            for row in which[::-1]  # the first row of an image counts
        }

    def column(self, metric: str, variant: str) -> Column | None:
        """The rows of one metric; None where it was not computed."""
        if (metric, variant) not in self.keys:
            return None
        at = self.keys.index((metric, variant))
        rows = slice(int(self._ends[at]), int(self._ends[at + 1]))
        statuses = Coded(self._statuses.codes[rows], self._statuses.words)
        reasons = Coded(self._reasons.codes[rows], self._reasons.words)
        return Column(self._unit[rows], self._values[rows], statuses, reasons)


class JoinedTable:
    """Several tables as one; of an image that is in two, all rows are those of the earlier table.

    images: those that count; None: all
    """

    def __init__(self, tables: Sequence[ScoreTable], images: Images | None = None) -> None:
        self.tables = tables
        of_tables = {id(table.images): table.images for table in tables}
        every = (i for of_table in of_tables.values() for i in of_table.ids)
        if images is None:
            images = tables[0].images if len(of_tables) == 1 else Images.of(every)
        self.images = images
        self.keys: Sequence[Key] = [*dict.fromkeys(key for table in tables for key in table.keys)]

    @cached_property
    def _places(self) -> list[NDArray[np.int32]]:
        """Where the images of each table stand among all; -1 where they do not count."""
        of_tables: list[NDArray[np.int32]] = []
        free = np.ones(len(self.images), dtype=bool)
        for table in self.tables:
            places = self.images.places(table.images.ids)
            taken = places >= 0
            taken[taken] = free[places[taken]]
            of_tables.append(np.where(taken, places, -1).astype(np.int32))
            free[places[taken]] = False
        return of_tables

    @property
    def photographs(self) -> Coded | None:
        """The photograph that each image was cut from; None where that is not known."""
        return self._of_images([table.photographs for table in self.tables], own=True)

    @property
    def codes(self) -> Coded | None:
        """The digest of the code that made each image."""
        return self._of_images([table.codes for table in self.tables], own=False)

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why images could not be read, by their id."""
        reasons: dict[str, str] = {}
        for table, places in zip(self.tables, self._places, strict=True):
            for image, reason in table.unreadable.items():
                if places[table.images.place[image]] >= 0:
                    reasons[image] = reason
        return reasons

    @property
    def twice(self) -> tuple[str, Key] | None:
        """An image that one file holds twice, with the metric."""
        return next((table.twice for table in self.tables if table.twice), None)

    def column(self, metric: str, variant: str) -> Column | None:
        """The rows of one metric; None where it was not computed."""
        parts = []
        for table, places in zip(self.tables, self._places, strict=True):
            column = table.column(metric, variant)
            if column is not None:
                at = places[column.at]
                parts.append(column._replace(at=at).chosen(at >= 0))
        return joined(parts)

    def _of_images(self, words: Sequence[Coded | None], *, own: bool) -> Coded | None:
        """A word for each image; where a table has none, the image's own id or nothing."""
        if all(of_table is None for of_table in words):
            return None
        found = list(self.images.ids) if own else [""] * len(self.images)
        for of_table, places in zip(words, self._places, strict=True):
            known = of_table.tolist() if of_table else []
            for place, word in zip(places.tolist(), known, strict=False):
                if place >= 0:
                    found[place] = word
        return Coded.of(found)


def joined(columns: Sequence[Column]) -> Column | None:
    """Rows of several tables with the same images, in the order of their images; None of none."""
    if len(columns) < 2:
        return columns[0] if columns else None
    at = np.concatenate([column.at for column in columns])
    order = np.argsort(at, kind="stable")
    values = np.concatenate([column.values for column in columns])
    statuses = concatenated([column.statuses for column in columns])
    reasons = concatenated([column.reasons for column in columns])
    return Column(at[order], values[order], statuses[order], reasons[order])


def concatenated(lists: Sequence[Coded]) -> Coded:
    """The lists one after the other."""
    words = sorted({word for part in lists for word in part.words})
    if len(words) == 1:
        return Coded.equal_words(words[0], sum(map(len, lists)))
    code_of = {word: code for code, word in enumerate(words)}
    codes = [
        np.array([code_of[word] for word in part.words] or [0], dtype=np.int32)[part.codes]
        for part in lists
    ]
    return Coded(np.concatenate(codes) if codes else np.empty(0, np.int32), tuple(words))


def coded(words: pd.Series[str]) -> Coded:
    """A column of words, which may be categories; what is missing is "" ."""
    categories = pd.Categorical(words)
    known = [str(word) for word in categories.categories]
    different = sorted({*known, *([""] if (categories.codes < 0).any() else [])})
    place = {word: at for at, word in enumerate(different)}
    kind = np.min_scalar_type(max(1, len(different)))
    of_category = np.array([place[word] for word in known] + [place.get("", 0)], dtype=kind)
    return Coded(of_category[categories.codes], tuple(different))


def _of_images(rows: pd.DataFrame, name: str, first: NDArray[np.int64]) -> Coded | None:
    """What the first row of each image says in a column; None where no row says anything, or where
    each image is a photograph of its own."""
    if name not in rows or rows[name].isna().all():
        return None
    said = rows[name].iloc[first].astype(object)
    if name == "group":
        ids = rows["image_id"].iloc[first].astype(object)
        said = said.fillna(ids)
        if (said == ids).all():
            return None
    return coded(said)
