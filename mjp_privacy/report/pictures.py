"""A report's pictures: as files, and the small ones inside the page.

The files are PNG, 8 bit, lossless, for eyes and for any other scorer:

    pictures/<client>/original/<image>.png    the private images, where they are known
    pictures/<client>/fed/<image>.png         the same as the client fed them, shuffled or not
    pictures/<client>/<attack>/<image>.png    what the attack made of them
    pictures/index.csv                        what each file is

Values are rounded as for the paper's variant of the metrics, which is what a scorer of files sees:

    mjp score --reference pictures/plain/original --reconstruction pictures/plain/april \
        --out scores.csv

gives the run's scores in that variant; add `--allow-missing` where the attack failed on some. In
setting (b) the reference is `fed`; the index names it for every file.
Pictures of an earlier report are removed if the index of that report lists them, nothing else is.

The page has as many images as fit, the same ones for every line: at evenly spread quantiles of one
line's PSNR, those of the card's strip first, so that nobody picks them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.core.errors import UserError, writing
from mjp_privacy.core.files import check_folder
from mjp_privacy.core.read import FileKind, csv_rows
from mjp_privacy.core.text import formula_free
from mjp_privacy.data.files import IMAGE_SUFFIXES
from mjp_privacy.report.figures import DerivedLine
from mjp_privacy.report.lines import Line, target_of
from mjp_privacy.report.text import capped

INDEX = "index.csv"
COLUMNS = ("client", "attack", "line", "image_id", "file", "reference")
"""reference: what the scores of samples.csv compare the file with. Rows of private images have no
line."""

LIST = FileKind("the list of a report's pictures", "Write the report again.", 1 << 32)

TRUTH = {"plain": "original", "input": "fed"}
"""The stored tensors of private images, and the folders they come into."""

SMALL_SIDE = 96
"""Pixels of a side up to which the page shows pictures without loss."""

Pixels = NDArray[np.uint8]


def write_pictures(
    lines: Sequence[Line],
    image_ids: Sequence[str],
    folder: Path,
    *,
    client_names: Mapping[int, str],
    all_images: bool = False,
) -> list[Path]:
    """Write these images of these lines, one at a time; the files, the index last.

    write_pictures(loaded.lines, ["astronaut"], out / "pictures", client_names={1: "plain"})

    folder        the folder `pictures` itself
    client_names  what the report calls each line's client, by the line's number
    all_images    write every stored image, not only `image_ids`
    """
    remove_listed(folder)
    stored = {line.number: line.picture_ids for line in lines}
    every = set().union(*stored.values())
    wanted = every if all_images else every & set(image_ids)
    if not wanted:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    index, written = folder / INDEX, dict[str, Path]()
    files, given = dict[str, str](), set[str]()
    for image in sorted(wanted):
        suffix = PurePosixPath(image).suffix  # `class/photo` of `class/photo.JPEG`
        known = suffix if suffix.lower() in IMAGE_SUFFIXES else ""
        mark = hashlib.sha256(image.encode("utf-8", "backslashreplace")).hexdigest()[:8]
        files[image] = f"{unique(image.removesuffix(known), mark, given)}.png"
    places, taken = dict[object, tuple[str, set[str]]](), {INDEX}
    with index.open("w", newline="", encoding="utf-8", errors="backslashreplace") as listed:
        table = csv.DictWriter(listed, COLUMNS, lineterminator="\n", restval="")
        table.writeheader()
        for line in lines:
            shown = [image for image in stored[line.number] if image in wanted]
            if not shown:
                continue
            mark, client = f"line{line.number:03d}", client_names[line.number]
            key = (line.run, target_of(line.cell))
            if key not in places:  # the folder of the client, and the names in it
                places[key] = unique(client, mark, taken), {*TRUTH.values()}
            place, names = places[key]
            attack = unique(line.attack, mark, names)
            of_image = {image: f"{place}/{{}}/{files[image]}" for image in shown}
            for row, picture in _pictures(line, of_image, attack):
                if row["file"] in written:
                    continue
                row |= {"client": client}
                # on disk before the picture, so that a killed report leaves none unlisted
                table.writerow({name: formula_free(value) for name, value in row.items()})
                listed.flush()
                written[row["file"]] = path = folder / row["file"]
                check_folder(path)
                with writing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(png(pixels(picture)))
    return [*written.values(), index]


def _pictures(
    line: Line, files: Mapping[str, str], attack: str
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """What is stored of each image, with its row of the index: the private pictures, then what the
    attack made of it. In the names of the files `{}` stands for the folder."""
    for image, file in files.items():
        tensors = line.reconstruction(image) or {}
        if "images" not in tensors:
            continue
        target, reference = tensors.get("target"), ""
        for kind, truth in TRUTH.items():
            if kind in tensors:
                row = {"attack": truth, "image_id": image, "file": file.format(truth)}
                yield row, tensors[kind]
                if not reference and target is not None and tensors[kind].equal(target):
                    reference = file.format(truth)
        row = {"attack": line.attack, "image_id": image, "file": file.format(attack)}
        yield row | {"line": line.number, "reference": reference}, tensors["images"]


def pixels(image: Tensor) -> Pixels:
    """(C, H, W) in [0, 1] to (H, W, 3) bytes, as the paper's variant rounds; NaN becomes grey."""
    # NumPy: on pictures this small torch spends most of the time on its threads
    levels = np.nan_to_num(image.numpy().astype(np.float64), nan=0.5)
    rounded = np.rint(np.clip(levels, 0.0, 1.0) * 255).astype(np.uint8)
    coloured = np.broadcast_to(rounded, (3, *rounded.shape[1:]))
    return np.ascontiguousarray(coloured.transpose(1, 2, 0))


