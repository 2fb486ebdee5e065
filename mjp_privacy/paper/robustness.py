"""`mjp evaluate --imagenet-c | --imagenet-a | --imagenet-o`: the paper's Tables 2 and 10.

The sets are laid out as their authors publish them, and scored as they define it:

C     gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG, perhaps inside `noise`, `blur`,
      `weather` and `digital`, as the archives are called
A, O  n01498041/0.000116_digital clock _ digital clock_0.865662.jpg: 200 classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from mjp_privacy.core.command import Outcome, check_idle
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.schema import height_width
from mjp_privacy.core.text import shown
from mjp_privacy.data import ImageRecord, ImageSource, Preprocessing, open_images, spread_subset
from mjp_privacy.data.files import image_names, open_files
from mjp_privacy.data.labels import NUM_IMAGENET, some
from mjp_privacy.metrics.statistics import LEAST_DRAWN, summarise
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.sizes import is_papers_model
from mjp_privacy.paper.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES
from mjp_privacy.paper.image_sets import CORRUPTED
from mjp_privacy.training.commands import EvaluationArguments
from mjp_privacy.training.config import PUBLISHED
from mjp_privacy.training.evaluation import (
    TABLE3,
    TABLE4,
    Loaded,
    PublishedModel,
    beside,
    counted,
    loaded_models,
    markdown_table,
    opened_batches,
    prepare_folder,
    with_interval,
    write_report,
)

# scores, from plain arrays: shares from 0 to 1 --------------------------------------------------

Floats = NDArray[np.float64]


def accuracy_when_answering(confidence: Floats, correct: Floats) -> float:
    """AURRA: the mean over all k of the accuracy on the k most confident answers.

    Equal confidences count as if their order were drawn: each place gets their mean accuracy.
    """
    order = np.argsort(-confidence, kind="stable")
    ranked = np.asarray(correct, dtype=np.float64)[order]
    _, first, size = np.unique(-confidence[order], return_index=True, return_counts=True)
    means = np.add.reduceat(ranked, first) / size
    answered = np.arange(1, len(ranked) + 1)
    return float((np.cumsum(np.repeat(means, size)) / answered).mean())


def average_precision(strange: Floats, ordinary: Floats) -> float:
    """AUPR of telling strange images by a score that should be higher for them: Σ ΔR · P over the
    distinct scores from above, which is not interpolated."""
    scores = np.concatenate([strange, ordinary])
    positive = np.concatenate([np.ones(len(strange)), np.zeros(len(ordinary))])
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(positive[order])[last]
    precision = hits / (last + 1)
    recall = hits / len(strange)
    return float((np.diff(recall, prepend=0) * precision).sum())


# a line of robustness.csv: a figure in percent with its 95 % interval -----------------------------

RESAMPLES, RESAMPLED, WILSON = 500, "bootstrap over images", "Wilson"
Cell = tuple[str, int | None]  # corruption and severity
Line = dict[str, Any]
"""measure, corruption, severity, paper, percent, low, high, interval (its kind), n, failed."""


def line(
    measure: str,
    percent: float,
    ends: tuple[float, float],
    interval: str,
    counts: tuple[int, int],
    *,
    cell: Cell = ("", None),
    paper: float | None = None,
) -> Line:
    """A line but for its model and its images, which stand before it in the table; counts: of the
    images, and of those that could not be read."""
    about = {"measure": measure, "corruption": cell[0], "severity": cell[1], "paper": paper}
    figures = {"percent": percent, "low": ends[0], "high": ends[1], "interval": interval}
    return {**about, **figures, "n": counts[0], "failed": counts[1]}


def share(measure: str, hits: pd.Series[float], **about: Any) -> Line:
    """A share of images: of Series([1.0, 0.0, nan]) 50 % of two, and one failed."""
    found = summarise(hits.to_numpy(np.float64), ["ok"] * len(hits)).as_share()
    ends, counts = (100 * found.low, 100 * found.high), (found.n, found.counts.failed)
    return line(measure, 100 * found.mean, ends, WILSON, counts, **about)


def mean(measure: str, values: Floats, **about: Any) -> Line:
    """A mean over images of values in percent; images that are NaN are failed. Where all images are
    alike there is no interval, for it would have no width."""
    found = summarise(values, ["ok"] * len(values))
    ends = (math.nan, math.nan) if np.isclose(found.low, found.high) else (found.low, found.high)
    kind = RESAMPLED if found.n >= LEAST_DRAWN else "Student's t"
    return line(measure, found.mean, ends, kind, (found.n, found.counts.failed), **about)


def resampled(
    measure: str,
    score: Callable[..., float],
    *groups: tuple[Floats, ...],
    failed: int,
    paper: float | None,
) -> Line:
    """A score of one or more sets of images, with its percentile bootstrap interval.

    groups: arrays of one set, with an entry for each image; whole images are drawn, set by set
    """
    rng = np.random.default_rng(derive_seed("robustness interval", 0))
    values = []
    for _ in range(RESAMPLES):
        drawn: list[Floats] = []
        for arrays in groups:
            places = rng.integers(0, len(arrays[0]), len(arrays[0]))
            drawn += [array[places] for array in arrays]
        values.append(score(*drawn))
    low, high = 100 * np.quantile(values, [0.025, 0.975])
    value = score(*(array for arrays in groups for array in arrays))
    n = sum(len(arrays[0]) for arrays in groups)
    ends = float(low), float(high)
    return line(measure, 100 * value, ends, RESAMPLED, (n, failed), paper=paper)


# ImageNet-C ---------------------------------------------------------------------------------------

EXAMPLE = "gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG"
OFFICIAL_CELL = 50_000
"""Images under each corruption and severity of the published ImageNet-C."""
ALEXNET: Mapping[str, float] = PUBLISHED["alexnet"]
"""AlexNet's mean error over the five severities on the official files, in percent, as Hendrycks and
Dietterich publish it."""
ALEXNETS_CLASSES = 1000
"""What these are errors among: beside a model with other classes they say nothing."""
UNNORMALISED, NORMALISED = "mCE, unnormalised", "mCE against AlexNet"
AGAINST_ALEXNET = "CE against AlexNet"


def corruption_folders(path: Path) -> dict[Cell, Path]:
    """The cells of ImageNet-C in this folder, all with the same images; UserError if it has another
    layout."""
    places = {
        function.__name__: place
        for family, functions in FAMILIES.items()
        for function in functions
        for place in (path / family / function.__name__, path / function.__name__)
        if place.is_dir()
    }
    cells: dict[Cell, Path] = {
        (name, level): places[name] / str(level) for name in places for level in SEVERITIES
    }
    if not cells:
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        raise UserError(
            f"--imagenet-c {shown(path)}: expected folders of corruptions with files such as "
            f"{EXAMPLE}; got {some(names) if names else 'no folder'}. Give the folder that the "
            "archives were unpacked in."
        )
    wanted: set[str] | None = None
    for (name, severity), folder in cells.items():
        held = set(image_names(open_files(folder))) if folder.is_dir() else set()
        wanted = held if wanted is None else wanted
        if held != wanted:
            raise UserError(
                f"--imagenet-c {shown(path)}: {name}/{severity} holds {len(held)} images, "
                f"{len(wanted & held)} of them under the names of the first folder's "
                f"{len(wanted)}. Expected the same images under every corruption at the severities "
                "1 to 5: unpack its archive again."
            )
    return cells


def corruption_lines(
    errors: pd.DataFrame,
    paper: Mapping[str, Any],
    *,
    classes: int,
    others: Mapping[str, pd.DataFrame],
) -> list[Line]:
    """All lines of a model: a cell each, a mean over severities each, and, where all 15 corruptions
    are there, mCE and how much larger it is than other models' over the same images.

    errors   a row for each image and a column for each (corruption, severity): 1 for a wrong answer
             and NaN where the file cannot be read
    classes  how many the model has; without AlexNet's, nothing stands against its errors
    """
    lines = [share("error", errors[cell], cell=cell) for cell in errors.columns]
    means = of_corruptions(errors)
    for name, values in means.items():
        printed, about = paper.get("errors", {}).get(name), {"cell": (name, None)}
        lines.append(mean("mean error", values, paper=printed, **about))
        if classes == ALEXNETS_CLASSES:
            lines.append(mean(AGAINST_ALEXNET, 100 * values / ALEXNET[name], **about))
    if set(means) != set(CORRUPTIONS):
        return lines
    mces = [(UNNORMALISED, "mce_unnormalised", dict.fromkeys(CORRUPTIONS, 100.0))]
    if classes == ALEXNETS_CLASSES:
        mces.append((NORMALISED, "mce", dict(ALEXNET)))
    for measure, printed, scale in mces:
        ours = mce_of_images(errors, scale)
        lines.append(mean(measure, ours, paper=paper.get(printed)))
        for other, theirs in others.items():
            over = ours - mce_of_images(theirs, scale)
            lines.append(mean(f"{measure}, difference to {other}", over))
    return lines


def of_corruptions(errors: pd.DataFrame) -> dict[str, Floats]:
    """By corruption, each image's mean error over the severities in percent."""
    return {
        name: 100 * errors[[name]].mean(axis=1, skipna=False).to_numpy(dtype=np.float64)
        for name in errors.columns.unique(0)
    }


