"""The images of a run folder (its images.csv), and the check that they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

import pandas as pd
from PIL import Image

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing
from mjp_privacy.experiment.block import ImageNote
from mjp_privacy.experiment.image_list import write_images
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import LoadedModel


class Inventory:
    """images.csv of a run folder; `known` holds its lines by image_id.

    with_rows: gives the images that have rows in the folder
    """

    def __init__(
        self, store: RunStore, with_rows: Callable[[], Collection[str]] = frozenset
    ) -> None:
        self.store = store
        self.with_rows = with_rows
        try:
            self.known = dict(store.image_list().images)
        except BadFile:  # no file of lines; whoever mends the folder sets it aside
            self.known = {}
        self.lost: list[ImageNote] = []
        """Images that have rows and lack a line, as they are now."""

    def check_known(self, source: ImageSource, chosen: Sequence[ImageRecord]) -> list[str]:
        """Raise if a chosen image has other pixels or another label than the folder's image of the
        same id: its rows would be another image's.

        Returns the ids of images that the folder holds and `source` no longer does.
        """
        available = {record.image_id for record in source.records}
        usable = [name for name, row in self.known.items() if row["status"] == "ok"]
        absent = [name for name in usable if name not in available]
        if absent and not available & self.known.keys():
            self._refuse(absent, "are not among these images", "the images it was made with")
        relabelled = [record.image_id for record in chosen if self._relabelled(record)]
        self._refuse(relabelled, "had another label", "the labels it was made with")
        changed = [record.image_id for record in chosen if self._changed(record, source)]
        self._refuse(changed, "had other pixels", "the same pixels under the same name")
        if unknown := [record for record in chosen if record.image_id not in self.known]:
            with_rows = self.with_rows()
            self.lost = [_note(r, source) for r in unknown if r.image_id in with_rows]
        return absent

    def _refuse(self, image_ids: Sequence[str], fault: str, expected: str) -> None:
        if image_ids:
            raise UserError(
                f"{len(image_ids)} image(s) of the run folder {self.store.root} {fault}: "
                f"{', '.join(image_ids[:3])}{', …' if len(image_ids) > 3 else ''}. Expected "
                f"{expected}. Give these, or another --out."
            )

    def _relabelled(self, record: ImageRecord) -> bool:
        """Whether the folder has another label for this image.

        An image that had no label may get one: its earlier rows have another run_id.
        """
        known = self.known.get(record.image_id)
        if known is None or known["status"] != "ok" or record.label is None:
            return False
        return not pd.isna(known["label"]) and int(known["label"]) != record.label

    def _changed(self, record: ImageRecord, source: ImageSource) -> bool:
        known = self.known.get(record.image_id)
        if known is None or known["status"] != "ok":
            return False
        try:
            if hashlib.sha256(source.read_bytes(record)).hexdigest() == known["sha256"]:
                return False
            return pixel_sha256(source.decode(record)) != known["pixel_sha256"]
        except ImageError:
            return True

    def begin(self) -> None:
        """Write the lines that were lost: nothing is written before."""
        self.note(self.lost)

    def tidy(self) -> None:
        """Leave one line an image in the file, which may have grown several."""
        if not self.store.image_list().tidy:
            write_images(self.store.images_path, self.known.values())

    def note(self, notes: Sequence[ImageNote]) -> None:
        """Write a line for each of these images that is not there yet.

        What is known already is kept: the hashes of an image that another model finds too small,
        and the label of an image that is now given without one.
        """
        new = []
        for note in notes:
            record, known = note.record, self.known.get(note.record.image_id)
            if note.reason and known is not None and known["status"] == "ok":
                continue
            new_label = {"label": record.label, "label_source": record.label_source}
            label = known if known is not None and record.label is None else new_label
            line = {
                "image_id": record.image_id,
                "label": label["label"],
                "label_source": label["label_source"],
                "sha256": note.sha256,
                "pixel_sha256": note.pixel_sha256,
                "status": "failed" if note.reason else "ok",
                "reason": note.reason,
            }
            if line != known:
                self.known[record.image_id] = line
                new.append(line)
        if new:
            self.store.append_images(new)


def _note(record: ImageRecord, source: ImageSource) -> ImageNote:
    """An image as it is now, for a line that was lost."""
    try:
        content, picture = source.read_bytes(record), source.decode(record)
    except ImageError as error:
        return ImageNote(record, "", "", error.reason)
    return ImageNote(record, hashlib.sha256(content).hexdigest(), pixel_sha256(picture))


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


def pixel_sha256(picture: Image.Image) -> str:
    """The SHA-256 of a picture's size and pixels, which re-encoding its file does not change."""
    return hashlib.sha256(f"{picture.size} ".encode() + picture.tobytes()).hexdigest()


def preprocessing(model: LoadedModel) -> Preprocessing:
    """The resizing and cropping that brings a picture to the model's input size."""
    card = model.card
    return Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