def png(picture: Pixels) -> bytes:
    """The picture as a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png", compress_level=1)  # fastest
    return file.getvalue()


# pictures of an earlier report --------------------------------------------------------------------


def remove_listed(folder: Path) -> None:
    """Remove the pictures that the folder's index lists, folders left empty, and the index.

    Only files that lie where a report writes them, for an index may say anything. Of a damaged one
    the lines before the damage count; one without any is no report's, and stays."""
    index, names = folder / INDEX, []
    try:
        for _, row in csv_rows(LIST.text(index), index, LIST, needed=COLUMNS, known=COLUMNS):
            names.append(row["file"])
    except UserError:
        if not names:
            return
    ours = re.compile("/".join([OF_A_REPORT] * 3))  # client/attack/image.png
    listed = [name for name in names if ours.fullmatch(name) and name.endswith(".png")]
    for path in (folder / name for name in listed):
        if path.parent.resolve().is_relative_to(folder.resolve()) and path.is_file():
            path.unlink()
            for parent in (path.parent, path.parent.parent):
                if not any(parent.iterdir()):
                    parent.rmdir()
    index.unlink(missing_ok=True)


# names of files ----------------------------------------------------------------------------------

OF_A_REPORT = "[A-Za-z0-9][A-Za-z0-9._+-]{0,199}"
"""What `unique` gives."""

LONGEST = 80
EDGES = "._-+ "
"""Not at either end of a name: a dot in front hides a file, a minus looks like an option."""

SPELT = str.maketrans({"γ": "gamma", "σ": "sigma", "ε": "epsilon", "×": "x", "≥": "ge", "≤": "le"})
DEVICES = re.compile(r"(?:con|prn|aux|nul|(?:com|lpt)\d)(?:\..*)?", re.I)
"""Names that Windows takes for devices, with any ending behind a dot."""


def slug(text: str) -> str:
    """The text as a name of letters, digits and `._+-`: `slug("a/b: ü")` is `a_b_u`."""
    spelt = unicodedata.normalize("NFKD", text.translate(SPELT))
    spelt = "".join(letter for letter in spelt if not unicodedata.combining(letter))
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", spelt)
    name = re.sub(r"\.{2,}", ".", name)[:LONGEST].strip(EDGES)
    return f"x_{name}" if DEVICES.fullmatch(name) else name or "unnamed"


