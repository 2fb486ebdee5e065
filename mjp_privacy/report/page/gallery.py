"""The pictures inside the page: as many images as fit, the same ones for every line.

Images are taken at evenly spread quantiles of one line's PSNR, those of the card's strip first, so
that nobody picks them. The page's copies are compressed; the files in pictures/ are lossless.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from mjp_privacy.report.card import HEADINGS, Card
from mjp_privacy.report.clients import Client, card_clients
from mjp_privacy.report.lines import Line
from mjp_privacy.report.pictures import SMALL_SIDE, pixels, png
from mjp_privacy.report.tables.text import capped
from mjp_privacy.report.worst_case import DerivedLine, picture_ids

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Strip:
    """The columns of a strip: the lines behind the card's main figures, under their headings."""

    columns: tuple[tuple[str, Line], ...]
    client: Client

    @property
    def chooser(self) -> Line | None:
        """The line by whose PSNR pictures are chosen: the best with one upload, or the first."""
        by_heading = dict(self.columns)
        return by_heading.get(HEADINGS["one_upload"]) or next(iter(by_heading.values()), None)


def card_strip(clients: Sequence[Client], card: Card) -> Strip | None:
    """The strip of a card's main client; None where the card has no client."""
    shown, _ = card_clients(clients)
    if not shown:
        return None
    row, client = card.rows[card.main], shown[card.main]
    if row.one_upload is None and row.any_uploads is None:
        with_pictures = (line for line in client.attacks if picture_ids(line))
        return Strip(tuple((line.attack, line) for line in with_pictures), client)
    lines = (client.published, client.one_upload, client.any_uploads)
    columns = zip(HEADINGS.values(), lines, strict=False)
    return Strip(tuple((title, line) for title, line in columns if line is not None), client)


def picture_score(line: Line, image_id: str) -> str:
    """What a picture is worth, as tables write it: `24.1 dB`, `exact`; empty without a score."""
    if line.scored("psnr", "paper").get(image_id) == math.inf:
        return "exact"
    value = line.scored("psnr", "standard").get(image_id)
    return "" if value is None else f"{capped(float(value), 1)} dB"


# the page's pictures ------------------------------------------------------------------------------

STRIP_QUANTILES = (0.1, 0.5, 0.9)
MOST_IMAGES = 48
MOST_PICTURES = 1500
MOST_BYTES = 8_000_000  # of data URIs; the whole page stays below 15 MB
LARGEST_SIDE = 192


OF_LINES = ("lines", "fed", "masks", "originals")
"""What is kept of each line of an image."""


@dataclass(frozen=True)
class Shown:
    """One private image with what every line made of it, as keys of `Gallery.pictures`."""

    image_id: str
    strip: bool  # one of the pictures at fixed quantiles that stand in the card's strip
    originals: dict[int, str] = field(default_factory=dict)
    """By line: two runs may have other pictures of the same name."""
    lines: dict[int, str] = field(default_factory=dict)
    """By line: its reconstruction."""
    fed: dict[int, str] = field(default_factory=dict)
    """By line: what its client fed, where that is not the original."""
    masks: dict[int, str] = field(default_factory=dict)
    """By line: "0110…", one digit for each patch, row by row; 1: masked."""

    def original(self, line: Line | None = None) -> str | None:
        """The private image that the line attacked, or else the first of this name; None without
        truth."""
        first = next(iter(self.originals.values()), None)
        return first if line is None else self.originals.get(line.number, first)

    def keys(self, strip: Strip | None) -> list[str]:
        """The pictures of its row in the card's strip."""
        columns = [] if strip is None else strip.columns
        chooser = None if strip is None else strip.chooser
        fed = None if chooser is None else self.fed.get(chooser.number)
        keys = [self.original(chooser), fed, *(self.lines.get(line.number) for _, line in columns)]
        return [key for key in keys if key is not None]

    def as_json(self) -> dict[str, Any]:
        """What the page's script reads; keys of JSON are texts, and lines are numbers."""
        pairs = {kind: list(getattr(self, kind).items()) for kind in OF_LINES}
        return {"image_id": self.image_id, **pairs}

    def of(self, line: Line) -> dict[str, Tensor]:
        """The pictures of a line of this image by their keys, which it notes."""
        stored = line.reconstruction(self.image_id) or {}
        if "images" not in stored:
            return {}
        plain, fed = stored.get("plain"), stored.get("input")
        kinds = {"lines": (f"{line.number}", stored["images"])}
        if plain is not None:
            kinds["originals"] = (f"original {_digest(plain)}", plain)
        if fed is not None and (plain is None or not fed.equal(plain)):
            kinds["fed"] = (f"fed {_digest(fed)}", fed)
        mask = stored.get("mask", stored.get("named_mask"))  # the attacker's, without truth
        if mask is not None:
            self.masks[line.number] = "".join("1" if hidden else "0" for hidden in mask)
        found = {}
        for kind, (what, image) in kinds.items():
            key = f"{what}/{self.image_id}"
            getattr(self, kind)[line.number] = key
            found[key] = image
        return found


