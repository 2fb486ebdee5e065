"""Which images a run folder knows, and that they are still the same: its images.csv."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pandas as pd
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing
from mjp_privacy.experiment.block import ImageNote
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import LoadedModel

COLUMNS = ("image_id", "label", "label_source", "sha256", "pixel_sha256", "status", "reason")


class Inventory:
    """The lines of images.csv by image_id."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.known = {row["image_id"]: row for row in store.read_images().to_dict("records")}

    def check_known(self, source: ImageSource, chosen: Sequence[ImageRecord]) -> list[str]:
        """The same image_id with other pixels or another label is an error: its rows would be
        somebody else's. Returns the ids that the folder knows and the images no longer hold."""
        given = {record.image_id for record in source.records}
        absent = [name for name, row in self.known.items() if row["status"] == "ok"]
        absent = [name for name in absent if name not in given]
        if absent and not given & self.known.keys():
            self._refuse(absent, "are not among these images", "the images it was made with")
        relabelled = [record.image_id for record in chosen if self._relabelled(record)]
        self._refuse(relabelled, "had another label", "the labels it was made with")
        changed = [record.image_id for record in chosen if self._changed(record, source)]
        self._refuse(changed, "had other pixels", "the same pixels under the same name")
        return absent

    def _refuse(self, image_ids: Sequence[str], fault: str, expected: str) -> None:
        if image_ids:
            raise UserError(
                f"{len(image_ids)} image(s) of the run folder {self.store.root} {fault}: "
                f"{', '.join(image_ids[:3])}{', …' if len(image_ids) > 3 else ''}. Expected "
                f"{expected}. Give these, or another --out."
            )

    def _relabelled(self, record: ImageRecord) -> bool:
        """Rows of an image without a label have a run_id of their own: a label may come later."""
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

    def note(self, notes: Sequence[ImageNote]) -> None:
        """Write down what was learnt of these images.

        An image that one model took and another finds too small stays known by its pixels; a label
        stays known when the same images come without.
        """
        for one in notes:
            record, known = one.record, self.known.get(one.record.image_id)
            if one.reason and known is not None and known["status"] == "ok":
                continue
            given = {"label": record.label, "label_source": record.label_source}
            labels = known if known is not None and record.label is None else given
            self.known[record.image_id] = {
                "image_id": record.image_id,
                "label": labels["label"],
                "label_source": labels["label_source"],
                "sha256": one.sha256,
                "pixel_sha256": one.pixel_sha256,
                "status": "failed" if one.reason else "ok",
                "reason": one.reason,
            }
        self.store.write_images(pd.DataFrame(list(self.known.values()), columns=list(COLUMNS)))


def check_labels(records: Sequence[ImageRecord], model: LoadedModel) -> None:
    """Raise unless every label is one of the model's classes."""
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
    """By which a picture is known again, however its file is encoded."""
    return hashlib.sha256(f"{picture.size} ".encode() + picture.tobytes()).hexdigest()


def preprocessing(model: LoadedModel) -> Preprocessing:
    """From a picture to the model's input size."""
    card = model.card
    return Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