def mce_of_images(errors: pd.DataFrame, scale: Mapping[str, float]) -> Floats:
    """Each image's share in mCE, its errors divided by the scale's: their mean is mCE."""
    means = of_corruptions(errors)
    shares: Floats = np.mean([100 * means[name] / scale[name] for name in CORRUPTIONS], axis=0)
    return shares


def wrong_severities(errors: pd.DataFrame) -> pd.DataFrame:
    """By image and corruption, at how many of the five severities the answer is wrong; empty where
    a file cannot be read."""
    names = errors.columns.unique(0)
    counts = {name: errors[[name]].sum(axis=1, skipna=False) for name in names}
    return pd.DataFrame(counts).astype("Int64").rename_axis("image_id")


# ImageNet-A and -O --------------------------------------------------------------------------------

CLASSES = 200
OFFICIAL: Mapping[str, int] = {"A": 7500, "O": 2000}
"""Number of images of the published sets."""
VALIDATION_OF_CLASS = 50
"""Images of each class in ImageNet's validation set."""


def two_hundred_classes(path: Path, letter: str) -> ImageSource:
    """The set in this folder, whose folders must be 200 of ImageNet's synsets."""
    source = open_images(path)
    classes = classes_of(source)
    if source.records[0].label_source != "synset" or len(classes) != CLASSES:
        raise UserError(
            f"--imagenet-{letter.lower()} {shown(path)}: expected {CLASSES} folders named by "
            f"synsets, such as n01498041; got {len(classes)} classes. {source.labels_described} "
            "Give the folder that the archive was unpacked in: answers are restricted to its "
            "classes, so with some of them missing the figures would be others."
        )
    return source


