"""The scores of one cell by metric, as numbers: what is computed with when there are millions.

    table = cell_scores(store, "0b3a689adbb159cb")
    scores = table.column("psnr", "standard")
    scores.values[scores.statuses.equal("ok")].mean()

A cell is stored as a table with a row an image and a column a metric, and is read a metric at a
time where it is large. `long_rows` has a row for each image, metric and variant, as people like to
filter them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

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
NO_NUMBER = "its scores are not numbers"


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


class Scores(ABC):
    """The scores of one line's images."""

    images: Images
    keys: Sequence[Key]
    """The metrics and variants that some image has."""
    photographs: Coded | None
    """The photograph that each image was cut from; None where each is its own."""
    codes: Coded | None
    """The digest of the code that made each image, "" for unknown; None for all unknown."""
    unreadable: Mapping[str, str]
    """Why images could not be read, by their id: they are not among the images."""

    @abstractmethod
    def column(self, metric: str, variant: str) -> Column | None:
        """The rows of one metric; None where it was not computed."""


class CellScores(Scores):
    """The scores of one cell: cell_scores(store, run_id), or CellScores.of_table(wide table).

    of_images: a row for each image with the columns IMAGE
    names: the columns of scores
    read: gives one of them in the order of `of_images`
    every: whether images that could not be read are among the images
    """

    def __init__(
        self,
        of_images: pd.DataFrame,
        names: Sequence[str],
        read: Callable[[str], NDArray[np.float64] | None],
        *,
        every: bool = False,
    ) -> None:
        of_images = _with_lost(of_images, names, read)
        lost = of_images["status"] == UNREADABLE
        self.unreadable = dict(of_images.loc[lost, ["image_id", "reason"]].itertuples(index=False))
        self._order: NDArray[np.int64] | None = None  # of the rows by image; None: they stand so
        if not of_images["image_id"].is_monotonic_increasing or (lost.any() and not every):
            order = np.argsort(of_images["image_id"].to_numpy(dtype=object), kind="stable")
            self._order = order if every else order[~lost.to_numpy()[order]]
            of_images = of_images.iloc[self._order]
        self.images = Images.of(of_images["image_id"].tolist())
        self._stored = read
        self._statuses, self._reasons = coded(of_images["status"]), coded(of_images["reason"])
        self._done = self._statuses.equal("ok")
        self.always = [] if self._done.all() else standard_keys()
        self.keys = sorted({*map(split, names), *self.always})
        self.codes = None if of_images["code"].isna().all() else coded(of_images["code"])
        self.photographs = None
        if not of_images["group"].isna().all():
            ids = of_images["image_id"]
            said = of_images["group"].where(of_images["group"].notna(), ids)
            self.photographs = None if (said == ids).all() else coded(said)

    @classmethod
    def of_table(cls, rows: pd.DataFrame, *, every: bool = False) -> CellScores:
        """The scores of a table with a row for each image and a column for each metric.

        Whether the model was right counts as computed where no image has a label: then there are
        rows that say so.
        """
        names = [name for name in map(str, rows) if is_score(name)]

        def read(name: str) -> NDArray[np.float64] | None:
            return rows[name].to_numpy(dtype=np.float64) if name in rows else None

        made = cls(rows, names, read, every=every)
        absent = {n for n in names if not n.startswith("top1.") and rows[n].isna().all()}
        kept = set(map(split, names)) - set(map(split, absent))
        made.keys = [key for key in made.keys if key in kept or key in made.always]
        return made

    def column(self, metric: str, variant: str) -> Column | None:
        """The scores of one metric; None where it was not computed.

        An image that was attacked has every score, and the diagnostics that apply to it; one that
        was not attacked or not scored has its status and reason in place of every score.
        """
        if (metric, variant) not in self.keys:
            return None
        stored = self._read(f"{metric}.{variant}")
        values = np.full(len(self.images), np.nan) if stored is None else stored
        everywhere, known = self.images.everywhere, ~np.isnan(values)
        if variant == DIAGNOSTIC:
            ok, reasons = Coded.equal_words("ok", len(values)), self._late
            return Column(everywhere, values, ok, reasons).chosen(known)
        statuses, reasons = self._statuses, self._reasons
        if metric == "top1" and (unknown := self._done & ~known).any():
            intact = None if variant == "intact" else self._read("top1.intact")
            labelled = intact is not None and not np.isnan(intact[unknown]).all()
            if stored is None or labelled:  # the other model was asked
                return Column(everywhere, values, statuses, reasons).chosen(~unknown)
            statuses = Coded.of(np.where(unknown, "unscored", statuses.tolist()).tolist())
            reasons = Coded.of(np.where(unknown, NO_LABELS, reasons.tolist()).tolist())
        return Column(everywhere, values, statuses, reasons)

    def _read(self, name: str) -> NDArray[np.float64] | None:
        """A stored column in the order of the images; None where there is none."""
        stored = self._stored(name)
        return stored if stored is None or self._order is None else stored[self._order]

    @cached_property
    def _late(self) -> Coded:
        """The reason of images whose attack was ended for lack of time, "" of the others."""
        over, seconds = (self._read(f"{n}.diagnostic") for n in ("over_budget", "attack_seconds"))
        if over is None or seconds is None or not (over == 1).any():
            return Coded.equal_words("", len(self.images))
        cut = zip((over == 1).tolist(), seconds.tolist(), strict=True)
        return Coded.of([over_budget(had) if late else "" for late, had in cut])


