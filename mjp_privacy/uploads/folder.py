"""A folder of recorded uploads, and how they stand together.

A series holds uploads of the same images in successive rounds. A group holds the series that begin
in the same round with the same weights and recipe: they are attacked together, as the images of
one cell, and make one line of a table.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import MIB, FileKind
from mjp_privacy.core.text import cut, shown
from mjp_privacy.data import ImageRecord
from mjp_privacy.data.files import is_usable
from mjp_privacy.uploads.header import UploadHeader, header_before_a_flip
from mjp_privacy.uploads.record import Upload

UPLOADS, RECEIVED = "uploads", "received"
"""Folders inside a federation's that hold uploads."""
PART = FileKind("a file of an upload", "Copy it again, or take the upload's files out.", 1 << 40)

REFUSED = "refused uploads"
"""What tables call the uploads that cannot be attacked; no other line has this name."""

LONGEST_NAME = 80
"""Characters of a line's name before its number."""

CHANGES = (
    *("weights", "weights_sha256", "round", "client", "lr"),
    *("partial", "noise", "rounding", "undeclared"),
)
"""Header fields that may change from one upload of a series to the next."""
MAY_DIFFER = {*CHANGES, "series", "labels"} - {"lr"}
"""Header fields in which the uploads of a group may differ; in all others they agree."""
TOLD_APART = (("round", "round {}"), ("batch", "B {}"), ("steps", "E {}"), ("dtype", "{}"))
"""Header fields that enter a line's name where lines of the same label differ in them."""

# the files ----------------------------------------------------------------------------------------


def upload_names(folder: Path) -> list[str]:
    """The names of all uploads of a folder that have a header, sorted."""
    names = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
    inside = [name for name in (UPLOADS, RECEIVED) if any((folder / name).glob("*.json"))]
    if inside and not any((folder / f"{name}.safetensors").exists() for name in names):
        got = f"a federation's folder, whose uploads are in {shown(folder / inside[0])}"
    elif not names:
        got = "no file that ends in .json" if folder.is_dir() else "no such folder"
    else:
        return names
    raise UserError(
        f"{shown(folder)}: expected a folder with NAME.json beside NAME.safetensors for each "
        f"upload, got {got}. `mjp federate` records such folders; mjp_privacy/federation/README.md "
        "describes the files, for those of another training."
    )


def load_upload(folder: Path, name: str) -> Upload:
    """The upload of this name; a UserError where its header is not sound."""
    return Upload.load(folder / f"{name}.json")


def known_uploads(folder: Path) -> tuple[list[Upload], dict[str, UserError]]:
    """The uploads of a folder whose headers tell where they stand, and what is wrong with headers,
    by name. One of which a single bit flipped tells what it said before."""
    known, wrong = list[Upload](), dict[str, UserError]()
    for name in upload_names(folder):
        try:
            known.append(load_upload(folder, name))
        except UserError as error:
            wrong[name] = error
            with suppress(UserError):
                header = header_before_a_flip(folder / f"{name}.json")
                if header is not None and is_usable(name):
                    known.append(Upload(folder, name, header))
    return known, wrong


# series and groups --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # hashable by identity
class Series:
    """Uploads of the same images, in order of their rounds; usually a single one."""

    uploads: tuple[Upload, ...]

    @property
    def first(self) -> Upload:
        """The upload of the earliest round."""
        return self.uploads[0]

    @cached_property
    def records(self) -> tuple[ImageRecord, ...]:
        """The images of its batch, named as the private images where those are known."""
        upload, header = self.first, self.first.header
        truth = upload.truth_file()
        names = [f"{upload.name}/{place}" for place in range(header.batch)]
        if truth is not None:
            augments = header.recipe.get("augment", "none") != "none"
            names = [f"{name}@{header.round}" if augments else name for name in truth.image_ids]
        labels = header.labels or (None,) * header.batch
        return tuple(
            ImageRecord(name, label, "none" if label is None else "file")
            for name, label in zip(names, labels, strict=True)
        )

    def lacking(self, lost: Iterable[str]) -> str:
        """Which of these uploads, whose headers nobody can read, is one of the series: its name
        begins with the series' name. Empty if none is."""
        series = self.first.header.series
        known = (n for n in lost if series and n.startswith(series))
        return next((n for n in known if not n[len(series or "") :][:1].isalnum()), "")