def classes_of(source: ImageSource) -> list[int]:
    return sorted({record.label for record in source.records if record.label is not None})


def hard_lines(rows: pd.DataFrame, paper: Mapping[str, Any]) -> list[Line]:
    """Accuracy and AURRA of answers to ImageNet-A."""
    answers = rows[["confidence", "correct"]].dropna().to_numpy(dtype=np.float64).T
    failed, printed = len(rows) - answers.shape[1], paper.get("aurra")
    return [
        share("accuracy", rows["correct"], paper=paper.get("accuracy")),
        resampled("AURRA", accuracy_when_answering, (*answers,), failed=failed, paper=printed),
    ]


def strange_lines(
    strange: pd.DataFrame, ordinary: pd.DataFrame, paper: Mapping[str, Any]
) -> list[Line]:
    """AUPR of telling ImageNet-O's images by the model's doubt, and what chance would get."""
    doubts = [
        (-rows["confidence"].dropna().to_numpy(dtype=np.float64),) for rows in (strange, ordinary)
    ]
    aupr = resampled(
        "AUPR",
        average_precision,
        *doubts,
        failed=len(strange) + len(ordinary) - sum(len(one) for (one,) in doubts),
        paper=paper.get("aupr"),
    )
    chance = 100 * len(doubts[0][0]) / aupr["n"]
    counts = aupr["n"], aupr["failed"]
    return [aupr, line("AUPR by chance", chance, (math.nan, math.nan), "", counts)]


