"""Where a cell's stored images are: in which file, and at which place in it.

    index = ReconstructionIndex.of(Path("results/demo/reconstructions/0b3a689adbb159cb"))
    index.places["astronaut"]     (path of 00000.safetensors, 3)

A report asks for thousands of images. Reading the ids of every file for each of them would take
most of its time, so a `RunStore` keeps a cell's index and makes it anew when a file has changed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mjp_privacy.core.errors import BadFile
from mjp_privacy.core.read import FileKind

SUFFIX = ".safetensors"

IDS = FileKind("the reconstructions of a block", "Run the attack again.")

TICK = 2_000_000_000
"""Nanoseconds within which a file system may give two changes the same time."""

Stamps = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change of every file: other after a file was added or replaced."""


class Place(NamedTuple):
    """One image's place."""

    path: Path
    position: int


@dataclass(frozen=True)
class ReconstructionIndex:
    """The places of all stored images of one cell, as its files were when they had these stamps."""

    places: Mapping[str, Place]  # by image_id, in the order of the files
    stamps: Stamps
    settled: int | None
    """When the folder last changed, if that was well before it was read: a later change shows in
    the folder's own time, and its thousands of files need not be looked at."""

    def holds(self, folder: Path) -> bool:
        """Whether the files are still those that were read."""
        return (self.settled is not None and self.settled == _changed(folder)) or (
            self.stamps == file_stamps(folder)
        )

    @classmethod
    def of(
        cls, folder: Path, block_of: Callable[[], Mapping[str, int]] = dict
    ) -> ReconstructionIndex:
        """Read the ids of every file; one that cannot be read holds nothing.

        block_of: gives the block whose rows of an image count. Of an image that is in two files the
        one of that block counts, or else the first.
        """
        changed = _changed(folder)
        old = changed is not None and time.time_ns() - changed > TICK
        stamps = file_stamps(folder)
        places: dict[str, Place] = {}
        twice: dict[str, dict[int, Place]] = {}
        for name, *_ in stamps:
            path = folder / name
            for position, image_id in enumerate(_ids(path)):
                place = Place(path, position)
                first = places.setdefault(image_id, place)
                if first is not place:
                    of_image = twice.setdefault(image_id, {_block(first.path): first})
                    of_image[_block(path)] = place
        counting = block_of() if twice else {}
        for image_id, of_image in twice.items():
            places[image_id] = of_image.get(counting.get(image_id, -1), places[image_id])
        return cls(places, stamps, changed if old else None)


def _ids(path: Path) -> list[str]:
    """The images in a file; none if it cannot be read."""
    from safetensors import safe_open

    try:
        IDS.check(path)  # a named pipe would keep the reader waiting
        with IDS.reading(path), safe_open(path, framework="pt") as file:
            ids = json.loads(file.metadata()["image_ids"])
    except BadFile:
        return []
    named = ids if isinstance(ids, list) else []
    return [image_id for image_id in named if isinstance(image_id, str)]


def _block(path: Path) -> int:
    return int(path.stem)


def _changed(folder: Path) -> int | None:
    """When a file was last added, replaced or removed; None if there is no such folder."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def file_stamps(folder: Path) -> Stamps:
    """The stamps of a cell's files, sorted by name; none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            stats = [(e.name, _status(e)) for e in entries if _is_block(e.name)]
    except FileNotFoundError:
        return ()
    return tuple(sorted((n, s.st_ino, s.st_size, s.st_mtime_ns) for n, s in stats if s))


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What the system knows of a file or of a link to nowhere; None if it went just now."""
    for follow in (True, False):
        try:
            return entry.stat(follow_symlinks=follow)
        except OSError:
            continue
    return None


def _is_block(name: str) -> bool:
    return name.removesuffix(SUFFIX).isdigit() and name.endswith(SUFFIX)
