"""A report's pictures as files: PNG, 8 bit, lossless, for eyes and for any other scorer.

    pictures/<client>/original/<image>.png    the private images, where they are known
    pictures/<client>/fed/<image>.png         the same as the client fed them, shuffled or not
    pictures/<client>/<attack>/<image>.png    what the attack made of them
    pictures/index.csv                        what each file is, and the scores stored in the run

Values are rounded as for the paper's variant of the metrics, which is what a scorer of files sees:

    mjp score --reference pictures/plain/original --reconstruction pictures/plain/april \\
        --out scores.csv

gives the run's scores in that variant; add `--allow-missing` where the attack failed on some. In
setting (b) the reference is `fed`; the index names it for every file.
Pictures of an earlier report are removed if the index of that report lists them, nothing else is.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.core.errors import UserError, writing
from mjp_privacy.core.files import check_folder
from mjp_privacy.core.read import FileKind, csv_rows
from mjp_privacy.data.files import IMAGE_SUFFIXES
from mjp_privacy.metrics.spreadsheet import formula_free
from mjp_privacy.report.cell_columns import target_of
from mjp_privacy.report.lines import Line
from mjp_privacy.report.pictures.names import UniqueNames, digest
from mjp_privacy.report.worst_case import picture_ids

INDEX = "index.csv"
COLUMNS = ("client", "attack", "line", "image_id", "file", "psnr", "psnr_paper", "reference")
"""psnr is the standard variant, on float32; psnr_paper is of the files. reference: what the scores
compare the file with. Rows of private images have no line and no scores."""

LIST = FileKind("the list of a report's pictures", "Write the report again.", 1 << 32)

TRUTH = {"plain": "original", "input": "fed"}
"""The stored tensors of private images, and the folders they come into."""

COMPRESSION = 1
"""zlib's fastest: photographs become hardly smaller with more, and take much longer."""


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
        writer = _Writer(folder, _Index(file), client_names, _image_names(sorted(wanted)))
        for line in lines:
            writer.write(line, [image for image in stored[line.number] if image in wanted])
    return [*writer.files, index]


def _image_names(image_ids: Sequence[str]) -> dict[str, str]:
    """The file of each image: `class/photo.JPEG` becomes `class_photo.png`."""
    names = UniqueNames()
    return {
        image: f"{names.of(_without_suffix(image), key=image, mark=digest(image))}.png"
        for image in image_ids
    }


def _without_suffix(image_id: str) -> str:
    suffix = PurePosixPath(image_id).suffix
    return image_id.removesuffix(suffix) if suffix.lower() in IMAGE_SUFFIXES else image_id