def unique(text: str, mark: str, taken: set[str]) -> str:
    """A name for the text that is not taken, nor on a disk that takes upper and lower case for one:
    `a_b`, or with the mark `a_b-line002`."""
    name = slug(text)
    while name.casefold() in taken:
        name, mark = f"{slug(text)[: LONGEST // 2].strip(EDGES)}-{mark}", f"{mark}+"
    taken.add(name.casefold())
    return name


# on the page --------------------------------------------------------------------------------------


def picture_score(line: Line, image_id: str) -> str:
    """What a picture is worth, as tables write it: `24.1 dB`, `exact`; empty without a score."""
    if line.scored("psnr", "paper").get(image_id) == math.inf:
        return "exact"
    value = line.scored("psnr", "standard").get(image_id)
    return "" if value is None else f"{capped(float(value), 1)} dB"


STRIP_QUANTILES = (0.1, 0.5, 0.9)
MOST_IMAGES = 48
MOST_PICTURES = 1500
MOST_BYTES = 8_000_000  # of data URIs; the whole page stays below 15 MB
LARGEST_SIDE = 192


@dataclass(frozen=True)
class Shown:
    """One private image with what every line made of it."""

    image_id: str
    strip: bool  # one of the pictures at fixed quantiles that stand in the card's strip
    lines: dict[int, dict[str, str]] = field(default_factory=dict)
    """By line the keys of `Gallery.pictures` of what the attack `made`, of the `original` and of
    what its client `fed`, where that is another picture; and the `mask`, "01/10", a digit for each
    patch, row by row. Two runs may have other originals of the same name."""

    def original(self, line: Line | None = None) -> str | None:
        """The private image that the line attacked, or else the first of this name; None without
        truth."""
        every = [kept["original"] for kept in self.lines.values() if "original" in kept]
        own = {} if line is None else self.lines.get(line.number, {})
        return own.get("original", next(iter(every), None))

    def as_fed(self, line: Line | None) -> str | None:
        """What the line's client fed: the original, unless that is another picture."""
        own = {} if line is None else self.lines.get(line.number, {})
        return own.get("fed", self.original(line))

    def of(self, line: Line) -> dict[str, Tensor]:
        """The pictures of a line of this image by their keys, which it notes."""
        stored = line.reconstruction(self.image_id) or {}
        if "images" not in stored:
            return {}
        plain, fed = stored.get("plain"), stored.get("input")
        kinds = {"made": (f"{line.number}", stored["images"])}
        if plain is not None:
            kinds["original"] = (f"original {_digest(plain)}", plain)
        if fed is not None and (plain is None or not fed.equal(plain)):
            kinds["fed"] = (f"fed {_digest(fed)}", fed)
        keys = {kind: f"{what}/{self.image_id}" for kind, (what, _) in kinds.items()}
        self.lines[line.number] = {**keys}
        mask = stored.get("mask", stored.get("named_mask"))  # the attacker's, without truth
        if mask is not None:
            height, width = stored["images"].shape[-2:]
            across = round(math.sqrt(mask.numel() * width / height))
            rows = ("".join("01"[int(hidden)] for hidden in row) for row in mask.split(across))
            self.lines[line.number]["mask"] = "/".join(rows)
        return {keys[kind]: image for kind, (_, image) in kinds.items()}


@dataclass(frozen=True)
class Gallery:
    """Pictures as data URIs by key, and the images they belong to, until the page is full."""

    pictures: dict[str, str] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)


def fill_gallery(lines: Sequence[Line], main: Line | None) -> Gallery:
    """The pictures of a page, as many as it has room for; `main` is the line by whose PSNR images
    are chosen."""
    derived = [line for line in lines if isinstance(line, DerivedLine)]
    stored = [line for line in lines if line not in derived and line.picture_ids]
    pictured = {image for line in stored for image in line.picture_ids}
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
            if source is not None and source.number in shown.lines:
                shown.lines[line.number] = shown.lines[source.number]
    return gallery


def _digest(image: Tensor) -> str:
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()[:12]


def images_in_order(pictured: Set[str], main: Line | None) -> Iterator[tuple[str, bool]]:
    """The images, those of the strip first, then ever finer quantiles of the main line's PSNR, then
    those that it did not score."""
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
