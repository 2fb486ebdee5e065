"""The scores of one cell by metric, as numbers: what is computed with when there are millions.

    table = cell_scores(store, "0b3a689adbb159cb")
    scores = table.column("psnr", "standard")
    scores.values[scores.statuses.equal("ok")].mean()

A `CellScores` holds the rows of a store, read a metric at a time where they are many, or those of a
wide table; a `JoinedTable` is several of them, or a part of one. `long_rows` has a row for each
image, metric and variant, as people like to filter them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from operator import lt
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attacks.budget import over_budget
from mjp_privacy.core.errors import NoFile, Unreadable
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.coded import Coded, Images

if TYPE_CHECKING:
    import pyarrow as pa

Key = tuple[str, str]
"""Metric and variant."""

UNREADABLE = "unreadable"
DIAGNOSTIC = "diagnostic"
STAGE = "stage_seconds."
"""How the names of columns begin that say how long a stage took for an image."""
AT_ONCE = 5_000
"""Images up to which all metrics of a cell are read together."""
MANY_FILES = 50
"""And the number of files from which they are: those of a run that goes on are not compacted."""
IMAGE = ("image_id", "status", "reason", "code", "group")
"""The columns that are read of every image."""
NO_LABELS = "the images carry no true labels"


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

    def column(self, metric: str, variant: str) -> Column | None:
        """The rows of one metric; None where it was not computed."""


class CellScores:
    """The scores of one cell: cell_scores(store, run_id), or CellScores.of_table(wide table).

    read: gives a column by its name, in the order of `ids`; None where there is none
    """

    def __init__(
        self,
        rows: pd.DataFrame,
        columns: Sequence[str],
        read: Callable[[str], NDArray[np.float64] | None],
    ) -> None:
        ids = rows["image_id"].tolist()
        self._order: NDArray[np.int64] | None = None  # of the rows by image; None: they stand so
        if not all(map(lt, ids, islice(ids, 1, None))):
            self._order = np.argsort(rows["image_id"].to_numpy(dtype=object), kind="stable")
            rows = rows.iloc[self._order]
        self.images = Images.of(ids)
        self._stored = read
        self._statuses = coded(rows["status"])
        self._reasons = coded(rows["reason"])
        self._done = self._statuses.equal("ok")
        scored = [split(name) for name in columns if "." in name]
        always = [] if self._done.all() else standard_keys()
        self.keys: Sequence[Key] = sorted({*scored, *always})
        self.photographs = self._photographs(rows)
        self.codes = None if rows["code"].isna().all() else coded(rows["code"])

    @classmethod
    def of_table(cls, rows: pd.DataFrame) -> CellScores:
        """The scores of a table with a row for each image and a column for each metric."""

        def read(name: str) -> NDArray[np.float64] | None:
            return rows[name].to_numpy(dtype=np.float64) if name in rows else None

        return cls(rows, _computed(rows), read)

    def _photographs(self, rows: pd.DataFrame) -> Coded | None:
        """The photograph that each image was cut from; None where each is its own."""
        if rows["group"].isna().all():
            return None
        said = rows["group"].where(rows["group"].notna(), rows["image_id"])
        return None if (said == rows["image_id"]).all() else coded(said)

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why images could not be read, by their id."""
        which = np.flatnonzero(self._statuses.equal(UNREADABLE))
        return {self.images.ids[at]: self._reasons.words[self._reasons.codes[at]] for at in which}

    def column(self, metric: str, variant: str) -> Column | None:
        """The scores of one metric; None where it was not computed.

        An image that was attacked has every score, and the diagnostics that apply to it; one that
        was not attacked or not scored has its status and reason in place of every score.
        """
        if (metric, variant) not in self.keys:
            return None
        stored = self._read(f"{metric}.{variant}")
        values = np.full(len(self.images), np.nan) if stored is None else stored
        if variant == DIAGNOSTIC:
            known = ~np.isnan(values)
            at = np.flatnonzero(known).astype(np.int32)
            every = len(at) == len(values)
            return Column(
                self.images.everywhere if every else at,
                values if every else values[at],
                Coded.equal_words("ok", len(at)),
                Coded.equal_words("", len(at)) if self._late is None else self._late[at],
            )
        statuses, reasons = self._statuses, self._reasons
        if metric == "top1" and (unknown := self._done & np.isnan(values)).any():
            if stored is None or not np.isnan(self._other_accuracy(variant)[unknown]).all():
                return self._rows(values, statuses, reasons).chosen(~unknown)
            statuses = _replaced(statuses, unknown, "unscored")
            reasons = _replaced(reasons, unknown, NO_LABELS)
        return self._rows(values, statuses, reasons)

    def _rows(self, values: NDArray[np.float64], statuses: Coded, reasons: Coded) -> Column:
        return Column(self.images.everywhere, values, statuses, reasons)

    def _other_accuracy(self, variant: str) -> NDArray[np.float64]:
        """Whether the intact model was right, NaN where nobody knows the label."""
        intact = None if variant == "intact" else self._read("top1.intact")
        return np.full(len(self.images), np.nan) if intact is None else intact

    @property
    def ids_of_rows(self) -> Sequence[str]:
        """The ids of the images in the order of the stored rows."""
        if self._order is None:
            return self.images.ids
        ids = np.empty(len(self.images), dtype=object)
        ids[self._order] = self.images.ids
        return list(ids)

    def _read(self, name: str) -> NDArray[np.float64] | None:
        """A stored column in the order of the images; None where there is none."""
        stored = self._stored(name)
        return stored if stored is None or self._order is None else stored[self._order]

    @cached_property
    def _late(self) -> Coded | None:
        """The reason of images whose attack was ended for lack of time, "" of the others; None
        where no attack was."""
        over, seconds = (self._read(f"{n}.diagnostic") for n in ("over_budget", "attack_seconds"))
        if over is None or seconds is None or not (over == 1).any():
            return None
        cut = zip((over == 1).tolist(), seconds.tolist(), strict=True)
        return Coded.of([over_budget(had) if late else "" for late, had in cut])


