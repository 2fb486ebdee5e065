"""What of a run folder's rows and pictures is damaged, missing, or does not belong together.

    damage = find_damage(store)
    damage.left_out("0b3a689adbb159cb")    what a reader leaves out of that cell
    damage.faults                          every file, and what is wrong with it

A unit counts only if the file of its rows is as it was written (its seal says so), and so is the
file of pictures that these rows name. Files of earlier versions have no seal. In a folder that was
never run by a later one they count if they can be read; otherwise if they are those that
`mending` listed, or if that list is lost and they can be read and show no trace of a seal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mjp_privacy.core.errors import BadFile, NoFile, Unreadable
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import FileKind
from mjp_privacy.core.sealed import NO_SEAL, Seal, had_seal, read_seal
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.block_file import ROWS, check_content, check_ends, other_cell
from mjp_privacy.experiment.row_files import NOTHING, LeftOut
from mjp_privacy.experiment.stored_pictures import PICTURES, stored_ids
from mjp_privacy.models.tensor_files import TensorFile

if TYPE_CHECKING:
    from mjp_privacy.experiment.store import RunStore

THREADS = 4
"""Files that are hashed at a time; hashing is most of the work, and needs no lock of Python's."""

LIST_LOST = (
    "adopted.json is missing, which lists the files of an earlier version: {} file(s) without a "
    "seal can be read, and count as they are; a run lists them again"
)
MISSING = "its pictures are missing"
OTHERS = "pictures that are older or newer than its rows"


class Fault(NamedTuple):
    """A file that does not count, and what is wrong with it, in words."""

    path: Path
    words: str


@dataclass
class CellDamage:
    """What is damaged of one cell."""

    rows: dict[Path, str] = field(default_factory=dict)  # files of rows
    pictures: dict[Path, str] = field(default_factory=dict)  # files of pictures
    blocks: set[int] = field(default_factory=set)  # whose rows count no more, in whatever file
    unlisted: list[Path] = field(default_factory=list)
    """Files without a seal that count although the list of such files is lost."""

    @property
    def faults(self) -> list[Fault]:
        """Every file that does not count."""
        return [Fault(*item) for item in (*self.rows.items(), *self.pictures.items())]

    @property
    def left_out(self) -> LeftOut:
        """What a reader of the rows leaves out."""
        because = frozenset({*self.rows, *self.pictures})
        return LeftOut(frozenset(self.rows), frozenset(self.blocks), because)


@dataclass(frozen=True)
class Damage:
    """What is damaged of a run folder, by run_id; cells without any damage are not listed."""

    cells: Mapping[str, CellDamage]

    @property
    def faults(self) -> list[Fault]:
        """Every file that does not count."""
        return [fault for cell in self.cells.values() for fault in cell.faults]

    @property
    def unlisted(self) -> list[Path]:
        """Files without a seal that count although the list of such files is lost."""
        return [path for cell in self.cells.values() for path in cell.unlisted]

    @property
    def remarks(self) -> list[str]:
        """What is said of files that count."""
        count = len(self.unlisted)
        return [LIST_LOST.format(count)] if count else []

    def left_out(self, run_id: str) -> LeftOut:
        """What a reader of this cell's rows leaves out."""
        return self.cells[run_id].left_out if run_id in self.cells else NOTHING


def find_damage(store: RunStore, run_ids: Iterable[str] | None = None) -> Damage:
    """Read every file of rows and pictures of these cells, or of all, and say what does not count.

    It reads as fast as SHA-256 is computed, some GB a second.
    """
    wanted = list(dict.fromkeys(store.stored_cells() if run_ids is None else run_ids))
    sealed = store.sealed
    with (
        ThreadPoolExecutor(max_workers=min(THREADS, os.cpu_count() or 1)) as pool,
        Progress("reading what is stored", lambda: _files(store, wanted)) as bar,
    ):
        found = {run_id: _of_cell(store, run_id, sealed, pool, bar) for run_id in wanted}
        for run_id, cell in found.items():
            if cell.faults:  # a run may have been between a block's pictures and its rows
                found[run_id] = _of_cell(store, run_id, sealed, pool, bar)
    told = {n: cell for n, cell in found.items() if cell.faults or cell.blocks or cell.unlisted}
    return Damage(told)


def _files(store: RunStore, run_ids: Iterable[str]) -> int:
    """How many files of rows and pictures these cells have."""
    return sum(len(store.row_files(id)) + len(store.pictures.files(id)) for id in run_ids)