class _Index:
    """The rows of index.csv. Each is on disk before its picture, so that no picture of a report
    that was killed stays behind unlisted."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.rows = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        self.rows.writeheader()

    def add(self, **row: Any) -> None:
        self.rows.writerow(
            {k: formula_free(v) if isinstance(v, str) else v for k, v in row.items()}
        )
        self.file.flush()


@dataclass
class _Writer:
    """Writes line by line, and every private image of a client once."""

    folder: Path
    index: _Index
    client_names: Mapping[int, str]
    image_names: Mapping[str, str]  # by image_id
    files: list[Path] = field(default_factory=list)
    _clients: UniqueNames = field(default_factory=lambda: UniqueNames(taken=(INDEX,)))
    _attacks: dict[str, UniqueNames] = field(default_factory=dict)  # by the client's folder
    _written: set[str] = field(default_factory=set)  # private images, by their file

    def write(self, line: Line, image_ids: Sequence[str]) -> None:
        if not image_ids:
            return
        client = self._client_folder(line)
        names = self._attacks.setdefault(client, UniqueNames(taken=TRUTH.values()))
        attack = names.of(line.attack, key=line.number, mark=_mark(line))
        scores = {
            "psnr": _scores_of(line.scored("psnr", "standard"), image_ids),
            "psnr_paper": _scores_of(line.scored("psnr", "paper"), image_ids),
        }
        for image_id, tensors in _stored(line, image_ids):
            place = {"client": self.client_names[line.number], "image_id": image_id}
            reference = self._write_truth(client, place, tensors)
            file = f"{client}/{attack}/{self.image_names[image_id]}"
            of_image = {name: values.get(image_id, "") for name, values in scores.items()}
            self.index.add(
                **place,
                **{"attack": line.attack, "line": line.number, "file": file},
                **{**of_image, "reference": reference},
            )
            self._save(file, tensors["images"])

    def _client_folder(self, line: Line) -> str:
        """One folder for all lines on one target; two clients of one name get two."""
        target = line.run, target_of(line.cell)
        return self._clients.of(self.client_names[line.number], key=target, mark=_mark(line))

    def _write_truth(
        self, client: str, place: Mapping[str, str], tensors: Mapping[str, Tensor]
    ) -> str:
        """Write the private image unless it is there; the file that the scores compare with."""
        reference = ""
        for kind, name in TRUTH.items():
            if kind not in tensors:
                continue
            file = f"{client}/{name}/{self.image_names[place['image_id']]}"
            if file not in self._written:
                self._written.add(file)
                self.index.add(**place, attack=name, file=file)
                self._save(file, tensors[kind])
            if not reference and "target" in tensors and tensors[kind].equal(tensors["target"]):
                reference = file
        return reference

    def _save(self, file: str, image: Tensor) -> None:
        from PIL import Image

        path = self.folder / file
        check_folder(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(image)).save(path, compress_level=COMPRESSION)
        self.files.append(path)


def _scores_of(values: pd.Series[float], image_ids: Sequence[str]) -> dict[str, float]:
    """The scores of these images, as far as they have one."""
    at = values.index.get_indexer(pd.Index(image_ids, dtype=object))
    known = zip(image_ids, at.tolist(), strict=True)
    return {image: float(values.iloc[place]) for image, place in known if place >= 0}


def _mark(line: Line) -> str:
    return f"line{line.number:03d}"


def _stored(line: Line, image_ids: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of one image after the other; one that has gone since is left out."""
    for image_id in image_ids:
        tensors = line.reconstruction(image_id)
        if tensors is not None and "images" in tensors:
            yield image_id, tensors


def pixels(image: Tensor) -> NDArray[np.uint8]:
    """(C, H, W) in [0, 1] to (H, W, 3) bytes, as the paper's variant rounds; NaN becomes grey."""
    # NumPy: on pictures this small torch spends most of the time on its threads
    levels = np.nan_to_num(image.numpy().astype(np.float64), nan=0.5)
    rounded = np.rint(np.clip(levels, 0.0, 1.0) * 255).astype(np.uint8)
    coloured = np.broadcast_to(rounded, (3, *rounded.shape[1:]))
    return np.ascontiguousarray(coloured.transpose(1, 2, 0))


# pictures of an earlier report --------------------------------------------------------------------


def remove_listed(folder: Path) -> None:
    """Remove the pictures that the folder's index lists, folders left empty, and the index."""
    index = folder / INDEX
    listed = _listed(index)
    if listed is None:
        return
    for path in listed:
        path.unlink(missing_ok=True)
        for parent in (path.parent, path.parent.parent):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
    index.unlink(missing_ok=True)


def _listed(index: Path) -> list[Path] | None:
    """Files of the index that lie where a report writes them, for an index may say anything; None
    where there is no index of a report. Of a damaged one the lines before the damage count."""
    names: list[str] = []
    try:
        for _, row in csv_rows(LIST.text(index), index, LIST, needed=COLUMNS, known=COLUMNS):
            names.append(row["file"])
    except UserError:
        if not names:
            return None
    listed = [index.parent / name for name in names if _is_ours(name)]
    root = index.parent.resolve()
    return [p for p in listed if p.parent.resolve().is_relative_to(root) and p.is_file()]


def _is_ours(name: str) -> bool:
    """Whether it has the form client/attack/image.png of names made by `UniqueNames`."""
    parts = name.split("/")
    safe = all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}", part) for part in parts)
    return safe and len(parts) == 3 and name.endswith(".png")
