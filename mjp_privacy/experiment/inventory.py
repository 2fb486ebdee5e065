"""Which images a run knows, that they are still the same, and which units are finished."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pandas as pd
import torch
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models import Victim

COLUMNS = ("image_id", "label", "label_source", "sha256", "pixel_sha256", "status", "reason")


class Inventory:
    """The run's images.csv, and the finished units of each cell."""

    def __init__(
        self, store: RunStore, source: ImageSource, records: Sequence[ImageRecord]
    ) -> None:
        self.store, self.source, self.records = store, source, records
        self.known = {row["image_id"]: row for row in store.read_images().to_dict("records")}
        self._finished: dict[str, set[str]] = {}

    def check_known(self) -> list[str]:
        """The same image_id with other pixels or another label is an error: its rows would be
        somebody else's. Returns the ids that the folder knows and the images no longer hold."""
        given = {record.image_id for record in self.source.records}
        absent = [name for name, row in self.known.items() if row["status"] == "ok"]
        absent = [name for name in absent if name not in given]
        if absent and not given & self.known.keys():
            self._refuse(absent, "are not among these images", "the images it was made with")
        relabelled = [record.image_id for record in self.records if self._relabelled(record)]
        self._refuse(relabelled, "had another label", "the labels it was made with")
        changed = [record.image_id for record in self.records if self._changed(record)]
        self._refuse(changed, "had other pixels", "the same pixels under the same name")
        return absent

    def _refuse(self, image_ids: Sequence[str], fault: str, expected: str) -> None:
        if image_ids:
            raise UserError(
                f"{len(image_ids)} image(s) of the run folder {self.store.root} {fault}: "
                f"{', '.join(image_ids[:3])}{', …' if len(image_ids) > 3 else ''}. Expected "
                f"{expected}. Give these, or another --out."
            )

    def check_model(self, model: Victim) -> None:
        """The model can take images, and every label is one of its classes."""
        _preprocessing(model)
        classes = model.card.num_classes
        labels = {r.image_id: r.label for r in self.records if r.label is not None}
        wrong = [name for name, label in labels.items() if not 0 <= label < classes]
        if wrong:
            raise UserError(
                f"Image {wrong[0]} has label {labels[wrong[0]]}, but the model has {classes} "
                f"classes, 0 to {classes - 1} ({len(wrong)} such images). Give the labels of the "
                "model's own classes with --labels, or images without labels."
            )

    def _relabelled(self, record: ImageRecord) -> bool:
        """Labels that were none are no others: those rows have a run_id of their own."""
        known = self.known.get(record.image_id)
        if known is None or known["status"] != "ok" or record.label is None:
            return False
        return not pd.isna(known["label"]) and int(known["label"]) != record.label

    def _changed(self, record: ImageRecord) -> bool:
        known = self.known.get(record.image_id)
        if known is None or known["status"] != "ok":
            return False
        if self._file_sha256(record) == known["sha256"]:
            return False
        try:
            return _pixel_sha256(self.source.decode(record)) != known["pixel_sha256"]
        except ImageError:
            return True

    def _file_sha256(self, record: ImageRecord) -> str:
        try:
            return hashlib.sha256(self.source.read_bytes(record)).hexdigest()
        except ImageError:
            return ""

    def unfinished(self, run_id: str, block: Block) -> list[ImageRecord]:
        """Records of the block whose rows of this cell are missing or failed, as the command
        found them."""
        if run_id not in self._finished:
            rows = self.store.read_rows(run_id)
            done = rows.loc[rows["status"] != "failed", "image_id"]
            failed = set(rows.loc[rows["status"] == "failed", "image_id"])
            self._finished[run_id] = set(done) - failed
        finished = self._finished[run_id]
        return [record for record in block.records if record.image_id not in finished]

    def decode(
        self, block: Block, model: Victim
    ) -> tuple[dict[ImageRecord, torch.Tensor], dict[ImageRecord, str]]:
        """The block's images (3, S, S) as the model takes them, and why others cannot be had."""
        preprocessing = _preprocessing(model)
        images, unreadable = {}, {}
        for record in block.records:
            try:
                picture = self.source.decode(record, min_side=model.patch_size)
            except ImageError as error:
                unreadable[record] = error.reason
                self._note(record, "", "failed", error.reason)
                continue
            images[record] = preprocessing(picture)
            self._note(record, _pixel_sha256(picture), "ok", "")
        self.store.write_images(pd.DataFrame(list(self.known.values()), columns=list(COLUMNS)))
        return images, unreadable

    def _note(self, record: ImageRecord, pixels: str, status: str, reason: str) -> None:
        """An image that one model took and another finds too small stays known by its pixels; a
        label stays known when the same images come without."""
        known = self.known.get(record.image_id)
        if status == "failed" and known is not None and known["status"] == "ok":
            return
        given = {"label": record.label, "label_source": record.label_source}
        labels = known if known is not None and record.label is None else given
        self.known[record.image_id] = {
            "image_id": record.image_id,
            "label": labels["label"],
            "label_source": labels["label_source"],
            "sha256": self._file_sha256(record),
            "pixel_sha256": pixels,
            "status": status,
            "reason": reason,
        }


def _pixel_sha256(picture: Image.Image) -> str:
    return hashlib.sha256(f"{picture.size} ".encode() + picture.tobytes()).hexdigest()


def _preprocessing(model: Victim) -> Preprocessing:
    card = model.card
    return Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
