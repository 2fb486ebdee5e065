"""`mjp evaluate --imagenet-c | --imagenet-a | --imagenet-o`: the paper's Tables 2 and 10.

The sets are laid out as their authors publish them:

C     gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG, perhaps inside `noise`, `blur`,
      `weather` and `digital`, as the archives are called
A, O  n01498041/0.000116_digital clock _ digital clock_0.865662.jpg: 200 classes
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import json_value
from mjp_privacy.core.schema import height_width
from mjp_privacy.core.text import shown
from mjp_privacy.data import ImageRecord, ImageSource, Preprocessing, open_images, spread_subset
from mjp_privacy.data.files import image_names, open_files
from mjp_privacy.data.labels import NUM_IMAGENET, some, synset_indices
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.zoo import named_checkpoints
from mjp_privacy.paper.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES
from mjp_privacy.paper.image_sets import CORRUPTED, CORRUPTED_LISTS, PLAIN
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
from mjp_privacy.training.batches import check_labels
from mjp_privacy.training.commands import EvaluationArguments
from mjp_privacy.training.evaluation import (
    beside,
    load_checkpoint,
    markdown_table,
    opened_batches,
    papers_row,
    prepare_folder,
    with_interval,
    write_report,
)

# the published sets -------------------------------------------------------------------------------

Cell = tuple[str, int]  # corruption and severity

EXAMPLE = "gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG"
CLASSES = 200
OFFICIAL: Mapping[str, tuple[str, int]] = {
    "A": ("f6aa4b23244554d9b864fd715ae20048f6a9686388911b2dfbf1ada01bf0f520", 7500),
    "O": ("39f8e64e8f89efad8fd9615c061abc61695ffbd27793e87199181cb4fb340083", 2000),
}
"""SHA-256 of the sorted synsets, one a line, and number of images of the published sets."""


@dataclass(frozen=True)
class CorruptionFolders:
    """The folder of each corruption and severity; `official` is False for our own corruptions.

    images         those of the first folder; the others hold files of the same names
    plain_classes  how many classes a model must have, for numbers of plain folders to be its own;
                   None where the numbers mean something without that, and for official files
    """

    by_cell: Mapping[Cell, Path]
    images: ImageSource
    official: bool
    plain_classes: int | None


def corruption_folders(path: Path) -> CorruptionFolders:
    """The cells of ImageNet-C in this folder; UserError if it has another layout."""
    places = {
        name: place
        for family, functions in FAMILIES.items()
        for name in [function.__name__ for function in functions]
        for place in (path / family / name, path / name)
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
    first = next(iter(cells.values()))
    wanted = _images_in(first)
    for (name, severity), folder in cells.items():
        names_here = _images_in(folder)
        if names_here != wanted:
            raise UserError(
                f"--imagenet-c {shown(path)}: {name}/{severity} holds {len(names_here)} images, "
                f"{len(wanted & names_here)} of them under the names of the first folder's "
                f"{len(wanted)}. Expected the same images under every corruption at the severities "
                "1 to 5: unpack its archive again."
            )
    images = open_images(first)
    if images.records[0].label is None:
        raise UserError(
            f"--imagenet-c {shown(path)}: the images of {first.relative_to(path)} lie in no class "
            f"folders. Expected files such as {EXAMPLE}."
        )
    marker, about = path / CORRUPTED, None
    if marker.is_file():
        text = CORRUPTED_LISTS.bytes(marker).decode("utf-8", "replace")
        about = json_value(text, marker, CORRUPTED_LISTS)
    count = about.get(PLAIN) if isinstance(about, dict) else None
    plain = count if isinstance(count, int) else None
    return CorruptionFolders(cells, images, not marker.exists(), plain)


def _images_in(folder: Path) -> set[str]:
    return set(image_names(open_files(folder))) if folder.is_dir() else set()


def two_hundred_classes(path: Path, letter: str) -> tuple[ImageSource, bool]:
    """The images of ImageNet-A or -O, and whether it is the published set.

    The classes are those of the folders, whose names must be 200 of ImageNet's synsets.
    """
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
    digest, count = OFFICIAL[letter]
    synsets = sorted(synset for synset, index in synset_indices().items() if index in labels)
    same = hashlib.sha256("\n".join(synsets).encode()).hexdigest() == digest
    return source, same and len(source.records) == count


# answers ------------------------------------------------------------------------------------------


@torch.no_grad()
def answers(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    prepare: Preprocessing,
    bar: Progress,
    unreadable: dict[str, str],
    classes: Sequence[int] | None = None,
) -> pd.DataFrame:
    """A row for each image: image_id, correct and confidence, NaN where it cannot be read.

    bar         counts the images
    unreadable  gains the reason of each image that cannot be read, by its path
    classes     restrict the answer to these: the others' logits are left out before the softmax,
                and `confidence` is the largest of what remains

    Images are fed as they are: nothing is shuffled or masked.
    """
    among = list(range(model.card.num_classes)) if classes is None else list(classes)
    rows: list[tuple[str, float, float]] = []

    def failed(record: ImageRecord, reason: str) -> None:
        unreadable[str(source.path / record.image_id)] = reason
        rows.append((record.image_id, np.nan, np.nan))

    for batch, images in opened_batches(model, source, records, prepare, failed, bar.advance):
        logits = model(model.normalize(images.to(model.like)))[:, among].cpu()
        sure, best = logits.double().softmax(-1).max(-1)  # in float32 many would be 1 alike
        for record, confidence, place in zip(batch, sure.tolist(), best.tolist(), strict=True):
            rows.append((record.image_id, float(among[place] == record.label), confidence))
    return pd.DataFrame(rows, columns=["image_id", "correct", "confidence"])


# the command --------------------------------------------------------------------------------------

OURS = "our own corruptions"
OFFICIAL_CELL = 50_000
"""Images under each corruption and severity of the published ImageNet-C."""
VALIDATION_OF_CLASS = 50
"""Images of each class in ImageNet's validation set."""


