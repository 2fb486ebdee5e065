"""A report's pictures as files: PNG, 8 bit, lossless, for eyes and for any other scorer.

    pictures/<client>/original/<image>.png    the private images, where they are known
    pictures/<client>/fed/<image>.png         the same as the client fed them, shuffled or not
    pictures/<client>/<attack>/<image>.png    what the attack made of them
    pictures/index.csv                        what each file is, and the scores stored in the run

Values are rounded as for the paper's variant of the metrics, which is what a scorer of files sees:

    mjp score --reference pictures/plain/original --reconstruction pictures/plain/april \
        --out scores.csv

gives the run's scores in that variant; add `--allow-missing` where the attack failed on some. In
setting (b) the reference is `fed`; the index names it for every file.
Pictures of an earlier report are removed if the index of that report lists them, nothing else is.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.core.errors import UserError, writing
from mjp_privacy.core.files import check_folder
from mjp_privacy.core.read import FileKind, csv_rows
from mjp_privacy.core.text import formula_free
from mjp_privacy.data.files import IMAGE_SUFFIXES
from mjp_privacy.report.lines import Line, target_of
from mjp_privacy.report.worst_case import picture_ids

INDEX = "index.csv"
COLUMNS = ("client", "attack", "line", "image_id", "file", "psnr", "psnr_paper", "reference")
"""psnr is the standard variant, on float32; psnr_paper is of the files. reference: what the scores
compare the file with. Rows of private images have no line and no scores."""

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
    stored = {line.number: picture_ids(line) for line in lines}
    every = {image for ids in stored.values() for image in ids}
    wanted = every if all_images else every & set(image_ids)
    if not wanted:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / INDEX
    with index.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = _Writer(folder, file, client_names)
        for image_id in sorted(wanted):
            writer.image_name(image_id)  # equal for all lines
        for line in lines:
            writer.write(line, [image for image in stored[line.number] if image in wanted])
    return [*writer.files, index]


class _Writer:
    """Writes line by line, and every private image of a client once."""

    def __init__(self, folder: Path, index: IO[str], client_names: Mapping[int, str]) -> None:
        self.folder, self.index, self.client_names = folder, index, client_names
        self.rows = csv.DictWriter(index, COLUMNS, lineterminator="\n", restval="")
        self.rows.writeheader()
        self.files: list[Path] = []
        self._clients, self._images = UniqueNames(taken=(INDEX,)), UniqueNames()
        self._attacks: dict[str, UniqueNames] = {}  # by the client's folder
        self._written: set[str] = set()

    def write(self, line: Line, image_ids: Sequence[str]) -> None:
        """The pictures of one line, and of its client's images where they are not there yet."""
        if not image_ids:
            return
        mark, name = f"line{line.number:03d}", self.client_names[line.number]
        client = self._clients.of(name, key=(line.run, target_of(line.cell)), mark=mark)
        names = self._attacks.setdefault(client, UniqueNames(taken=TRUTH.values()))
        attack = names.of(line.attack, key=line.number, mark=mark)
        standard, paper = line.scored("psnr", "standard"), line.scored("psnr", "paper")
        for image_id in image_ids:
            tensors = line.reconstruction(image_id)
            if tensors is None or "images" not in tensors:
                continue
            row: dict[str, Any] = {"client": name, "image_id": image_id}
            reference = ""
            for kind, truth in TRUTH.items():
                file = f"{client}/{truth}/{self.image_name(image_id)}"
                if kind in tensors:
                    self._save(tensors[kind], file, row | {"attack": truth})
                    same = "target" in tensors and tensors[kind].equal(tensors["target"])
                    reference = reference or (file if same else "")
            row |= {"attack": line.attack, "line": line.number, "reference": reference}
            row |= {"psnr": standard.get(image_id, ""), "psnr_paper": paper.get(image_id, "")}
            self._save(tensors["images"], f"{client}/{attack}/{self.image_name(image_id)}", row)

    def image_name(self, image_id: str) -> str:
        """The file of an image: `class/photo.JPEG` becomes `class_photo.png`."""
        suffix = PurePosixPath(image_id).suffix
        known = suffix.lower() in IMAGE_SUFFIXES
        stem = image_id.removesuffix(suffix) if known else image_id
        return f"{self._images.of(stem, key=image_id)}.png"

    def _save(self, image: Tensor, file: str, row: Mapping[str, Any]) -> None:
        """A picture unless it is there. Its row is on disk before it, so that no picture of a
        report that was killed stays behind unlisted."""
        if file in self._written:
            return
        self._written.add(file)
        row = {**row, "file": file}
        self.rows.writerow(
            {k: formula_free(v) if isinstance(v, str) else v for k, v in row.items()}
        )
        self.index.flush()
        path = self.folder / file
        check_folder(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(pixels(image)))
        self.files.append(path)


def pixels(image: Tensor) -> Pixels:
    """(C, H, W) in [0, 1] to (H, W, 3) bytes, as the paper's variant rounds; NaN becomes grey."""
    # NumPy: on pictures this small torch spends most of the time on its threads
    levels = np.nan_to_num(image.numpy().astype(np.float64), nan=0.5)
    rounded = np.rint(np.clip(levels, 0.0, 1.0) * 255).astype(np.uint8)
    coloured = np.broadcast_to(rounded, (3, *rounded.shape[1:]))
    return np.ascontiguousarray(coloured.transpose(1, 2, 0))


def png(picture: Pixels) -> bytes:
    """The picture as a PNG. Page and files show the same small ones: these are encoded once."""
    encode = _png if max(picture.shape) <= SMALL_SIDE else _png.__wrapped__
    return encode(picture.tobytes(), picture.shape[:2])


@lru_cache(2048)
def _png(values: bytes, size: tuple[int, int]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", size[::-1], values).save(file, "png", compress_level=1)  # fastest
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
    for path in (folder / name for name in names if _is_ours(name)):
        if path.parent.resolve().is_relative_to(folder.resolve()) and path.is_file():
            path.unlink()
            for parent in (path.parent, path.parent.parent):
                if not any(parent.iterdir()):
                    parent.rmdir()
    index.unlink(missing_ok=True)


def _is_ours(name: str) -> bool:
    """Whether it has the form client/attack/image.png of names made by `UniqueNames`."""
    parts = name.split("/")
    safe = all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}", part) for part in parts)
    return safe and len(parts) == 3 and name.endswith(".png")


# names of files ----------------------------------------------------------------------------------

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


class UniqueNames:
    """Gives every key a name of its own, also on a disk that takes upper and lower case for one:
    after `names.of("a/b")`, which is `a_b`, `names.of("a:b")` is `a_b-` and eight digits."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._given: dict[object, str] = {}
        self._used = {name.casefold() for name in taken}

    def of(self, text: str, key: object = None, mark: str = "") -> str:
        """The name for a text, the same one when it is asked again.

        key   what the name belongs to, where two things may have the same text; None: the text
        mark  what tells it from others of the same text; empty: digits of the text
        """
        key = text if key is None else key
        if key not in self._given:
            mark = mark or hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
            marked = f"{slug(text)[: LONGEST - len(mark) - 1].strip(EDGES)}-{mark}"
            cut = len(text) > LONGEST  # what was cut off may be what tells it from others
            first = [marked] if cut else [slug(text), marked]
            tries = chain(first, (f"{marked}-{n}" for n in count(2)))
            self._given[key] = next(name for name in tries if name.casefold() not in self._used)
            self._used.add(self._given[key].casefold())
        return self._given[key]
