"""A run's folder: one parquet file for each block of a cell, named by the digest of its content.

    RUN/rows/CELL/BLOCK.TRY.DIGEST.parquet  a row for each image of the block, with its pictures
    RUN/cells.TRY.DIGEST.parquet            a row for each cell: all that its rows have in common
    RUN/copy.TRY.DIGEST.parquet             the same, read where that is damaged or missing
    RUN/experiment.yaml, experiments/       the resolved experiments that filled the folder
    RUN/damaged/                            files whose content is not the one they are named after

CELL is the cell's run_id, DIGEST the first 16 digits of the file's SHA-256. A file is written
aside, brought to the disk and renamed: rows and pictures are there together or not at all, whatever
is killed. Of an image that stands in several files the one with the highest TRY counts; when a run
ends, each stands in one. So nothing is changed in place, no worker waits for another, and a wrong
bit is a name that does not fit.

The columns of a block's file:

    run_id, image_id, label, label_source, group, sha256, pixel_sha256   the image
    block, status, reason, code     ok, failed, unsupported, unscored or unreadable; why; by what
    psnr.standard, top1.intact, …   a column for each metric and variant; null: no score
    ceiling_psnr.diagnostic, …      and for each diagnostic
    stage_seconds.attack, …         what the block took, by stage, divided among its images
    images, plain, input, …         pictures as bytes; the field's metadata say shape and dtype

    SELECT cells.attack, avg(least("psnr.standard", 100)) AS psnr
    FROM read_parquet('RUN/rows/**/*.parquet', union_by_name = true) AS images
    JOIN read_parquet('RUN/cells.*.parquet') AS cells USING (run_id)
    WHERE images.status = 'ok' GROUP BY cells.attack
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from attacks.budget import OVER, SECONDS
from mjp_privacy.core.errors import BadFile, NoFile, Unreadable, UserError
from mjp_privacy.core.files import fsync, write_atomically
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.block_file import (
    ABOUT,
    OF_IMAGE,
    ROWS,
    BlockContent,
    Pictures,
    about_of,
    joined_schema,
    picture_layout,
    read_pictures,
    read_table,
    unpacked,
    with_pictures,
    write_file,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from torch import Tensor

STATUSES = ("ok", "failed", "unsupported", "unscored", "unreadable")
NOT_DONE = ("failed", "unreadable")
"""Statuses of images that the next command attacks again. `unreadable`: the image's file, or one of
its client step, is no image, so that nothing was attacked; such rows are in no figure."""

OF_CELL = ("run_id", "model", "setting", "gamma", "attack", "dtype", "seed", "status")
"""What the list of cells has of each, at least."""
FACTS = "facts"  # column of the list of cells: all facts of a cell, as JSON
ASIDE = "damaged"
FEWEST_FILES = 50  # a cell with fewer files is not compacted
FULL = 64 << 20  # bytes of a file that compaction adds nothing to: damage costs no more than that
KEPT = 4  # files whose pictures a reader keeps
TRIES = 5  # how often a folder is read whose files are replaced meanwhile
NAME = re.compile(r"([a-z0-9]+)\.([0-9]{4,9})\.([0-9a-f]{16})\.parquet")
LISTS = ("cells", "copy")
CONVERT = "python tools/convert_run.py"  # of the sources; it needs nothing else of them

CELLS = FileKind("the list of a run's cells", "Run the attack again, which mends it.", 1 << 30)

T = TypeVar("T")


class NoRun(UserError):
    """A folder in which no run has been."""


class StoredFile(NamedTuple):
    """A file and what its name says: 00003.0001.9f86d081884c7d65.parquet."""

    path: Path
    block: str
    attempt: int
    digest: str

    @property
    def is_whole(self) -> bool:
        """Whether it is the file that was written here, bit for bit; one that is gone is."""
        try:
            if self.block not in LISTS:
                about_of(self.path)  # refused where it is of another cell
            return digest_of(self.path) == self.digest
        except Unreadable:  # it may be sound
            raise
        except BadFile as error:
            return isinstance(error, NoFile) and not self.path.is_symlink()


class CellList(NamedTuple):
    """The cells of a folder, those of the last command first."""

    cells: Sequence[dict[str, Any]]
    lost: str = ""
    """The name of their list where it is damaged or missing, so that its copy was read."""


class Unit(NamedTuple):
    """What is known of a finished image of a cell."""

    code: str  # the digest of the code that made it
    late: float = 0.0  # seconds after which its attack was ended; 0: it was not
    compared: bool = True  # with its upload by gradient, if that was possible; or not known


def digest_of(path: Path) -> str:
    """The first 16 digits of a file's SHA-256."""
    return ROWS.sha256(path)[:16]