@dataclass(frozen=True)
class Model:
    """A network with its name in tables, and its row of the paper."""

    label: str
    network: LoadedModel
    paper: Mapping[str, Any]


@dataclass(frozen=True)
class Sets:
    """The sets of images that the command line names, opened and checked; of the published sets
    with whether each is the published one."""

    arguments: EvaluationArguments
    corrupted: CorruptionFolders | None
    hard: tuple[ImageSource, bool] | None  # ImageNet-A
    strange: tuple[ImageSource, bool] | None  # ImageNet-O
    ordinary: ImageSource | None  # --data
    unreadable: dict[str, str] = field(default_factory=dict)
    """The reasons of images that could not be read, by their paths."""

    def photographs(
        self,
        model: Model,
        source: ImageSource,
        records: Sequence[ImageRecord],
        classes: Sequence[int] | None = None,
    ) -> pd.DataFrame:
        """The model's answers to photographs, among these classes; UserError where one restricts
        them and no image can be read. They are cut out as ImageNet-C's were, not with the
        checkpoint's own crop."""
        prepare = Preprocessing.robustness_sets(model.network.card.img_size)
        chosen = spread_subset(records, self.arguments.limit, self.arguments.seed)
        with Progress(model.label, len(chosen), "images") as bar:
            rows = answers(model.network, source, chosen, prepare, bar, self.unreadable, classes)
        if classes is not None and rows["correct"].isna().all():
            first, reason = next(iter(self.unreadable.items()), ("", ""))
            raise UserError(
                f"None of the {len(rows)} images of {source.path.name} can be read, such as "
                f"{shown(first)}: {shown(reason)}. Expected at least one: unpack the archive "
                "again, or mend that."
            )
        return rows


def write_robustness(arguments: EvaluationArguments) -> Outcome:
    """The tables of all checkpoints as Markdown; files in --out are updated set by set."""
    sets = opened(arguments)
    tables: list[pd.DataFrame] = []
    errors: dict[str, pd.DataFrame] = {}
    text, table = "", pd.DataFrame()
    for model in _models(arguments, sets):
        for images, lines in _measured(model, sets, errors):
            found = pd.DataFrame(lines).astype({"severity": "Int64", "paper": float})
            found.insert(0, "model", model.label)
            found.insert(1, "images", images)
            tables.append(found)
            table = pd.concat(tables, ignore_index=True)
            text = markdown(table)
            if arguments.out:
                reasons = pd.DataFrame(sets.unreadable.items(), columns=["image", "reason"])
                files = {"unreadable.csv": reasons}
                if errors:
                    wrong = {label: wrong_severities(mine) for label, mine in errors.items()}
                    rows = pd.concat(wrong, names=["model"]).swaplevel().reset_index()
                    files["per_image.csv"] = rows
                files["robustness.csv"] = table
                write_report(arguments.out, files, "robustness.md", text)
    return Outcome(text, sets.unreadable, table.to_dict("records"))


def opened(arguments: EvaluationArguments) -> Sets:
    """The sets, and --out made apart from them."""
    if arguments.imagenet_o and arguments.data is None:
        raise UserError(
            "--imagenet-o: AUPR tells strange images from ordinary ones. Expected --data with "
            "photographs of its 200 classes, such as ImageNet's validation set; got none."
        )
    c, a, o = arguments.imagenet_c, arguments.imagenet_a, arguments.imagenet_o
    ordinary = open_images(arguments.data, arguments.labels) if arguments.data else None
    if ordinary and ordinary.records[0].label is None:
        raise UserError(
            "--data: expected images with labels beside robustness. "
            f"{ordinary.labels_described} Give --labels, class folders, or leave --data out."
        )
    sets = Sets(
        arguments,
        corruption_folders(c) if c else None,
        two_hundred_classes(a, "A") if a else None,
        two_hundred_classes(o, "O") if o else None,
        ordinary,
    )
    images = ("imagenet_c", "imagenet_a", "imagenet_o", "data")
    prepare_folder(arguments, "robustness.csv", *images)
    return sets


