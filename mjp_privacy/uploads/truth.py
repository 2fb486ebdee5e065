"""The private images that an upload was made of, as a recorder kept them for scoring.

    truth/NAME.safetensors   images (B, 3, S, S) in [0, 1]; under MJP mask and permutation (B, N);
                             metadata: image_ids, a JSON list

A file that is anything else fails its upload: without scores that would hide in its line's mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import BadFile
from mjp_privacy.core.read import FileKind
from mjp_privacy.core.text import shown
from mjp_privacy.data.ids import LONGEST, is_usable
from mjp_privacy.models.tensor_files import FLOATS, TensorFile

TRUTH = FileKind(
    "an upload's private images: `images` (B, 3, S, S) from 0 to 1, one of `image_ids` for each in "
    "the metadata, under MJP `mask` and `permutation` (B, N)",
    "Mend that file, or take it out to attack without scores.",
    4 << 30,
)

WHOLE = ("I64", "I32", "I16", "I8", "U8")
TYPES = {"images": FLOATS, "mask": ("BOOL", *WHOLE), "permutation": WHOLE}
"""The types that each tensor may have."""

OUTSIDE = 1e-5
"""How far rounding takes a pixel out of [0, 1]."""


@dataclass(frozen=True)
class RecordedTruth:
    """The private images of an upload, and how they were shuffled."""

    images: Tensor  # (B, C, S, S) in [0, 1], before any shuffle
    image_ids: tuple[str, ...]
    mask: Tensor | None  # (B, N) bool, of the first local step
    permutation: Tensor | None  # (B, N)


class TruthFile:
    """A file of private images whose header is sound: TruthFile(path).image_ids."""

    def __init__(self, path: Path) -> None:
        self.file = TensorFile(path, TRUTH, (*FLOATS, *TYPES["mask"]))
        shapes, types = self.file.shapes, self.file.dtypes
        if strange := [name for name in shapes if name not in TYPES]:
            raise self._refusal("a tensor of another name", strange[0])
        if "images" not in shapes:
            raise self._refusal("no tensor of this name", "images")
        if ("mask" in shapes) != ("permutation" in shapes):
            raise self._refusal("one of mask and permutation without the other")
        for name, kind in types.items():
            if kind not in TYPES[name]:
                allowed = ", ".join(TYPES[name])
                raise self._refusal(f"entries of type {kind} where {allowed} are read", name)
        self.image_ids = self._checked_ids(self.file.metadata_value("image_ids"))

    def _checked_ids(self, content: Any) -> tuple[str, ...]:
        images = self.file.shapes["images"][:1]
        if not isinstance(content, list) or (len(content),) != images:
            count = f"{len(content)} ids" if isinstance(content, list) else "no list of ids"
            raise self._refusal(f"{count} for images of shape {self._shape('images')}", "image_ids")
        for image_id in content:
            if not isinstance(image_id, str) or not image_id.strip() or not is_usable(image_id):
                got = f"{shown(repr(image_id), 60)}, which is no text of 1 to {LONGEST} characters"
                raise self._refusal(got, "image_ids")
        if len(set(content)) < len(content):
            raise self._refusal("one name for two images", "image_ids")
        return tuple(content)

    def check_shapes(self, batch: int, size: int, patches: int) -> None:
        """Raise unless it holds the images of such a batch, for a model of this input size."""
        expected: Mapping[str, tuple[int, ...]] = {
            "images": (batch, 3, size, size),
            "mask": (batch, patches),
            "permutation": (batch, patches),
        }
        for name in self.file.shapes:
            if self.file.shapes[name] != expected[name]:
                got = f"the shape {self._shape(name)} where its upload needs {expected[name]}"
                raise self._refusal(got, name)

    def read(self) -> RecordedTruth:
        """The images and the shuffle; to be called after `check_shapes`."""
        tensors = self.file.tensors(finite=True)
        images = tensors["images"].float()
        low, high = (float(bound) for bound in images.aminmax())
        if low < -OUTSIDE or high > 1 + OUTSIDE:
            raise self._refusal(f"values from {low:.3g} to {high:.3g}", "images")
        mask, permutation = tensors.get("mask"), tensors.get("permutation")
        if mask is None or permutation is None:
            return RecordedTruth(images, self.image_ids, None, None)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise self._refusal("entries other than 0 and 1", "mask")
        mask, permutation = mask.bool(), permutation.long()
        places = torch.arange(mask.shape[-1])
        if not torch.equal(permutation.sort(-1).values, places.expand_as(permutation)):
            got = f"rows that are no order of the patches 0 to {len(places) - 1}"
            raise self._refusal(got, "permutation")
        if bool(((permutation != places) & ~mask).any()):
            raise self._refusal("patches that move and that `mask` does not name", "permutation")
        return RecordedTruth(images, self.image_ids, mask, permutation)

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.file.shapes[name]

    def _refusal(self, got: str, field: str = "") -> BadFile:
        return TRUTH.refusal(self.file.path, got, field)
