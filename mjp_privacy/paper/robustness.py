"""`mjp evaluate --imagenet-c | --imagenet-a | --imagenet-o`: the paper's Tables 2 and 10.

The sets are laid out as their authors publish them:

C     gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG, perhaps inside `noise`, `blur`,
      `weather` and `digital`, as the archives are called
A, O  n01498041/0.000116_digital clock _ digital clock_0.865662.jpg: 200 classes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from mjp_privacy.core.command import Outcome, check_idle
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.schema import height_width
from mjp_privacy.core.text import shown
from mjp_privacy.data import ImageRecord, ImageSource, Preprocessing, open_images, spread_subset
from mjp_privacy.data.files import image_names, open_files
from mjp_privacy.data.labels import NUM_IMAGENET, some
from mjp_privacy.paper.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES
from mjp_privacy.paper.image_sets import CORRUPTED
from mjp_privacy.paper.robustness_scores import (
    CAVEATS,
    Line,
    corruption_lines,
    counterpart,
    difference_lines,
    hard_lines,
    line,
    share,
    strange_lines,
    wrong_severities,
)
from mjp_privacy.training.commands import EvaluationArguments
from mjp_privacy.training.evaluation import (
    Loaded,
    beside,
    loaded_models,
    markdown_table,
    opened_batches,
    prepare_folder,
    with_interval,
    write_report,
)

# the published sets -------------------------------------------------------------------------------

Cell = tuple[str, int]  # corruption and severity

EXAMPLE = "gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG"
CLASSES = 200
OFFICIAL: Mapping[str, int] = {"A": 7500, "O": 2000}
"""Number of images of the published sets."""


class CorruptionFolders(NamedTuple):
    """The folder of each corruption and severity.

    images         those of the first folder; the others hold files of the same names
    official       False for our own corruptions
    """

    by_cell: Mapping[Cell, Path]
    images: ImageSource
    official: bool


def corruption_folders(path: Path) -> CorruptionFolders:
    """The cells of ImageNet-C in this folder; UserError if it has another layout."""
    places = {
        function.__name__: place
        for family, functions in FAMILIES.items()
        for function in functions
        for place in (path / family / function.__name__, path / function.__name__)
        if place.is_dir()
    }
    cells = {(name, level): places[name] / str(level) for name in places for level in SEVERITIES}
    if not cells:
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        raise UserError(
            f"--imagenet-c {shown(path)}: expected folders of corruptions with files such as "
            f"{EXAMPLE}; got {some(names) if names else 'no folder'}. Give the folder that the "
            "archives were unpacked in."
        )
    held = {
        cell: set(image_names(open_files(folder))) if folder.is_dir() else set()
        for cell, folder in cells.items()
    }
    first, wanted = next(iter(held.items()))
    for (name, severity), names_here in held.items():
        if names_here != wanted:
            raise UserError(
                f"--imagenet-c {shown(path)}: {name}/{severity} holds {len(names_here)} images, "
                f"{len(wanted & names_here)} of them under the names of the first folder's "
                f"{len(wanted)}. Expected the same images under every corruption at the severities "
                "1 to 5: unpack its archive again."
            )
    images = open_images(cells[first])
    if images.records[0].label is None:
        raise UserError(
            f"--imagenet-c {shown(path)}: the images of {cells[first].relative_to(path)} lie in no "
            f"class folders. Expected files such as {EXAMPLE}."
        )
    return CorruptionFolders(cells, images, not (path / CORRUPTED).exists())


class TwoHundred(NamedTuple):
    """ImageNet-A or -O, and whether it is the published set."""

    images: ImageSource
    classes: list[int]
    official: bool


def two_hundred_classes(path: Path, letter: str) -> TwoHundred:
    """The classes are those of the folders, whose names must be 200 of ImageNet's synsets."""
    source = open_images(path)
    labels = {record.label for record in source.records}
    if source.records[0].label_source != "synset" or len(labels) != CLASSES:
        got = f"{len(labels - {None})} classes. {source.labels_described}"
        raise UserError(
            f"--imagenet-{letter.lower()} {shown(path)}: expected {CLASSES} folders named by "
            f"synsets, such as n01498041; got {got} Give the folder that the archive was unpacked "
            "in: answers are restricted to its classes, so with some of them missing the figures "
            "would be others."
        )
    classes = sorted(label for label in labels if label is not None)
    return TwoHundred(source, classes, len(source.records) == OFFICIAL[letter])


# the command --------------------------------------------------------------------------------------

OURS = "our own corruptions"
OFFICIAL_CELL = 50_000
"""Images under each corruption and severity of the published ImageNet-C."""
VALIDATION_OF_CLASS = 50
"""Images of each class in ImageNet's validation set."""