def _models(arguments: EvaluationArguments, sets: Sets) -> list[Model]:
    """All checkpoints, loaded before work begins, so that mistakes show at once."""
    device = pick_device(arguments.device)
    models = []
    for checkpoint in named_checkpoints(arguments.checkpoint, "--checkpoint"):
        label, network = checkpoint.label, load_checkpoint(checkpoint, arguments).to(device)
        if (sets.hard or sets.strange) and network.card.num_classes != NUM_IMAGENET:
            raise UserError(
                f"{label} has {network.card.num_classes} classes; ImageNet-A and -O need a model "
                "of ImageNet's 1000. Give another --checkpoint."
            )
        if sets.corrupted:
            plain = sets.corrupted.plain_classes
            if plain not in (None, network.card.num_classes):
                raise UserError(
                    f"--imagenet-c was made of {plain} class folders, numbered in sorted order, "
                    f"and {label} has {network.card.num_classes} classes: expected as many, or the "
                    "numbers are not the model's. Give images in folders of synsets or of class "
                    "indices to `mjp sample --corrupt`, or another --checkpoint."
                )
            records = sets.corrupted.images.records
            check_labels(records, network.card.num_classes, "--imagenet-c", label)
        if sets.ordinary:
            check_labels(sets.ordinary.records, network.card.num_classes, "--data", label)
        paper = counterpart(network, papers_row(checkpoint, arguments))
        models.append(Model(label, network, paper))
    return models


def _measured(
    model: Model, sets: Sets, errors: dict[str, pd.DataFrame]
) -> Iterator[tuple[str, list[Line]]]:
    """The name and the lines of one set after the other; `errors` gains the model's answers to the
    corrupted images."""
    if sets.corrupted:
        yield _under_corruptions(model, sets, sets.corrupted, errors)
    if sets.hard:
        source, official = sets.hard
        rows = sets.photographs(model, source, source.records, _classes(source))
        whole = official and sets.arguments.limit is None
        yield "ImageNet-A", hard_lines(rows, model.paper if whole else {})
    if sets.strange and sets.ordinary:
        source, official = sets.strange
        classes = _classes(source)
        of_them = [record for record in sets.ordinary.records if record.label in classes]
        if not of_them:
            raise UserError(
                "--data holds no image of ImageNet-O's 200 classes: expected photographs of these, "
                f"as ImageNet's validation set has them. {sets.ordinary.labels_described}"
            )
        strange = sets.photographs(model, source, source.records, classes)
        known = sets.photographs(model, sets.ordinary, of_them, classes)
        whole = official and len(known) == len(classes) * VALIDATION_OF_CLASS
        published = whole and sets.arguments.limit is None
        yield "ImageNet-O", strange_lines(strange, known, model.paper if published else {})


def _under_corruptions(
    model: Model, sets: Sets, folders: CorruptionFolders, errors: dict[str, pd.DataFrame]
) -> tuple[str, list[Line]]:
    columns: dict[tuple[str, int], pd.Series[float]] = {}
    limit, seed = sets.arguments.limit, sets.arguments.seed
    subset = spread_subset(folders.images.records, limit, seed)
    chosen = {record.image_id for record in subset}
    size = model.network.card.img_size
    whole = Preprocessing(
        size, min(height_width(size)), "bilinear"
    )  # the pictures are cut out already
    with Progress(model.label, len(folders.by_cell) * len(chosen), "images") as bar:
        for cell, folder in folders.by_cell.items():
            source = open_images(folder)
            records = [record for record in source.records if record.image_id in chosen]
            rows = answers(model.network, source, records, whole, bar, sets.unreadable)
            columns[cell] = 1 - rows.set_index("image_id")["correct"]
    mine = pd.DataFrame(columns).sort_index()
    classes = model.network.card.num_classes
    published = folders.official and len(mine) == OFFICIAL_CELL
    lines = corruption_lines(mine, model.paper if published else {}, classes=classes)
    if sets.ordinary:
        rows = sets.photographs(model, sets.ordinary, sets.ordinary.records)
        lines.insert(0, line("error without corruption", share(1 - rows["correct"])))
    for other, others in errors.items():
        lines += difference_lines(mine, other, others, classes=classes)
    errors[model.label] = mine
    return "ImageNet-C" if folders.official else OURS, lines


def _classes(source: ImageSource) -> list[int]:
    return sorted({record.label for record in source.records if record.label is not None})


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
    "RMS calibration error": "RMS calibration error over all bins of 100 images; the official code "
    "leaves out the last bin.",
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