# what the paper prints ----------------------------------------------------------------------------

DEIT, MJP = PUBLISHED["tables_2_and_10"]
"""Two models' printed figures in percent; `mean` is what Table 10 calls mCE, over its ten `errors`;
accuracy and aurra are of ImageNet-A, aupr of ImageNet-O."""


def counterpart(model: LoadedModel, row: PublishedModel | None) -> Mapping[str, Any]:
    """The printed model that this one may be compared with; empty unless it is a ViT-S/16 at 224.

    row: the printed row of Table 3 or 4 that the checkpoint, or its user, names
    """
    known = is_papers_model(model.card.architecture, model.card.img_size)
    if known and row == TABLE4["A"]:
        return DEIT
    return MJP if known and row in (TABLE4["J"], TABLE3[0.03]) else {}


# the command --------------------------------------------------------------------------------------

OURS = "our own corruptions"


def write_robustness(arguments: EvaluationArguments) -> Outcome:
    """The tables of all checkpoints as Markdown; files in --out are updated set by set."""
    measured = Robustness(arguments)
    tables: list[pd.DataFrame] = []
    text, table = "", pd.DataFrame()
    for label, images, lines in measured.lines():
        found = pd.DataFrame(lines).astype({"severity": "Int64", "paper": float})
        found.insert(0, "model", label)
        found.insert(1, "images", images)
        tables.append(found)
        table = pd.concat(tables, ignore_index=True)
        text = markdown(table)
        files = {"robustness.csv": table}
        if measured.errors:
            wrong = {name: wrong_severities(mine) for name, mine in measured.errors.items()}
            files["per_image.csv"] = pd.concat(wrong, names=["model"]).swaplevel().reset_index()
        write_report(arguments.out, files, "robustness.md", text)
    return Outcome(text, measured.unreadable, table.to_dict("records"))


