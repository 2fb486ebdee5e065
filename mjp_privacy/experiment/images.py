"""The private images of a run: which are attacked, how they are prepared, and whether they are
still the ones that a run folder was made with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing, readable_subset
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.source import ImageNote
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import LoadedModel

KNOWN_BY = ("image_id", "status", "label", "sha256", "pixel_sha256")


def chosen_images(
    source: ImageSource, experiment: Experiment, limit: int | None
) -> tuple[tuple[ImageRecord, ...], list[ImageNote]]:
    """The images that are attacked, and notes on files that are no images and were replaced.

    chosen_images(open_images("photographs"), experiment, limit=20)

    Only a limit replaces files: without one every file is taken, and one that is no image has rows
    that say so.
    """
    records = source.records
    if (
        choice := experiment.classes
    ) is not None:  # an image without a label belongs to every class
        records = tuple(r for r in records if r.label is None or choice.holds(r.label))
        if not records:
            raise UserError(
                f"None of the {len(source.records)} images of {source.path} has a class index that "
                f"leaves {', '.join(map(str, choice.remainders))} when divided by {choice.modulo} "
                "(the config's `classes`). Give images of these classes, or remove `classes`."
            )
    chosen, no_images = readable_subset(source, records, limit, experiment.seed)
    notes = [
        ImageNote(record, file_sha256(source, record), "", f"{reason}; another file replaced it")
        for record, reason in no_images.items()
    ]
    return chosen, notes


def check_same_images(
    store: RunStore, source: ImageSource, chosen: Sequence[ImageRecord]
) -> list[str]:
    """Raise if a chosen image has other pixels or another label than the run folder's image of the
    same id: its rows would be another image's.

    Returns the ids of images that the folder holds and `source` no longer does.
    """
    known = _known_images(store)
    available = {record.image_id for record in source.records}
    absent = [name for name in known if name not in available]
    if absent and not available & known.keys():
        _refuse(store, absent, "are not among these images", "the images it was made with")
    relabelled = [r.image_id for r in chosen if _relabelled(known.get(r.image_id), r)]
    _refuse(store, relabelled, "had another label", "the labels it was made with")
    changed = [r.image_id for r in chosen if _changed(known.get(r.image_id), r, source)]
    _refuse(store, changed, "had other pixels", "the same pixels under the same name")
    return absent


def _known_images(store: RunStore) -> dict[str, Mapping[str, object]]:
    """The images of the folder that could be read, with their hashes, and with the label that any
    of its cells has of them: some may be of the time before there were labels."""
    known: dict[str, dict[str, Any]] = {}
    for run_id in store.stored_cells():
        ids = {name for names in store.cell(run_id).ids for name in names}
        told = {name for name, of_image in known.items() if not pd.isna(of_image["label"])}
        if told >= ids or "pixel_sha256" not in store.cell(run_id).columns:
            continue
        rows = store.read(run_id, KNOWN_BY)
        rows = rows[(rows["status"] != "unreadable") & rows["pixel_sha256"].fillna("").ne("")]
        for row in rows.to_dict("records"):
            of_image = known.setdefault(str(row["image_id"]), {str(k): v for k, v in row.items()})
            if pd.isna(of_image["label"]):
                of_image["label"] = row["label"]
    return dict(known)


def _relabelled(known: Mapping[str, object] | None, record: ImageRecord) -> bool:
    """Whether the folder has another label for this image. One that had no label may get one: its
    earlier rows have another run_id."""
    if known is None or record.label is None or pd.isna(known["label"]):  # type: ignore[call-overload]
        return False
    return int(str(known["label"])) != record.label


def _changed(known: Mapping[str, object] | None, record: ImageRecord, source: ImageSource) -> bool:
    if known is None:
        return False
    try:
        if file_sha256(source, record) == known["sha256"]:
            return False
        return pixel_sha256(source.decode(record)) != known["pixel_sha256"]
    except ImageError:
        return True


def _refuse(store: RunStore, image_ids: Sequence[str], fault: str, expected: str) -> None:
    if image_ids:
        raise UserError(
            f"{len(image_ids)} image(s) of the run folder {store.root} {fault}: "
            f"{', '.join(image_ids[:3])}{', …' if len(image_ids) > 3 else ''}. Expected "
            f"{expected}. Give these, or another --out."
        )


def check_labels(records: Sequence[ImageRecord], model: LoadedModel) -> None:
    """Raise unless every label is a class index of the model."""
    classes = model.card.num_classes
    labels = {r.image_id: r.label for r in records if r.label is not None}
    wrong = [name for name, label in labels.items() if not 0 <= label < classes]
    if wrong:
        raise UserError(
            f"Image {wrong[0]} has label {labels[wrong[0]]}, but the model has {classes} "
            f"classes, 0 to {classes - 1} ({len(wrong)} such images). Give the labels of the "
            "model's own classes with --labels, or images without labels."
        )


def file_sha256(source: ImageSource, record: ImageRecord) -> str:
    """The SHA-256 of an image's file; "" where the file cannot be read."""
    try:
        return hashlib.sha256(source.read_bytes(record)).hexdigest()
    except ImageError:
        return ""


def pixel_sha256(picture: Image.Image) -> str:
    """The SHA-256 of a picture's size and pixels, which re-encoding its file does not change."""
    return hashlib.sha256(f"{picture.size} ".encode() + picture.tobytes()).hexdigest()


def preprocessing(model: LoadedModel) -> Preprocessing:
    """The resizing and cropping that brings a picture to the model's input size."""
    card = model.card
    return Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