def stored_files(folder: Path) -> list[StoredFile]:
    """The files of this folder that are named by their digest, later tries last."""
    found = [(int(m[2]), m) for name in names_in(folder) if (m := NAME.fullmatch(name))]
    found.sort(key=lambda of_file: (of_file[0], of_file[1][0]))
    return [StoredFile(folder / m[0], m[1], attempt, m[3]) for attempt, m in found]


def names_in(folder: Path) -> list[str]:
    """What lies in a folder; nothing where there is none. Unreadable where it may not be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208 -- of ten thousand files, at every write
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError:
        with ROWS.reading(folder):
            raise


class RunStore:
    """One run folder: RunStore(Path("results/demo")).finished("0b3a689adbb159cb").

    left_out: damaged files, which do not count
    """

    def __init__(self, root: Path, left_out: Iterable[Path] = ()) -> None:
        looks_like_an_address = ":" in "".join(root.parts[:1])  # to pyarrow, as run:1/rows does
        self.root = root.absolute() if looks_like_an_address else root
        self.left_out = frozenset(left_out)
        self._cells: dict[str, CellRows] = {}
        self._pictures = lru_cache(KEPT)(read_pictures)  # a file never changes

    def folder(self, run_id: str) -> Path:
        return self.root / "rows" / run_id

    def stored_cells(self) -> list[str]:
        """The run_ids of all cells that have rows, also of those that no command plans any more."""
        rows = self.root / "rows"
        return sorted(name for name in names_in(rows) if (rows / name).is_dir())

    @property
    def experiments(self) -> list[str]:
        """The names of the experiments that filled the folder; several share its table."""
        return sorted(path.stem for path in (self.root / "experiments").glob("*.yaml"))

    def files(self, run_id: str) -> list[StoredFile]:
        """The files of a cell that count, later tries last."""
        return [f for f in stored_files(self.folder(run_id)) if f.path not in self.left_out]

    # writing ------------------------------------------------------------------------------------

    def write(
        self,
        run_id: str,
        block: int,
        rows: pd.DataFrame,
        pictures: Pictures = MappingProxyType({}),
        about: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write images of a block; from now on they count in place of earlier ones.

        about: the cell's facts, the code's files and the machine, which stand in the file's
        metadata
        """
        import pyarrow as pa

        table = pa.Table.from_pandas(rows.assign(block=np.int32(block)), preserve_index=False)
        for at, column in enumerate(table.schema):
            if pa.types.is_large_string(column.type):  # as pandas 3 makes them
                table = table.set_column(at, column.name, table[at].cast(pa.string()))
        table = with_pictures(table, list(rows["image_id"]), pictures)
        table = table.replace_schema_metadata({ABOUT: json.dumps(about or {}, default=str)})
        return write_pieces(self.folder(run_id), f"{block:05d}", table.schema, [table])

    def compact(self, run_id: str, fewest_files: int = FEWEST_FILES) -> int:
        """Tidy a cell after a run; how many files went.

        Very many small files, or those with rows that later ones replaced, become few. No other
        process may write rows of the cell meanwhile; whoever reads them reads either, and a kill
        leaves either or both.
        """
        rows, folder, total = self.cell(run_id), self.folder(run_id), 0
        sizes = [file.path.stat().st_size for file in rows.files]
        kept = rows.kept
        replaced = [not counts.all() for counts in kept]
        chosen = [at for at, size in enumerate(sizes) if size < FULL / 2 or replaced[at]]
        if len(chosen) < fewest_files and not any(replaced):
            return 0
        groups: dict[tuple[Any, ...], list[int]] = {}
        for at in chosen:
            file = rows.files[at]
            if not file.is_whole:
                raise ValueError(f"{shown(file.path)} changed after it was written")
            if kept[at].any():
                total += sizes[at]
                key = *picture_layout(rows.contents[at].schema), total // FULL
                groups.setdefault(key, []).append(at)
        for places in groups.values():
            schema = joined_schema([rows.contents[at] for at in places])
            write_pieces(folder, "all", schema, (rows.piece(at) for at in places))
        for at in chosen:
            rows.files[at].path.unlink(missing_ok=True)
        fsync(folder)
        return len(chosen)

    # reading ------------------------------------------------------------------------------------

    def cell(self, run_id: str) -> CellRows:
        """What is in the files of a cell that count, as they are now."""
        return self.settled(run_id, lambda rows: rows)

    def settled(self, run_id: str, read: Callable[[CellRows], T]) -> T:
        """What `read` makes of a cell's rows; read anew where files were replaced meanwhile, as by
        a later try or by compaction."""
        for attempt in range(TRIES):
            known, files = self._cells.get(run_id), self.files(run_id)
            try:
                if known is None or known.files != files:
                    known = self._cells[run_id] = CellRows(files)
                return read(known)
            except (NoFile, Unreadable):  # Unreadable: so does a network's file system tell it
                if attempt == TRIES - 1:
                    raise
        raise AssertionError

    def read(self, run_id: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A row for each image that counts, by block; all columns but pictures, or those named."""
        table = self.settled(run_id, lambda rows: rows.read(columns))
        return table.to_pandas(integer_object_nulls=True)  # type: ignore[no-any-return]

    def finished(self, run_id: str) -> dict[str, Unit]:
        """The images of a cell that need not be attacked again."""
        over, seconds = f"{OVER}.diagnostic", f"{SECONDS}.diagnostic"
        rows = self.read(run_id, ["image_id", "status", "code", over, seconds])
        done = rows[~rows["status"].isin(NOT_DONE)].fillna({"code": ""})
        known = over in done and seconds in done
        late = done[seconds].where(done[over] == 1, 0.0) if known else [0.0] * len(done)
        units = dict(zip(done["image_id"], map(Unit, done["code"], late), strict=True))
        cell = self.cell(run_id)
        for content, kept in zip(cell.contents, cell.kept, strict=True):
            for name in () if content.compared else compress(content.ids, kept):
                if name in units:
                    units[name] = units[name]._replace(compared=False)
        return units

    def about(self, run_id: str) -> list[dict[str, Any]]:
        """What the files of a cell say of it in their metadata, later tries last."""
        return [content.about for content in self.cell(run_id).contents]

    # pictures -----------------------------------------------------------------------------------

    def pictured(self, run_id: str) -> list[str]:
        """The ids of the images whose reconstructions are stored."""
        rows = self.cell(run_id)
        names: list[str] = []
        for content, kept in zip(rows.contents, rows.kept, strict=True):
            names += compress(content.ids, kept & np.array(content.has_picture, dtype=bool))
        return names

    def pictures(self, run_id: str, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image in one cell, without the leading axis; None where there
        are none: `images` is the reconstruction, float32 in [0, 1]."""

        def find(rows: CellRows) -> dict[str, Tensor] | None:
            at, row = rows.place.get(image_id, (-1, 0))
            if at < 0 or not rows.contents[at].has_picture[row]:
                return None
            return unpacked(self._pictures(rows.files[at].path), row)

        return self.settled(run_id, find)

    # damage -------------------------------------------------------------------------------------

    def damaged(self) -> list[Path]:
        """Files that are not as they were written; it reads all."""
        folders = [self.root, *map(self.folder, self.stored_cells())]
        files = [file for folder in folders for file in stored_files(folder)]
        with (
            ThreadPoolExecutor(4) as pool,
            Progress("reading what is stored", lambda: len(files)) as bar,
        ):
            found = []
            wholes = pool.map(lambda file: file.is_whole, files)
            for file, whole in zip(files, wholes, strict=True):
                bar.advance()
                found += [] if whole else [file.path]
        return found

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Move files into the folder of damaged ones: their images are no longer finished."""
        for path in paths:
            target = self.root / ASIDE / path.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            fsync(path.parent)

    def without(self, paths: Iterable[Path]) -> RunStore:
        """The same folder for a reader that leaves these files out."""
        return RunStore(self.root, paths)

    # cells --------------------------------------------------------------------------------------

    def write_cells(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Write the list of cells: a row for each, its facts as columns, and all of them as JSON,
        which is what is read."""
        import pyarrow as pa

        columns = {}
        for name in dict.fromkeys(name for cell in cells for name in cell):
            values = [cell.get(name) for cell in cells]
            try:
                columns[name] = pa.array(values)
            except (pa.ArrowInvalid, pa.ArrowTypeError):  # words and numbers
                columns[name] = pa.array([json.dumps(value) for value in values])
        table = pa.table({**columns, FACTS: [json.dumps(dict(cell)) for cell in cells]})
        before = stored_files(self.root)
        path = write_pieces(self.root, LISTS[0], table.schema, [table])
        copy = path.with_name(path.name.replace(*LISTS, 1))
        write_atomically(copy, lambda place: shutil.copyfile(path, place), durable=True)
        for file in before:
            file.path.unlink(missing_ok=True)

    def read_cells(self) -> list[dict[str, Any]]:
        """The cells of the folder, those of the last command first."""
        return list(self.cell_list().cells)

    def cell_list(self) -> CellList:
        """The list of cells or, where it is damaged or missing, its copy."""
        self.check_format()
        for _ in range(TRIES):
            lost, files = "cells.….parquet", stored_files(self.root)
            # an older list, which a killed command left, may be of other models
            for file in (file for file in files if file.attempt == files[-1].attempt):
                try:
                    if file.path not in self.left_out and file.is_whole:
                        cells = _cells_in(file.path)
                        return CellList(cells, "" if file.block == LISTS[0] else lost)
                except NoFile:  # the next list has taken its place
                    break
                lost = file.path.name
        raise NoRun(
            f"{self.root} is not a run folder: expected a whole cells.….parquet or its copy in it, "
            "as mjp attack writes them. Give the folder that was the --out of a run, or run it "
            "again."
        )

    def check_format(self) -> None:
        """Raise for a folder that an earlier version wrote: it has no list of cells of this one."""
        if stored_files(self.root):
            return
        paths = [self.root / "cells.json", *self.root.glob("rows/*/*.parquet")]
        old = (path.name for path in paths if is_there(path) and not NAME.fullmatch(path.name))
        if name := next(old, ""):
            raise UserError(
                f"{shown(self.root)} was written by an earlier version of mjp-privacy: expected "
                f"cells.….parquet, got {name}. `{CONVERT} {shown(self.root)} OUT`, a file of the "
                "sources of mjp-privacy, makes a folder of this version of it, with equal numbers."
            )


class CellRows:
    """The files of one cell, later tries last; of an image in several files the last one counts."""

    def __init__(self, files: list[StoredFile]) -> None:
        self.files: list[StoredFile] = files
        self.contents: list[BlockContent] = [BlockContent.of(file.path) for file in files]

    @cached_property
    def place(self) -> dict[str, tuple[int, int]]:
        """The file and the row of each image."""
        contents = enumerate(self.contents)
        return {name: (at, row) for at, of in contents for row, name in enumerate(of.ids)}

    @cached_property
    def kept(self) -> list[NDArray[np.bool_]]:
        """For each file, which of its rows count: those of images that no later file has."""
        later, found = set[str](), []
        for content in reversed(self.contents):
            found.append(np.array([name not in later for name in content.ids], dtype=bool))
            later.update(content.ids)
        return found[::-1]

    @property
    def columns(self) -> list[str]:
        """The names of all columns but pictures, as the files have them."""
        return list(dict.fromkeys(name for content in self.contents for name in content.columns))

    def piece(self, at: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a file that count, with pictures unless columns are named."""
        import pyarrow as pa

        table, kept = read_table(self.files[at].path, columns), self.kept[at]
        return table if kept.all() else table.filter(pa.array(kept))

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of all files, by block: all columns but pictures, or those named that exist."""
        import pyarrow as pa

        if not self.files:
            return pa.table({name: pa.array([], pa.string()) for name in columns or OF_IMAGE})
        tables = []
        for at, (file, content) in enumerate(zip(self.files, self.contents, strict=True)):
            names = [n for n in columns or content.columns if n in content.columns]
            table = self.piece(at, list(dict.fromkeys([*names, "block"])))
            words = table["status"].unique().to_pylist() if "status" in names else []
            if strange := [word for word in words if word not in STATUSES]:
                raise ROWS.refusal(file.path, shown(strange[0], 40), "status")
            tables.append(table.replace_schema_metadata(None))
        with ROWS.reading(self.files[0].path.parent):
            whole = pa.concat_tables(tables, promote_options="permissive")
        whole = whole.sort_by("block")  # in the order of the files, else
        return whole if "block" in (columns or OF_IMAGE) else whole.drop_columns(["block"])


# files ------------------------------------------------------------------------------------------


def write_pieces(folder: Path, name: str, schema: pa.Schema, pieces: Iterable[pa.Table]) -> Path:
    """Write a table into a file NAME.TRY.DIGEST.parquet of this folder, whose try is the next one
    after those that are there."""
    before = [file.attempt for file in stored_files(folder)]
    start = f"{name}.{1 + max(before, default=0):04d}"
    return write_atomically(
        folder / f"{start}.parquet",
        lambda path: write_file(path, schema, pieces),
        durable=True,
        name_of=lambda path: f"{start}.{digest_of(path)}.parquet",
    )


def _cells_in(path: Path) -> list[dict[str, Any]]:
    """The cells of a list; a UserError unless each has what a cell needs, and a name that is no
    path."""
    with CELLS.reading(path):
        cells = [dict(json.loads(text)) for text in read_table(path, [FACTS])[FACTS].to_pylist()]
    for number, cell in enumerate(cells):
        place = f"cell {number}"
        if missing := [name for name in OF_CELL if name not in cell]:
            raise CELLS.refusal(path, f"one without {', '.join(missing)}", place)
        if cell["run_id"] != Path(str(cell["run_id"])).name:
            raise CELLS.refusal(path, f"the run_id {shown(cell['run_id'], 60)!r}", place)
    return cells