class Robustness:
    """The sets of images that the command line names, and what models answer to them.

    errors      by model, its errors under the corruptions: a row an image, a column a cell
    unreadable  by path, why images cannot be read
    """

    def __init__(self, arguments: EvaluationArguments) -> None:
        """Open and check the sets and the models, and make --out apart from them."""
        if arguments.imagenet_o and arguments.data is None:
            raise UserError(
                "--imagenet-o: AUPR tells strange images from ordinary ones. Expected --data with "
                "photographs of its 200 classes, such as ImageNet's validation set; got none."
            )
        self.arguments, data = arguments, arguments.data
        c, a, o = arguments.imagenet_c, arguments.imagenet_a, arguments.imagenet_o
        not_shuffled = "--imagenet-c, -a and -o have the official crop and shuffle nothing"
        check_idle(arguments, ("gamma", "unknown_embedding"), not_shuffled)
        if arguments.preset != "authors_code":  # that has a mean and std of its own
            check_idle(arguments, ["preset"], "it measures as without")
        if data is None:
            check_idle(arguments, ["labels"], "they are those of --data, which is not given")
        if not (c or o):
            check_idle(arguments, ["data"], "--imagenet-a alone needs no other images")
        self.cells = corruption_folders(c) if c else {}
        self.corrupted = open_images(next(iter(self.cells.values()))) if c else None
        self.ordinary = open_images(data, arguments.labels) if data else None
        self.hard = two_hundred_classes(a, "A") if a else None
        self.strange = two_hundred_classes(o, "O") if o else None
        labelled = {"--imagenet-c": self.corrupted, "--data": self.ordinary}
        for option, source in labelled.items():
            if source and source.records[0].label is None:
                raise UserError(
                    f"{option}: expected images with labels. {source.labels_described} Expected "
                    f"class folders, as in {EXAMPLE}, or --labels beside --data."
                )
        self.errors: dict[str, pd.DataFrame] = {}
        self.unreadable: dict[str, str] = {}
        prepare_folder(arguments, "imagenet_c", "imagenet_a", "imagenet_o", "data")
        self.models = loaded_models(arguments, labelled)
        for label, network, _ in self.models if a or o else ():
            if (classes := network.card.num_classes) != NUM_IMAGENET:
                raise UserError(
                    f"{label} has {classes} classes; ImageNet-A and -O need a model of ImageNet's "
                    "1000. Give another --checkpoint."
                )

    def lines(self) -> Iterator[tuple[str, str, list[Line]]]:
        """A model's name, that of a set, and the lines of the two, one after the other. The paper's
        figures stand beside those of whole published sets alone."""
        whole, c = self.arguments.limit is None, self.arguments.imagenet_c
        for model in self.models:
            label, paper = model.label, counterpart(model.network, model.row)
            if c:
                official = not (c / CORRUPTED).exists()
                images = "ImageNet-C" if official else OURS
                yield label, images, self._under_corruptions(model, paper if official else {})
            if self.hard:
                rows = self._photographs(model, self.hard, among=classes_of(self.hard))
                published = whole and len(rows) == OFFICIAL["A"]
                yield label, "ImageNet-A", hard_lines(rows, paper if published else {})
            if self.strange and self.ordinary:
                classes = classes_of(self.strange)
                of_them = [one for one in self.ordinary.records if one.label in classes]
                if not of_them:
                    raise UserError(
                        "--data holds no image of ImageNet-O's 200 classes: expected photographs "
                        "of these, as ImageNet's validation set has them. "
                        f"{self.ordinary.labels_described}"
                    )
                rows = self._photographs(model, self.strange, among=classes)
                known = self._photographs(model, self.ordinary, of_them, classes)
                all_known = len(known) == len(classes) * VALIDATION_OF_CLASS
                published = whole and len(rows) == OFFICIAL["O"] and all_known
                yield label, "ImageNet-O", strange_lines(rows, known, paper if published else {})

    def _under_corruptions(self, model: Loaded, paper: Mapping[str, Any]) -> list[Line]:
        card, columns = model.network.card, {}
        assert self.corrupted is not None
        chosen = {record.image_id for record in self._chosen(self.corrupted.records)}
        cut_out_already = Preprocessing(card.img_size, min(height_width(card.img_size)), "bilinear")
        with Progress(model.label, len(self.cells) * len(chosen), "images") as bar:
            for cell, folder in self.cells.items():
                source = open_images(folder)
                records = [record for record in source.records if record.image_id in chosen]
                rows = self._answers(model, source, records, cut_out_already, bar)
                columns[cell] = 1 - rows.set_index("image_id")["correct"]
        mine = pd.DataFrame(columns).sort_index()
        lines = corruption_lines(
            mine,
            paper if len(mine) == OFFICIAL_CELL else {},
            classes=card.num_classes,
            others=self.errors,
        )
        if self.ordinary:
            rows = self._photographs(model, self.ordinary)
            lines.insert(0, share("error without corruption", 1 - rows["correct"]))
        self.errors[model.label] = mine
        return lines

    def _photographs(
        self,
        model: Loaded,
        source: ImageSource,
        records: Sequence[ImageRecord] | None = None,
        among: Sequence[int] | None = None,
    ) -> pd.DataFrame:
        """The model's answers to photographs, cut out as ImageNet-C's were, not with the
        checkpoint's own crop; UserError where answers are restricted and no image can be read."""
        prepare = Preprocessing.robustness_sets(model.network.card.img_size)
        chosen = self._chosen(source.records if records is None else records)
        with Progress(model.label, len(chosen), "images") as bar:
            rows = self._answers(model, source, chosen, prepare, bar, among)
        if among is not None and rows["correct"].isna().all():
            first, reason = next(iter(self.unreadable.items()))
            raise UserError(
                f"None of the {len(rows)} images of {source.path.name} can be read, such as "
                f"{shown(first)}: {shown(reason)}. Mend them, or unpack the archive again."
            )
        return rows

    def _chosen(self, records: Sequence[ImageRecord]) -> tuple[ImageRecord, ...]:
        return spread_subset(records, self.arguments.limit, self.arguments.seed)

    @torch.no_grad()
    def _answers(
        self,
        model: Loaded,
        source: ImageSource,
        records: Sequence[ImageRecord],
        prepare: Preprocessing,
        bar: Progress,
        among: Sequence[int] | None = None,
    ) -> pd.DataFrame:
        """A row for each image: image_id, correct and confidence, NaN where it cannot be read.

        among  restrict the answer to these classes: the others' logits are left out before the
               softmax, and `confidence` is the largest of what remains

        Images are fed as they are: nothing is shuffled or masked.
        """
        network = model.network
        classes = list(range(network.card.num_classes) if among is None else among)
        rows: list[tuple[str, float, float]] = []
        failed: dict[ImageRecord, str] = {}
        for batch, images in opened_batches(network, source, records, prepare, failed, bar.advance):
            logits = network(network.normalize(images.to(network.like)))[:, classes].cpu()
            sure, best = logits.double().softmax(-1).max(-1)  # in float32 many would be 1 alike
            for record, confidence, place in zip(batch, sure.tolist(), best.tolist(), strict=True):
                rows.append((record.image_id, float(classes[place] == record.label), confidence))
        rows += [(record.image_id, np.nan, np.nan) for record in failed]
        self.unreadable |= {str(source.path / of.image_id): why for of, why in failed.items()}
        return pd.DataFrame(rows, columns=["image_id", "correct", "confidence"])