@dataclass(frozen=True)
class Gallery:
    """Pictures as data URIs by key, and the images they belong to, until the page is full."""

    pictures: dict[str, str] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)


def fill_gallery(lines: Sequence[Line], main: Line | None) -> Gallery:
    """The pictures of a page, as many as it has room for; `main` is the line by whose PSNR images
    are chosen."""
    derived = [line for line in lines if isinstance(line, DerivedLine)]
    stored = [line for line in lines if line not in derived and picture_ids(line)]
    pictured = {image for line in stored for image in picture_ids(line)}
    most = min(MOST_IMAGES, math.ceil(MOST_PICTURES / max(1, len(stored))))
    chosen = [Shown(*of) for of in islice(images_in_order(pictured, main), most)]
    made: dict[str, dict[str, str]] = {shown.image_id: {} for shown in chosen}
    for line in stored:  # line by line, for its pictures lie together
        for shown in chosen:
            pictures = made[shown.image_id]
            for key, image in shown.of(line).items():
                pictures[key] = pictures.get(key) or data_uri(image)
    gallery = Gallery()
    for shown in chosen:
        size = sum(map(len, gallery.pictures.values()))
        if size >= MOST_BYTES or len(gallery.pictures) >= MOST_PICTURES:
            break
        if not shown.lines:
            continue
        gallery.pictures.update(made[shown.image_id])
        gallery.shown.append(shown)
        for line in derived:
            source = line.source(shown.image_id)
            for values in (getattr(shown, kind) for kind in OF_LINES):
                if source is not None and source.number in values:
                    values[line.number] = values[source.number]
    return gallery


def _digest(image: Tensor) -> str:
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()[:12]


def images_in_order(pictured: Set[str], main: Line | None) -> Iterator[tuple[str, bool]]:
    """The images, those of the strip first, then ever finer quantiles of the main line's PSNR.

    Images that the main line did not score come last; without truth all images do.
    """
    known = {} if main is None else main.scored("psnr", "standard").to_dict()
    scores = {image: score for image, score in known.items() if image in pictured}
    ranked = sorted(scores, key=lambda image: (scores[image], image))
    places = [round(q * (len(ranked) - 1)) for q in STRIP_QUANTILES] if ranked else []
    strip = list(dict.fromkeys(ranked[place] for place in places))
    others = [ranked[place] for place in spread_order(len(ranked))]
    unscored = sorted(pictured - {*ranked})
    for image in dict.fromkeys((*strip, *others, *unscored)):
        yield image, image in strip or (not strip and image in unscored[: len(STRIP_QUANTILES)])


def spread_order(count: int) -> list[int]:
    """0 … count - 1, the ends first, then the middle, then the quarters and so on."""
    order: dict[int, None] = {}
    step = 1
    while len(order) < count:
        order |= dict.fromkeys(round(i / step * (count - 1)) for i in range(step + 1))
        step *= 2
    return list(order)


def data_uri(image: Tensor) -> str:
    """A picture (C, H, W) in [0, 1] as a data URI: PNG where it is small, else WebP."""
    from PIL import Image

    made = pixels(image)
    if max(made.shape) <= SMALL_SIDE:
        kind, data = "png", png(made)
    else:
        drawn, file = Image.fromarray(made), io.BytesIO()
        drawn.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.BOX)
        kind = "webp"
        drawn.save(file, kind, quality=82, method=2)
        data = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