def _of_cell(
    store: RunStore, run_id: str, sealed: bool, pool: ThreadPoolExecutor, bar: Progress
) -> CellDamage:
    damage = CellDamage()
    parts, blocks = store.rows_of(run_id)
    named: dict[int, str] = {}  # the digest of each block's pictures, as the rows that count say
    unlisted = damage.unlisted if store.unlisted else None
    check = partial(_rows_fault, store, sealed=sealed, unlisted=unlisted)
    trusted: set[int] = set()  # blocks of rows without a seal, which name no pictures
    files = [*parts, *blocks]  # in the order of what counts: last of all what counts most
    for path, fault in zip(files, pool.map(check, files), strict=True):
        bar.advance()
        try:
            pictures = {} if fault else store.named_pictures(run_id, path)
            if not fault and (other := other_cell(path, run_id)):
                fault = f"the rows of another cell, {shown(other, 60)}"
        except NoFile:  # it was compacted just now
            continue
        except BadFile as error:
            fault = error.got
        if path.stem.isdigit():
            named.pop(int(path.stem), None)
        if fault:
            damage.rows[path] = fault
            if path.stem.isdigit():  # older rows of the block, in parts, must not come back
                damage.blocks.add(int(path.stem))
            continue
        named |= pictures
        if path in damage.unlisted:
            trusted |= store.blocks_of(path)
    stored = store.pictures.files(run_id)
    seals = {}
    for block, seal in zip(stored, pool.map(_seal, stored.values()), strict=True):
        bar.advance()
        seals[block] = seal
    for block in sorted(named.keys() | stored.keys()):
        path = store.pictures.path(run_id, block)
        digest = named.get(block)
        fault = _pictures_fault(store, path, seals.get(block), digest, sealed, unlisted)
        if fault:
            damage.pictures[path] = fault
            if block in named or not sealed or block in trusted:
                damage.blocks.add(block)
    return damage


def _seal(path: Path, kind: FileKind = PICTURES) -> Seal | str | None:
    """The file's seal; what is wrong with it where it cannot be read; None where it is gone.

    How it begins and ends is looked at first: a file that says another size than it has, such as
    one with terabytes of holes in it, is not read.
    """
    try:
        kind.check(path)
        if kind is ROWS:
            check_ends(path)
        else:
            TensorFile(path, kind)
        with kind.reading(path):
            return read_seal(path)
    except (NoFile, FileNotFoundError):
        return None
    except Unreadable:  # which is no damage: nothing is set aside
        raise
    except BadFile as error:
        return error.got


def _rows_fault(store: RunStore, path: Path, *, sealed: bool, unlisted: list[Path] | None) -> str:
    """What is wrong with a file of rows; empty if it counts."""
    seal = _seal(path, ROWS)
    if seal is None:  # it was compacted just now
        return "a link to no file" if path.is_symlink() else ""
    if isinstance(seal, str):
        return seal
    if seal.written is not None:
        return seal.fault
    if not sealed:
        return _unreadable(path)
    return _unsealed_fault(store, path, seal.digest, unlisted, _unreadable)


def _unsealed_fault(
    store: RunStore,
    path: Path,
    digest: str,
    unlisted: list[Path] | None,
    unreadable: Callable[[Path], str],
) -> str:
    """What is wrong with a file without a seal in a folder whose other files have one.

    unlisted: where the list of such files is lost, those that count all the same; else None
    """
    if store.adopted.get(store.place(path)) == digest:
        return ""
    if unlisted is None or had_seal(path):
        return NO_SEAL
    if not (fault := unreadable(path)):
        unlisted.append(path)
    return fault


def _unreadable(path: Path) -> str:
    try:
        with ROWS.reading(path):
            check_content(path)
    except BadFile as error:
        return error.got
    return ""


def _pictures_fault(
    store: RunStore,
    path: Path,
    seal: Seal | str | None,
    named: str | None,
    sealed: bool,
    unlisted: list[Path] | None,
) -> str:
    """What is wrong with a file of pictures; empty if it counts, or if nobody asks for it.

    seal: None where there is no file; named: the digest that rows expect; None where they do not
    """
    if seal is None:
        return MISSING
    if isinstance(seal, str):
        return seal
    if seal.written is None and not sealed:
        return _bad_tensors(path)
    fault = seal.fault
    if seal.written is None:
        fault = _unsealed_fault(store, path, seal.digest, unlisted, _bad_tensors)
    if fault:
        return fault
    return OTHERS if named is not None and named != seal.digest else ""


def _bad_tensors(path: Path) -> str:
    """What is wrong with the header of a file without a seal; empty if nothing is."""
    try:
        stored_ids(TensorFile(path, PICTURES))
    except BadFile as error:
        return error.got
    return ""


def fault_lines(store: RunStore, faults: Sequence[Fault], most: int) -> list[str]:
    """A line for each file, at most so many: "rows/0b3a/00003.parquet: a file that changed …"."""
    lines = [f"{store.place(fault.path)}: {fault.words}" for fault in faults[:most]]
    more = len(faults) - len(lines)
    return [*lines, *([f"and {more} further files"] if more else [])]
