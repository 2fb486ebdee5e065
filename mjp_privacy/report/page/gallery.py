"""The pictures inside the page: as many images as fit, the same ones for every line.

Images are taken at evenly spread quantiles of one line's PSNR, those of the card's strip first, so
that nobody picks them. The page's copies are compressed; the files in pictures/ are lossless.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from mjp_privacy.report.lines import Line
from mjp_privacy.report.page.content import PagePicture
from mjp_privacy.report.pictures.pixels import Picture, picture
from mjp_privacy.report.worst_case import DerivedLine, picture_ids

STRIP_QUANTILES = (0.1, 0.5, 0.9)
MOST_IMAGES = 48
MOST_PICTURES = 1500
MOST_BYTES = 8_000_000  # of data URIs; the whole page stays below 15 MB
LARGEST_SIDE = 192
SMALL_SIDE = 96  # pictures up to this side are embedded without loss


@dataclass
class Gallery:
    """Pictures by key, and the images they belong to, filled until the page is full."""

    pictures: dict[str, str] = field(default_factory=dict)
    shown: list[PagePicture] = field(default_factory=list)
    size: int = 0

    @property
    def full(self) -> bool:
        """Whether no further image fits."""
        return (
            len(self.shown) >= MOST_IMAGES
            or len(self.pictures) >= MOST_PICTURES
            or self.size >= MOST_BYTES
        )

    def add(self, image_id: str, lines: Sequence[Line], *, main: Line | None, strip: bool) -> None:
        """Add what every line made of one image; nothing if no line has a picture of it.

        main: the line whose client's input stands in the card's strip
        """
        original = None
        masks: dict[int, str] = {}
        keys: dict[int, str] = {}
        inputs: dict[int, str] = {}
        for line in lines:
            stored = line.reconstruction(image_id)
            if stored is None or "images" not in stored:
                continue
            source = line.chosen[image_id] if isinstance(line, DerivedLine) else line
            keys[line.number] = self._key(f"{source.number}", image_id, stored["images"])
            if "plain" in stored and original is None:
                original = self._key("original", image_id, stored["plain"])
            if "input" in stored and not _equal(stored, "input", "plain"):
                fed = hashlib.sha256(stored["input"].numpy().tobytes()).hexdigest()[:12]
                inputs[line.number] = self._key(f"fed {fed}", image_id, stored["input"])
            mask = stored.get("mask", stored.get("named_mask"))  # the attacker's, without truth
            if mask is not None:
                masks[line.number] = "".join("1" if hidden else "0" for hidden in mask)
        if keys:
            fed_there = None if main is None else inputs.get(main.number)
            shown = PagePicture(image_id, original, fed_there, masks, keys, strip, inputs)
            self.shown.append(shown)

    def _key(self, what: str, image_id: str, image: Tensor) -> str:
        key = f"{what}/{image_id}"
        if key not in self.pictures:
            self.pictures[key] = data_uri(picture(image))
            self.size += len(self.pictures[key])
        return key


def _equal(stored: dict[str, Tensor], first: str, second: str) -> bool:
    return second in stored and stored[first].equal(stored[second])


def fill_gallery(lines: Sequence[Line], main: Line | None) -> Gallery:
    """The pictures of a page; `main` is the line by whose PSNR images are chosen."""
    gallery = Gallery()
    pictured = {image for line in lines for image in picture_ids(line)}
    for image_id, strip in images_in_order(lines, main, pictured):
        if gallery.full:
            break
        gallery.add(image_id, lines, main=main, strip=strip)
    return gallery


def images_in_order(
    lines: Sequence[Line], main: Line | None, pictured: Set[str] | None = None
) -> Iterator[tuple[str, bool]]:
    """Image ids, those of the strip first, then ever finer quantiles of the main line's PSNR.

    Images that the main line did not score come last; without truth all images do.
    pictured: images with a stored picture, where only these are of use
    """
    scores = {} if main is None else main.scored("psnr", "standard").to_dict()
    if pictured is not None:
        scores = {image: score for image, score in scores.items() if image in pictured}
    ranked = sorted(scores, key=lambda image: (scores[image], image))
    places = [round(q * (len(ranked) - 1)) for q in STRIP_QUANTILES] if ranked else []
    strip = list(dict.fromkeys(ranked[place] for place in places))
    others = [ranked[place] for place in spread_order(len(ranked))]
    if pictured is None:
        pictured = {image for line in lines for image in picture_ids(line)}
    unscored = sorted(pictured - {*ranked})
    for image in dict.fromkeys((*strip, *others, *unscored)):
        yield image, image in strip or (not strip and image in unscored[: len(STRIP_QUANTILES)])


def spread_order(count: int) -> list[int]:
    """0 … count - 1, the ends first, then the middle, then the quarters and so on."""
    order: dict[int, None] = {}
    step = 1
    while len(order) < count:
        for i in range(step + 1):
            order.setdefault(round(i / step * (count - 1)), None)
        step *= 2
    return list(order)


def data_uri(image: Picture) -> str:
    """A picture (H, W, 3) in [0, 1] as a data URI: PNG where it is small, else WebP."""
    from PIL import Image

    pixels = np.floor(image * 255 + 0.5).astype(np.uint8)
    drawn = Image.fromarray(pixels)
    if max(drawn.size) > LARGEST_SIDE:
        drawn.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.BOX)
    file = io.BytesIO()
    kind = "png" if max(drawn.size) <= SMALL_SIDE else "webp"
    drawn.save(
        file, kind, **({"compress_level": 6} if kind == "png" else {"quality": 82, "method": 2})
    )
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