def _with_lost(
    of_images: pd.DataFrame, names: Sequence[str], read: Callable[[str], NDArray[np.float64] | None]
) -> pd.DataFrame:
    """The images, those marked ok whose scores are all NaN as failed: they were not recovered."""
    lost, scores = (of_images["status"] == "ok").to_numpy(), 0
    for name in sorted(names, key=lambda name: not name.startswith("psnr.")):
        if split(name)[1] in ("standard", "paper") and lost.any():
            stored = read(name)
            scores += stored is not None
            lost = lost if stored is None else lost & np.isnan(stored)
    if not (scores and lost.any()):
        return of_images
    said = {"status": "failed", "reason": NO_NUMBER}
    changed = {name: of_images[name].astype(object).mask(lost, word) for name, word in said.items()}
    return of_images.assign(**changed)


def cell_scores(store: RunStore, run_id: str) -> CellScores:
    """The scores of a cell of a run folder; where a run writes rows meanwhile, those of now."""
    cell = store.cell(run_id)
    names = [name for name in cell.columns if is_score(name)]
    if sum(map(len, cell.ids)) <= AT_ONCE or len(cell.files) >= MANY_FILES:
        return CellScores.of_table(store.read(run_id, [*IMAGE, *names]))
    cell, table = store.settled(run_id, lambda rows: (rows, rows.read(IMAGE)))
    of_images = _images(table)

    def read(name: str) -> NDArray[np.float64] | None:
        if name not in names:
            return None
        try:
            stored = cell.read([name])[name].to_numpy()
        except (NoFile, Unreadable):  # its file was replaced
            now = store.read(run_id, ["image_id", name]).set_index("image_id")
            stored = now[name].reindex(of_images["image_id"]).to_numpy()
        return np.asarray(stored, dtype=np.float64)

    return CellScores(of_images, names, read)


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
    rows = score_rows(store, run_id)
    constant = {name: [value] * len(rows) for name, value in shared_facts(rows, facts).items()}
    return pd.concat([rows, pd.DataFrame(constant, index=rows.index)], axis=1)


def shared_facts(rows: pd.DataFrame, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a cell that are one value each and no columns of its rows."""
    return {
        name: value
        for name, value in facts.items()
        if name not in rows and not isinstance(value, (list, tuple, dict))
    }


def score_rows(store: RunStore, run_id: str) -> pd.DataFrame:
    """A row for each image, metric and variant of a cell."""
    of_image = store.read(run_id)
    table = CellScores.of_table(of_image, every=True)
    order = {key: place for place, key in enumerate([*standard_keys(), *table.keys])}
    keys = sorted(table.keys, key=lambda key: order[key])
    found = [(*key, column) for key in keys if (column := table.column(*key)) is not None]
    if not found:
        return pd.DataFrame(columns=["image_id", "metric", "variant", "value", "status", "reason"])
    sizes = [len(column.at) for *_, column in found]
    at = np.concatenate([column.at for *_, column in found])
    place = pd.Index(of_image["image_id"]).get_indexer(table.images.index)[at]
    as_stored = np.argsort(place, kind="stable")
    rows = {
        "image_id": table.images.index.to_numpy(dtype=object)[at],
        "metric": np.repeat(np.array([metric for metric, *_ in found], dtype=object), sizes),
        "variant": np.repeat(np.array([variant for _, variant, _ in found], dtype=object), sizes),
        "value": np.concatenate([column.values for *_, column in found]),
        "status": _words([column.statuses for *_, column in found]),
        "reason": _words([column.reasons for *_, column in found]),
        **{n: of_image[n].to_numpy()[place] for n in ("code", "group", "label_source")},
    }
    return pd.DataFrame({name: values[as_stored] for name, values in rows.items()})


def _words(lists: Sequence[Coded]) -> NDArray[np.object_]:
    return np.concatenate([np.array(part.tolist(), dtype=object) for part in lists])


def joined(columns: Sequence[Column]) -> Column | None:
    """Rows of the same images, none of them twice, in the order of the images; None of none."""
    if len(columns) < 2:
        return columns[0] if columns else None
    at = np.concatenate([column.at for column in columns])
    order = np.argsort(at, kind="stable")
    values = np.concatenate([column.values for column in columns])
    statuses = _concatenated([column.statuses for column in columns])
    reasons = _concatenated([column.reasons for column in columns])
    return Column(at[order], values[order], statuses[order], reasons[order])


def _concatenated(lists: Sequence[Coded]) -> Coded:
    """The lists one after the other."""
    words = sorted({word for part in lists for word in part.words})
    if len(words) == 1:
        return Coded.equal_words(words[0], sum(map(len, lists)))
    code_of = {word: code for code, word in enumerate(words)}
    codes = [
        np.array([code_of[word] for word in part.words] or [0], dtype=np.int32)[part.codes]
        for part in lists
    ]
    return Coded(np.concatenate(codes), tuple(words))


def coded(words: pd.Series[str]) -> Coded:
    """A column of words, which may be categories; what is missing is "" ."""
    categories = pd.Categorical(words)
    known = [str(word) for word in categories.categories]
    different = sorted({*known, *([""] if (categories.codes < 0).any() else [])})
    place = {word: at for at, word in enumerate(different)}
    kind = np.min_scalar_type(max(1, len(different)))
    of_category = np.array([place[word] for word in known] + [place.get("", 0)], dtype=kind)
    return Coded(of_category[categories.codes], tuple(different))