@dataclass(frozen=True)
class Group:
    """The series that make one line of a table."""

    name: str
    series: tuple[Series, ...]

    @property
    def header(self) -> UploadHeader:
        """Of its first upload; its `weights` are those of the first round."""
        return self.series[0].first.header

    @cached_property
    def scored(self) -> bool:
        """Whether every upload's private images are known."""
        return all(series.first.has_truth for series in self.series)

    @property
    def records(self) -> tuple[ImageRecord, ...]:
        """The images of all its series."""
        return tuple(record for series in self.series for record in series.records)

    @cached_property
    def _holders(self) -> Mapping[str, Series]:
        return {record.image_id: each for each in self.series for record in each.records}

    def of(self, records: Sequence[ImageRecord]) -> list[Series]:
        """The series that hold these images, each once; the images must fill whole steps."""
        return list(dict.fromkeys(self._holders[record.image_id] for record in records))

    def digest(self) -> str:
        """The sha256 of all that its rows depend on: tensors, headers, weights, private images."""
        digest = hashlib.sha256()
        for upload in (upload for series in self.series for upload in series.uploads):
            digest.update(upload.name.encode())
            for path in upload.files():
                if not path.is_file():
                    digest.update(b"none")
                    continue
                PART.check(path)
                with PART.reading(path), path.open("rb") as file:
                    while chunk := file.read(MIB):
                        digest.update(chunk)
        return digest.hexdigest()


def group_uploads(
    uploads: Sequence[Upload], limit: int | None = None, refused: Collection[str] = ()
) -> list[Group]:
    """Groups in order of label, round, batch and steps; of each at most `limit` images, but at
    least one step.

    refused: names of uploads that cannot be attacked. Their series are left out, and the other
    lines keep the names that they have beside them.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit: expected 1 or more images, got {limit}.")
    lost = set(refused) - {upload.name for upload in uploads}
    lines = lines_of([each for each in series_of(uploads) if not each.lacking(lost)])
    groups = []
    for name, members in zip(_names(lines), lines, strict=True):
        sound = [each for each in members if not any(u.name in refused for u in each.uploads)]
        if sound:
            batch = sound[0].first.header.batch
            most = len(sound) if limit is None else max(limit // batch, 1)
            groups.append(Group(name, tuple(sound[:most])))
    return groups


def lines_of(series: Sequence[Series]) -> list[list[Series]]:
    """The series that make each line of a table, in the order of the table."""
    by_key: dict[tuple[str, int, int, int, str, str], list[Series]] = {}
    for each in series:
        header = each.first.header
        shared = dataclasses.asdict(header)
        recipe = repr(sorted((k, v) for k, v in shared.items() if k not in MAY_DIFFER))
        rounds = [(u.header.round, u.header.weights, u.header.lr) for u in each.uploads]
        rest = f"{recipe} {rounds} {'' if each.first.has_truth else 'without truth'}"
        key = (header.label, header.round, header.batch, header.steps, header.weights, rest)
        by_key.setdefault(key, []).append(each)
    return [by_key[key] for key in sorted(by_key)]


def series_of(uploads: Sequence[Upload]) -> list[Series]:
    """Uploads of one label and series name together; every other upload alone."""
    members: dict[tuple[str, ...], list[Upload]] = {}
    for upload in uploads:
        header = upload.header
        key = (header.label, "series", header.series) if header.series else ("", "", upload.name)
        members.setdefault(key, []).append(upload)
    return [
        Series(tuple(sorted(together, key=lambda upload: (upload.header.round, upload.name))))
        for together in members.values()
    ]


def _names(lines: Sequence[Sequence[Series]]) -> list[str]:
    """Names of the lines for tables: the label, and with it whatever of round, batch and steps
    differs among lines of that label; " #2" and so on behind one that was there before."""
    headers = [members[0].first.header for members in lines]
    names: list[str] = []
    for header in headers:
        namesakes = [other for other in headers if other.label == header.label]
        parts = [header.label]
        for field, text in TOLD_APART:
            if len({getattr(namesake, field) for namesake in namesakes}) > 1:
                parts.append(text.format(getattr(header, field)))
        name = numbered = cut(", ".join(parts), LONGEST_NAME)
        number = 1
        while numbered in (REFUSED, *names):
            number += 1
            numbered = f"{name} #{number}"
        names.append(numbered)
    return names