# the tables ---------------------------------------------------------------------------------------

NOTES: Mapping[str, str] = {
    OURS: "These images were made by `mjp sample --corrupt`: our own code, not the official files; "
    "corrupted.json beside them says what differs. Compare models with each other, not with "
    "figures of ImageNet-C.",
    "mean error": "Errors in %, with Wilson's 95 % interval; means over severities with a "
    "bootstrap over images. mCE is the mean of the 15 means, where all are there: unnormalised as "
    "they are, or each divided by AlexNet's published error on the official files, which is among "
    "ImageNet's 1000 classes and stands beside such models alone.",
    "": "Photographs are cut out as the sets' official scripts do it: short side 256 for a side of "
    "224, bilinear; pictures of ImageNet-C are cut out already.",
    "difference to": "Differences are paired: each image under one model with itself under the "
    "other.",
    "AUPR": "AUPR: strange images told from those of --data by the largest softmax share among the "
    "200 classes. It grows with the share of strange images, which chance would reach.",
    "paper's": "docs/paper.md says where the paper's figures contradict each other.",
}
"""Notes by what must stand in the tables above them."""


def markdown(table: pd.DataFrame) -> str:
    """All lines, model by model and set by set, with notes below."""
    parts: list[str] = []
    for (images, model), lines in table.groupby(["images", "model"], sort=False):
        printed = bool(lines["paper"].notna().any())
        parts += [f"**{model}** on {images}:", ""]
        for plain, of_kind in lines.groupby(lines["corruption"] == ""):
            rows: dict[str, dict[str, str]] = {}
            for one in of_kind.to_dict("records"):
                measure = one["measure"]
                row = rows.setdefault(measure if plain else one["corruption"], {})
                column = "%" if plain else measure
                column = column if pd.isna(one["severity"]) else str(one["severity"])
                row[column] = with_interval(one["percent"], one["low"], one["high"])
                if plain or measure == "mean error":
                    row |= {"interval": one["interval"]} if plain else {}
                    row["n"] = counted(one["n"], one["failed"], "unreadable")
                    if printed:
                        row["paper's"] = beside(one["paper"], one["percent"], ".2f")
            heads = ["measure" if plain else "corruption", *next(iter(rows.values()))]
            cells = [[name, *row.values()] for name, row in rows.items()]
            parts += [*markdown_table(heads, cells), ""]
    text = "\n".join(parts)
    notes = [f"- {note}" for said, note in NOTES.items() if said in text]
    return "\n".join([text, *notes, ""])