def write_robustness(arguments: EvaluationArguments) -> Outcome:
    """The tables of all checkpoints as Markdown; files in --out are updated set by set."""
    measured = Robustness(arguments)
    tables: list[pd.DataFrame] = []
    text, table = "", pd.DataFrame()
    for label, images, lines in measured.lines(measured.models()):
        found = pd.DataFrame(lines).astype({"severity": "Int64", "paper": float})
        found.insert(0, "model", label)
        found.insert(1, "images", images)
        tables.append(found)
        table = pd.concat(tables, ignore_index=True)
        text = markdown(table)
        if arguments.out:
            reasons = pd.DataFrame(measured.unreadable.items(), columns=["image", "reason"])
            files = {"unreadable.csv": reasons}
            if measured.errors:
                wrong = {name: wrong_severities(mine) for name, mine in measured.errors.items()}
                files["per_image.csv"] = pd.concat(wrong, names=["model"]).swaplevel().reset_index()
            files["robustness.csv"] = table
            write_report(arguments.out, files, "robustness.md", text)
    return Outcome(text, measured.unreadable, table.to_dict("records"))


class Robustness:
    """The sets of images that the command line names, and what models answer to them.

    errors      by model, its errors under the corruptions: a row an image, a column a cell
    unreadable  by path, why images cannot be read
    """

    def __init__(self, arguments: EvaluationArguments) -> None:
        """Open and check the sets, and make --out apart from them."""
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
        self.ordinary = open_images(data, arguments.labels) if data else None
        if self.ordinary and self.ordinary.records[0].label is None:
            raise UserError(
                "--data: expected images with labels beside robustness. "
                f"{self.ordinary.labels_described} Give --labels, class folders, or leave --data "
                "out."
            )
        self.corrupted = corruption_folders(c) if c else None
        self.hard = two_hundred_classes(a, "A") if a else None
        self.strange = two_hundred_classes(o, "O") if o else None
        self.errors: dict[str, pd.DataFrame] = {}
        self.unreadable: dict[str, str] = {}
        prepare_folder(arguments, "imagenet_c", "imagenet_a", "imagenet_o", "data")

    def models(self) -> list[Loaded]:
        """All checkpoints."""
        corrupted = self.corrupted and self.corrupted.images
        images = {"--imagenet-c": corrupted, "--data": self.ordinary}
        models = loaded_models(self.arguments, images)
        for label, network, _ in models if self.hard or self.strange else ():
            if (classes := network.card.num_classes) != NUM_IMAGENET:
                raise UserError(
                    f"{label} has {classes} classes; ImageNet-A and -O need a model of ImageNet's "
                    "1000. Give another --checkpoint."
                )
        return models

    def lines(self, models: Sequence[Loaded]) -> Iterator[tuple[str, str, list[Line]]]:
        """A model's name, that of a set, and the lines of the two, one after the other."""
        whole = self.arguments.limit is None
        for model in models:
            label, paper = model.label, counterpart(model.network, model.row)
            if self.corrupted:
                images = "ImageNet-C" if self.corrupted.official else OURS
                yield label, images, self._under_corruptions(model, self.corrupted, paper)
            if self.hard:
                rows = self._photographs(model, self.hard.images, among=self.hard.classes)
                published = whole and self.hard.official
                yield label, "ImageNet-A", hard_lines(rows, paper if published else {})
            if self.strange and self.ordinary:
                classes = self.strange.classes
                of_them = [one for one in self.ordinary.records if one.label in classes]
                if not of_them:
                    raise UserError(
                        "--data holds no image of ImageNet-O's 200 classes: expected photographs "
                        "of these, as ImageNet's validation set has them. "
                        f"{self.ordinary.labels_described}"
                    )
                rows = self._photographs(model, self.strange.images, among=classes)
                known = self._photographs(model, self.ordinary, of_them, classes)
                all_known = len(known) == len(classes) * VALIDATION_OF_CLASS
                published = whole and self.strange.official and all_known
                yield label, "ImageNet-O", strange_lines(rows, known, paper if published else {})

    def _under_corruptions(
        self, model: Loaded, folders: CorruptionFolders, paper: Mapping[str, Any]
    ) -> list[Line]:
        card, columns = model.network.card, {}
        chosen = {record.image_id for record in self._chosen(folders.images.records)}
        cut_out_already = Preprocessing(card.img_size, min(height_width(card.img_size)), "bilinear")
        with Progress(model.label, len(folders.by_cell) * len(chosen), "images") as bar:
            for cell, folder in folders.by_cell.items():
                source = open_images(folder)
                records = [record for record in source.records if record.image_id in chosen]
                rows = self._answers(model, source, records, cut_out_already, bar)
                columns[cell] = 1 - rows.set_index("image_id")["correct"]
        mine = pd.DataFrame(columns).sort_index()
        published = folders.official and len(mine) == OFFICIAL_CELL
        lines = corruption_lines(mine, paper if published else {}, classes=card.num_classes)
        if self.ordinary:
            rows = self._photographs(model, self.ordinary)
            lines.insert(0, line("error without corruption", share(1 - rows["correct"])))
        for other, others in self.errors.items():
            lines += difference_lines(mine, other, others, classes=card.num_classes)
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
            first, reason = next(iter(self.unreadable.items()), ("", ""))
            raise UserError(
                f"None of the {len(rows)} images of {source.path.name} can be read, such as "
                f"{shown(first)}: {shown(reason)}. Expected at least one: unpack the archive "
                "again, or mend that."
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

OWN = (
    "These images were made by `mjp sample --corrupt`: our own code, not the official files; "
    "corrupted.json beside them says what differs. Compare models with each other, not with "
    "figures of ImageNet-C."
)
OF_CORRUPTIONS = (
    "Errors in %, with Wilson's 95 % interval; means over severities with a bootstrap over "
    "images. mCE is the mean of the 15 means, where all are there: unnormalised as they are, or "
    "each divided by AlexNet's published error on the official files, which is among ImageNet's "
    "1000 classes and stands beside such models alone."
)
CUT_OUT = (
    "Photographs are cut out as the sets' official scripts do it: short side 256 for a side of "
    "224, bilinear; pictures of ImageNet-C are cut out already."
)
OF_MEASURES = {
    "difference to": "Differences are paired: each image under one model with itself under the "
    "other.",
    "AUPR": "AUPR: strange images told from those of --data by the largest softmax share among the "
    "200 classes. It grows with the share of strange images, which chance would reach.",
}
"""Notes by the measures that they are about."""


def markdown(table: pd.DataFrame) -> str:
    """All lines, model by model and set by set, with notes below."""
    parts: list[str] = []
    for (images, model), lines in table.groupby(["images", "model"], sort=False):
        printed = bool(lines["paper"].notna().any())
        parts += [f"**{model}** on {images}:", ""]
        for plain, of_kind in lines.groupby(lines["corruption"] == ""):
            rows = _plain_rows if plain else _corruption_rows
            parts += [*rows(of_kind, printed), ""]
    return "\n".join([*parts, *(f"- {note}" for note in _notes(table)), ""])


def _corruption_rows(lines: pd.DataFrame, printed: bool) -> list[str]:
    """A row for each corruption: its severities, their mean, and the mean against AlexNet's."""
    columns = lines["severity"].astype("string").fillna(lines["measure"])
    shown_lines = lines.to_dict("records")
    texts = [with_interval(one["percent"], one["low"], one["high"]) for one in shown_lines]
    wide = lines.assign(column=columns, text=texts).pivot(
        index="corruption", columns="column", values="text"
    )
    means = lines[lines["measure"] == "mean error"].set_index("corruption")
    wide = wide[list(dict.fromkeys(columns))].assign(n=means["n"].astype(str))
    if printed:
        pairs = zip(means["paper"], means["percent"], strict=True)
        wide["paper's mean"] = pd.Series([beside(*pair, ".2f") for pair in pairs], means.index)
    present = [name for name in CORRUPTIONS if name in wide.index]
    return markdown_table(["corruption", *wide.columns], wide.loc[present].itertuples())


def _plain_rows(lines: pd.DataFrame, printed: bool) -> list[str]:
    rows = []
    for one in lines.to_dict("records"):
        n = f"{one['n']}" + (f" ({one['failed']} unreadable)" if one["failed"] else "")
        percent = with_interval(one["percent"], one["low"], one["high"])
        cells = [one["measure"], percent, one["interval"], n]
        rows.append([*cells, *([beside(one["paper"], one["percent"], ".2f")] if printed else [])])
    heads = ["measure", "%", "interval", "n", *(["paper's"] if printed else [])]
    return markdown_table(heads, rows)


def _notes(table: pd.DataFrame) -> Iterator[str]:
    corrupted = table[table["corruption"] != ""]
    if (table["images"] == OURS).any():
        yield OWN
    if len(corrupted):
        yield OF_CORRUPTIONS
    yield CUT_OUT
    for measure, note in OF_MEASURES.items():
        if table["measure"].str.contains(measure).any():
            yield note
    if corrupted["paper"].notna().any():
        yield from CAVEATS