def cell_scores(store: RunStore, run_id: str) -> CellScores:
    """The scores of a cell of a run folder; where a run writes rows meanwhile, those of now."""
    cell = store.cell(run_id)
    scores = [name for name in cell.columns if is_score(name)]
    if sum(map(len, cell.ids)) <= AT_ONCE or len(cell.files) >= MANY_FILES:
        return CellScores.of_table(store.read(run_id, [*IMAGE, *scores]))
    cell, table = store.settled(run_id, lambda rows: (rows, rows.read(IMAGE)))

    def read(name: str) -> NDArray[np.float64] | None:
        if name not in scores:
            return None
        try:
            stored = cell.read([name])[name].to_numpy()
        except (NoFile, Unreadable):  # its file was replaced
            now = store.read(run_id, ["image_id", name]).set_index("image_id")
            stored = now[name].reindex(list(made.ids_of_rows)).to_numpy()
        return np.asarray(stored, dtype=np.float64)

    made = CellScores(_images(table), scores, read)
    return made


def _images(table: pa.Table) -> pd.DataFrame:
    """What a cell says of its images, with words that few have as categories."""
    from pyarrow import compute, nulls, string

    if compute.all(compute.equal(table["group"], table["image_id"])).as_py() in (True, None):
        place = table.column_names.index("group")
        table = table.set_column(place, "group", nulls(len(table), string()))
    for name in ("status", "reason", "code", "group"):
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].dictionary_encode())
    return table.unify_dictionaries().to_pandas()


def _computed(rows: pd.DataFrame) -> list[str]:
    """The columns of metrics that some image has. Whether the model was right is one of them where
    no image has a label: then there are rows that say so."""
    names = [name for name in map(str, rows) if is_score(name)]
    return [n for n in names if n.startswith("top1.") or not rows[n].isna().all()]


def is_score(column: str) -> bool:
    """Whether a column is that of a metric."""
    return "." in column and not column.startswith(STAGE)


def split(column: str) -> Key:
    """The metric and variant of a column: split("psnr.standard") is ("psnr", "standard")."""
    metric, _, variant = column.rpartition(".")
    return metric, variant


def standard_keys() -> list[Key]:
    """The metrics and variants that every image has, be it with a reason in place of the score."""
    from mjp_privacy.metrics import METRICS

    scores = [(METRICS[key].name, METRICS[key].variant) for key in METRICS]
    return [*scores, ("top1", "intact"), ("top1", "altered")]


def long_rows(store: RunStore, run_id: str, facts: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each image, metric and variant of a cell, with the facts of the cell as columns."""
    of_image = store.read(run_id)
    table = CellScores.of_table(of_image)
    order = {key: place for place, key in enumerate([*standard_keys(), *table.keys])}
    parts = []
    for metric, variant in sorted(table.keys, key=lambda key: order[key]):
        if (column := table.column(metric, variant)) is not None:
            of_rows = {
                "image_id": table.images.index[column.at],
                "metric": metric,
                "variant": variant,
                "value": column.values,
                "status": column.statuses.tolist(),
                "reason": column.reasons.tolist(),
            }
            parts.append(pd.DataFrame(of_rows))
    if not parts:
        return pd.DataFrame(columns=["image_id", "metric", "variant", "value", "status", "reason"])
    rows = pd.concat(parts, ignore_index=True)
    place = pd.Index(of_image["image_id"]).get_indexer(rows["image_id"])
    for name in ("code", "group", "label_source"):
        rows[name] = of_image[name].to_numpy()[place]
    rows = rows.iloc[np.argsort(place, kind="stable")].reset_index(drop=True)
    shared = {
        name: value
        for name, value in facts.items()
        if name not in rows and not isinstance(value, (list, tuple, dict))
    }
    constant = {name: [value] * len(rows) for name, value in shared.items()}
    return pd.concat([rows, pd.DataFrame(constant, index=rows.index)], axis=1)


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


def _replaced(words: Coded, which: NDArray[np.bool_], word: str) -> Coded:
    """The list with another word in these places."""
    listed = np.array(words.tolist(), dtype=object)
    listed[which] = word
    return Coded.of(listed.tolist())
