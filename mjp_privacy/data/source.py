"""An opened set of images: its records, their bytes and their pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from mjp_privacy.data.decoding import Altered, ImageError, check_header, decoded
from mjp_privacy.data.files import Files
from mjp_privacy.data.labels import LabelSource


@dataclass(frozen=True)
class ImageRecord:
    """One image, not yet read.

    `image_id` is its path inside the folder or zip. `group` names the photograph it was cut from,
    by default its own id: images of one group are not independent in a bootstrap.
    """

    image_id: str
    label: int | None = None
    label_source: LabelSource = "none"
    group: str = ""

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", self.image_id)


@dataclass(frozen=True)
class ImageSource:
    """Records sorted by their ids; either all of them have labels or none.

    It can be pickled, and used after a fork.
    """

    path: Path
    records: tuple[ImageRecord, ...]
    labels_described: str
    files: Files = field(repr=False)
    altered: Altered = field(default_factory=Altered, repr=False, compare=False)
    """Files that were turned, or are animations, of those that were opened so far."""

    def read_bytes(self, record: ImageRecord) -> bytes:
        """The image file as stored. Raises ImageError if it cannot be read."""
        try:
            return self.files.read(record.image_id)
        except ImageError as error:
            raise ImageError(error.reason, record.image_id) from error

    def check_header(self, record: ImageRecord) -> None:
        """Raise ImageError with the reason where the file's header is that of no usable image."""
        content = self.read_bytes(record)
        try:
            self.altered.note(record.image_id, *check_header(content))
        except ImageError as error:
            raise ImageError(error.reason, record.image_id) from error

    def decode(self, record: ImageRecord, *, min_side: int = 1) -> Image.Image:
        """The upright 8-bit RGB picture. Raises ImageError with the reason.

        `min_side`: the smallest allowed short side in pixels, one patch of the model.
        """
        content = self.read_bytes(record)
        try:
            picture, turn, animated = decoded(content, min_side=min_side)
        except ImageError as error:
            raise ImageError(error.reason, record.image_id) from error
        self.altered.note(record.image_id, turn, animated)
        return picture
