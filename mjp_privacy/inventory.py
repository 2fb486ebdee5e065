"""Which images a run knows, that they are still the same, and which units are finished."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pandas as pd
import torch

from mjp_privacy.block import Block
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing
from mjp_privacy.errors import UserError
from mjp_privacy.models import Victim
from mjp_privacy.store import RunStore

COLUMNS = ("image_id", "label", "label_source", "sha256", "pixel_sha256", "status", "reason")


class Inventory:
    """The run's images.csv, and the finished units of each cell."""

    def __init__(
        self, store: RunStore, source: ImageSource, records: Sequence[ImageRecord]
    ) -> None:
        self.store, self.source, self.records = store, source, records
        self.known = {row["image_id"]: row for row in store.read_images().to_dict("records")}
        self._finished: dict[str, set[str]] = {}

    def check_known(self) -> None:
        """The same image_id with other pixels is an error: its rows would be somebody else's."""
        changed = [record.image_id for record in self.records if self._changed(record)]
        if changed:
            raise UserError(
                f"{len(changed)} image(s) differ from those this run folder was made with: "
                f"{', '.join(changed[:3])}{', …' if len(changed) > 3 else ''}. Expected the same "
                f"pixels under the same name. Give the same images, or another --out than "
                f"{self.store.root}."
            )

    def _changed(self, record: ImageRecord) -> bool:
        known = self.known.get(record.image_id)
        if known is None or known["status"] != "ok":
            return False
        if self._file_sha256(record) == known["sha256"]:
            return False
        try:
            return _pixel_sha256(self.source, record) != known["pixel_sha256"]
        except ImageError:
            return True

    def _file_sha256(self, record: ImageRecord) -> str:
        try:
            return hashlib.sha256(self.source.read_bytes(record)).hexdigest()
        except ImageError:
            return ""

    def unfinished(self, run_id: str, block: Block) -> list[ImageRecord]:
        """Records of the block whose rows of this cell are missing or failed."""
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
        card = model.card
        preprocessing = Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
        images, unreadable = {}, {}
        for record in block.records:
            try:
                picture = self.source.decode(record, min_side=model.patch_size)
            except ImageError as error:
                unreadable[record] = error.reason
                self._note(record, "", "failed", error.reason)
                continue
            images[record] = preprocessing(picture)
            self._note(record, _digest(picture.tobytes()), "ok", "")
        self.store.write_images(pd.DataFrame(list(self.known.values()), columns=list(COLUMNS)))
        return images, unreadable

    def _note(self, record: ImageRecord, pixels: str, status: str, reason: str) -> None:
        self.known[record.image_id] = {
            "image_id": record.image_id,
            "label": record.label,
            "label_source": record.label_source,
            "sha256": self._file_sha256(record),
            "pixel_sha256": pixels,
            "status": status,
            "reason": reason,
        }


def _pixel_sha256(source: ImageSource, record: ImageRecord) -> str:
    return _digest(source.decode(record).tobytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
