"""A run's folder: one parquet file for each block of a cell, named by the digest of its content.

    RUN/rows/CELL/BLOCK.TRY.DIGEST.parquet   a row for each image of the block, its pictures included
    RUN/cells.TRY.DIGEST.parquet             a row for each cell: all that its rows have in common
    RUN/experiment.yaml, experiments/        the resolved experiments that filled the folder
    RUN/damaged/                             files whose content is not the one they are named after

CELL is the cell's run_id, DIGEST the first 16 digits of the file's SHA-256. A file is written aside,
brought to the disk and renamed, so that rows and pictures are there together or not at all, whatever
is killed. Of an image that stands in several files the one with the highest TRY counts. So nothing
is ever changed in place, no worker waits for another, and a wrong bit is a name that does not fit.

The columns of a block's file:

    image_id, label, label_source, group, sha256, pixel_sha256   the image
    block, status, reason, code            ok, failed, unsupported, unscored, unreadable; why; by what code
    psnr.standard, top1.intact, …          a column for each metric and variant; null: no score
    ceiling_psnr.diagnostic, …             and for each diagnostic
    stage_seconds.attack, …                what the block took, by stage, divided among its images
    images, plain, input, target, mask, …  pictures as bytes; the field's metadata say shape and dtype

    SELECT attack, avg(least("psnr.standard", 100)) FROM read_parquet('RUN/rows/*/*.parquet',
    union_by_name=true) JOIN read_parquet('RUN/cells.*.parquet') USING (run_id)
    WHERE rows.status = 'ok' GROUP BY attack
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.core.budget import seconds_in
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import bring_to_disk, unmistakable, write_named
from mjp_privacy.core.gate.file_kind import FileKind, is_there, reason
from mjp_privacy.core.progress import LateBar
from mjp_privacy.core.shown import shown

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

STATUSES = ("ok", "failed", "unsupported", "unscored", "unreadable")
NOT_DONE = ("failed", "unreadable")
"""Statuses of images that the next command attacks again. `unreadable`: the image's file, or one of
its client step, is no image, so that nothing was attacked; such rows are in no figure."""

OF_IMAGE = ("image_id", "block", "status", "reason", "code", "group", "label_source")
"""Columns that every file has, apart from its scores."""
ASIDE = "damaged"
FEWEST_FILES = 50  # a cell with fewer files is not compacted
MOST_BYTES = 64 << 20  # of the rows that compaction puts into one row group
READ_PICTURES = 256 << 20  # bytes of pictures that a reader keeps
TRIES = 5  # how often a folder is read whose files are replaced meanwhile
NAME = re.compile(r"([a-z0-9]+)\.([0-9]{4,9})\.([0-9a-f]{16})\.parquet")
ABOUT = b"mjp_privacy"  # key of a file's metadata: the cell, the code, the machine, as JSON
OLD_FOLDER = re.compile(r"([0-9]{5,}|part-[0-9]+)\.parquet")
CONVERT = "python -m tools.convert_run"

ROWS = FileKind("a run's rows", "Run the attack again, which makes them again.", 1 << 50)


Pictures = tuple[Sequence[str], Mapping[str, "Tensor"]]
"""Ids of images, and the tensors (m, ...) to store of them."""


class StoredFile(NamedTuple):
    """A file and what its name says: 00003.0001.9f86d081884c7d65.parquet."""

    path: Path
    block: str
    attempt: int
    digest: str

    @property
    def is_whole(self) -> bool:
        """Whether the content is the one that the file is named after."""
        try:
            return digest_of(self.path) == self.digest
        except FileNotFoundError:  # it was replaced just now
            return True


class Unit(NamedTuple):
    """What is known of a finished image of a cell."""

    code: str  # the digest of the code that made it
    late: float = 0.0  # seconds after which its attack was ended; 0: it was not


def digest_of(path: Path) -> str:
    """The first 16 digits of a file's SHA-256."""
    ROWS.check(path)
    digest = hashlib.sha256()
    with ROWS.reading(path), path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()[:16]


def stored_files(folder: Path) -> list[StoredFile]:
    """The files of this folder that are named by their digest, later tries last."""
    try:
        names = [(path, NAME.fullmatch(path.name)) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    files = [StoredFile(path, m[1], int(m[2]), m[3]) for path, m in names if m]
    return sorted(files, key=lambda file: (file.attempt, file.path.name))


@dataclass(frozen=True)
class RunStore:
    """One run folder: RunStore(Path("results/demo")).finished("0b3a689adbb159cb")."""

    root: Path
    left_out: frozenset[Path] = frozenset()
    """Damaged files, which do not count."""
    _cells: dict[str, CellRows] = field(default_factory=dict, compare=False, repr=False)
    _pictures: OrderedDict[Path, pa.Table] = field(
        default_factory=OrderedDict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", unmistakable(self.root))

    def folder(self, run_id: str) -> Path:
        """The folder of one cell."""
        return self.root / "rows" / run_id

    def stored_cells(self) -> list[str]:
        """The run_ids of all cells that have rows, also of those that no command plans any more."""
        return sorted(path.name for path in (self.root / "rows").glob("*") if path.is_dir())

    def files(self, run_id: str) -> list[StoredFile]:
        """The files of a cell that count, later tries last."""
        return [f for f in stored_files(self.folder(run_id)) if f.path not in self.left_out]

    # writing ------------------------------------------------------------------------------------

    def write(
        self,
        run_id: str,
        block: int,
        rows: pd.DataFrame,
        pictures: Sequence[Pictures] = (),
        about: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write images of a block; from now on they count in place of earlier ones.

        pictures: ids of images and their tensors (m, ...), in one or several groups; about: the
        cell's facts, the code's files and the machine, which stand in the file's metadata
        """
        import pyarrow as pa

        table = pa.Table.from_pandas(rows.assign(block=np.int32(block)), preserve_index=False)
        for name, (values, metadata) in _packed(rows["image_id"], pictures).items():
            table = table.append_column(pa.field(name, values.type, metadata=metadata), values)
        table = table.replace_schema_metadata({ABOUT: json.dumps(about or {}, default=str)})
        written = write_table(self.folder(run_id), f"{block:05d}", table)
        fresh = frozenset(rows["image_id"])
        for file in self.files(run_id):  # what is wholly replaced goes
            if file.block == f"{block:05d}" and file.path != written:
                try:
                    if fresh >= set(_read(file.path, ["image_id"])["image_id"].to_pylist()):
                        file.path.unlink(missing_ok=True)
                except FileNotFoundError:
                    continue
        return written

    def compact(self, run_id: str, fewest_files: int = FEWEST_FILES) -> int:
        """Put the files of a cell of very many blocks into few; how many were put together.

        Files of equal columns become one; its rows stand in row groups of about MOST_BYTES. No other
        process may write rows of the cell meanwhile; whoever reads them reads either.
        """
        if len(self.files(run_id)) < fewest_files:
            return 0
        counting = self.cell(run_id)
        by_schema: dict[Any, list[int]] = {}
        for place, file in enumerate(counting.files):
            if not file.is_whole:
                raise ValueError(f"{shown(file.path)} changed after it was written")
            by_schema.setdefault(_schema_key(file.path), []).append(place)
        for places in by_schema.values():
            write_pieces(self.folder(run_id), "all", [counting.piece(place) for place in places])
        for file in counting.files:
            file.path.unlink(missing_ok=True)
        bring_to_disk(self.folder(run_id))
        return len(counting.files)

    # reading ------------------------------------------------------------------------------------

    def cell(self, run_id: str) -> CellRows:
        """The rows of a cell that count; read anew when its files are others."""
        for attempt in range(TRIES):
            files = self.files(run_id)
            known = self._cells.get(run_id)
            if known is not None and known.files == files:
                return known
            try:
                self._cells[run_id] = CellRows.of(self.folder(run_id), files)
                return self._cells[run_id]
            except FileNotFoundError:  # a later try, or compaction, replaced a file
                if attempt == TRIES - 1:
                    raise
        raise AssertionError

    def read(self, run_id: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A row for each image that counts, by block; all columns but pictures, or those named."""
        return self.arrow(run_id, columns).to_pandas(integer_object_nulls=True)

    def arrow(self, run_id: str, columns: Sequence[str] | None = None) -> pa.Table:
        """The same as pyarrow's table."""
        for _ in range(TRIES):
            try:
                return self.cell(run_id).read(columns)
            except FileNotFoundError:
                continue
        return self.cell(run_id).read(columns)

    def finished(self, run_id: str) -> dict[str, Unit]:
        """The images of a cell that need not be attacked again."""
        rows = self.read(run_id, ["image_id", "status", "code", "reason"])
        done = rows[~rows["status"].isin(NOT_DONE)].fillna({"code": "", "reason": ""})
        seconds = {reason: seconds_in(reason) for reason in done["reason"].unique()}
        late = done["reason"].map(seconds).tolist()
        return dict(zip(done["image_id"], map(Unit, done["code"], late), strict=True))

    def about(self, run_id: str) -> list[dict[str, Any]]:
        """What the files of a cell say of it in their metadata, later tries last."""
        return [about_of(file.path) for file in self.files(run_id)]

    # pictures -----------------------------------------------------------------------------------

    def pictured(self, run_id: str) -> list[str]:
        """The ids of the images whose reconstructions are stored, in stored order."""
        rows = self.cell(run_id)
        return [image for place in range(len(rows.files)) for image in rows.pictured(place)]

    def pictures(self, run_id: str, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image in one cell, without the leading axis; None where there
        are none: `images` is the reconstruction, float32 in [0, 1]."""
        for _ in range(TRIES):
            rows = self.cell(run_id)
            place = rows.place.get(image_id)
            if place is None or image_id not in rows.pictured(place):
                return None
            try:
                table = self._picture_table(rows.files[place].path)
            except FileNotFoundError:
                continue
            at = rows.ids[place].index(image_id)
            return _unpacked(table, at)
        return None

    def _picture_table(self, path: Path) -> pa.Table:
        """The pictures of a file; those that were read last are kept."""
        if path in self._pictures:
            self._pictures.move_to_end(path)
            return self._pictures[path]
        schema = _open(path).schema_arrow
        table = _read(path, [name for name in schema.names if _is_picture(schema.field(name))])
        self._pictures[path] = table
        while sum(t.nbytes for t in self._pictures.values()) > READ_PICTURES > table.nbytes:
            self._pictures.popitem(last=False)
        return table

    # damage -------------------------------------------------------------------------------------

    def damaged(self, run_ids: Iterable[str] | None = None) -> list[Path]:
        """Files of these cells, or of all, that are not as they were written; each is read whole."""
        folders = [self.folder(run_id) for run_id in (run_ids or self.stored_cells())]
        files = [file for folder in (self.root, *folders) for file in stored_files(folder)]
        with (
            ThreadPoolExecutor(4) as pool,
            LateBar("reading what is stored", lambda: len(files)) as bar,
        ):
            found = []
            for file, whole in zip(files, pool.map(_is_whole, files), strict=True):
                bar.advance()
                found += [] if whole else [file.path]
        return found

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Move files into the folder of damaged ones: their images are no longer finished."""
        for path in paths:
            target = self.root / ASIDE / path.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            bring_to_disk(path.parent)

    def without(self, paths: Iterable[Path]) -> RunStore:
        """The same folder for a reader that leaves these files out."""
        return RunStore(self.root, frozenset(paths))

    # cells --------------------------------------------------------------------------------------

    def write_cells(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Write the list of cells: the columns of every cell's facts."""
        before = [file for file in stored_files(self.root) if file.block == "cells"]
        written = write_table(self.root, "cells", _as_table(cells))
        for file in before:
            if file.path != written:
                file.path.unlink(missing_ok=True)

    def read_cells(self) -> list[dict[str, Any]]:
        """The cells of the folder, those of the last command first; where their list is damaged,
        those that rows tell of. `CellFacts.read` makes facts of one."""
        self.check_format()
        for file in reversed(stored_files(self.root)):
            if file.block == "cells" and file.path not in self.left_out and file.is_whole:
                return _from_table(_read(file.path, None))
        told = [about[-1].get("cell") for r in self.stored_cells() if (about := self.about(r))]
        if not told:
            raise UserError(
                f"{self.root} is not a run folder: expected cells.….parquet in it, as mjp attack "
                "writes it. Give the folder that was the --out of a run."
            )
        return [cell for cell in told if isinstance(cell, dict)]

    def check_format(self) -> None:
        """Raise for a folder that an earlier version wrote, or with a file in place of a folder."""
        if is_there(self.root / "cells.json"):
            raise UserError(
                f"{shown(self.root)} was written by an earlier version of mjp-privacy: expected "
                f"cells.….parquet, got cells.json. `{CONVERT} {shown(self.root)} OUT` makes a folder "
                "of this version from it, with equal numbers."
            )
        places = [self.root / name for name in ("rows", "experiments", ASIDE)]
        places += (self.root / "rows").glob("*") if (self.root / "rows").is_dir() else []
        for path in places:
            if (is_there(path) or path.is_symlink()) and not path.is_dir():
                raise UserError(
                    f"{shown(path)}: expected a folder, got a file or a link to nowhere. Put the "
                    "folder back if you have it; else take this file away, and the same attack "
                    "makes again what was in it."
                )


@dataclass(frozen=True)
class CellRows:
    """The files of one cell, and which of their images count."""

    files: list[StoredFile]
    ids: list[list[str]]  # the images of each file, all of them
    kept: list[NDArray[np.bool_] | None]  # which of them count; None: all

    @classmethod
    def of(cls, folder: Path, files: list[StoredFile]) -> CellRows:
        """Read the ids of every file; the last file that holds an image has it."""
        ids = [_read(file.path, ["image_id"])["image_id"].to_pylist() for file in files]
        for file, names in zip(files, ids, strict=True):
            if None in names or len(set(names)) < len(names):
                raise ROWS.refusal(file.path, "an image twice, or one without a name", "image_id")
        kept: list[NDArray[np.bool_] | None] = [None] * len(files)
        taken: set[str] = set()
        for place in reversed(range(len(files))):
            if not taken.isdisjoint(ids[place]):
                kept[place] = np.array([name not in taken for name in ids[place]])
            taken.update(ids[place])
        return cls(files, ids, kept)

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns but pictures, as the files have them."""
        schemas = [_open(file.path).schema_arrow for file in self.files]
        names = (n for schema in schemas for n in schema.names if not _is_picture(schema.field(n)))
        return list(dict.fromkeys(names))

    @cached_property
    def place(self) -> dict[str, int]:
        """The file that has each image, by its place among the files."""
        return {name: place for place, names in enumerate(self.ids) for name in names}

    def pictured(self, place: int) -> list[str]:
        """The images of a file that count and have pictures."""
        if "images" not in _open(self.files[place].path).schema_arrow.names:
            return []
        has = _read(self.files[place].path, ["has_picture"])["has_picture"].to_pylist()
        names = zip(self.ids[place], has, strict=True)
        return [name for name, it_has in names if it_has and self.place[name] == place]

    def piece(self, place: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a file that count, with pictures unless columns are named."""
        import pyarrow as pa

        table = _read(self.files[place].path, columns)
        kept = self.kept[place]
        return table if kept is None else table.filter(pa.array(kept))

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of all files, by block: all columns but pictures, or those named that exist."""
        import pyarrow as pa

        tables = []
        for place, file in enumerate(self.files):
            schema = _open(file.path).schema_arrow
            checked(schema, file.path)
            names = columns or [n for n in schema.names if not _is_picture(schema.field(n))]
            wanted = dict.fromkeys(("block", *(name for name in names if name in schema.names)))
            tables.append(self.piece(place, list(wanted)).replace_schema_metadata(None))
        if not tables:
            return pa.table({name: pa.array([], pa.string()) for name in columns or OF_IMAGE})
        whole = pa.concat_tables(tables, promote_options="permissive")
        order = np.argsort(whole["block"].to_numpy(), kind="stable")
        whole = whole if (np.diff(order) == 1).all() else whole.take(order)
        return whole if columns is None or "block" in columns else whole.drop_columns(["block"])


# files ------------------------------------------------------------------------------------------


def write_table(folder: Path, name: str, table: pa.Table) -> Path:
    """Write a table into a file NAME.TRY.DIGEST.parquet of this folder, whose try is the next."""
    return write_pieces(folder, name, [table])


def write_pieces(folder: Path, name: str, pieces: Sequence[pa.Table]) -> Path:
    """The same for a table in pieces of equal columns; row groups hold MOST_BYTES or one piece."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    first = pieces[0]
    floats = [n for n in first.column_names if _is_picture(first.schema.field(n))]
    words = [n for n in first.column_names if pa.types.is_string(first.schema.field(n).type)]
    plain = {n: "NONE" if n in floats else "ZSTD" for n in first.column_names}
    abouts = [json.loads((piece.schema.metadata or {}).get(ABOUT, b"{}")) for piece in pieces]
    about = {key: value for each in abouts for key, value in each.items()}
    codes = {digest: of for each in abouts for digest, of in each.get("code", {}).items()}
    metadata = {ABOUT.decode(): json.dumps({**about, **({"code": codes} if codes else {})})}

    def write(path: Path) -> None:
        schema = first.schema.with_metadata(metadata)
        with ParquetWriter(path, schema, compression=plain, use_dictionary=words) as writer:
            group: list[pa.Table] = []
            for piece in pieces:
                if group and sum(t.nbytes for t in group) + piece.nbytes > MOST_BYTES:
                    writer.write_table(pa.concat_tables(group))
                    group = []
                group.append(piece.replace_schema_metadata(metadata))
            writer.write_table(pa.concat_tables(group))

    attempt = 1 + max((file.attempt for file in stored_files(folder)), default=0)
    target = folder / f"{name}.{attempt:04d}.parquet"
    return write_named(
        target, write, lambda t: f"{name}.{attempt:04d}.{digest_of(t)}.parquet", lasting=True
    )


def about_of(path: Path) -> dict[str, Any]:
    """What a file says of its cell, its code and its machine."""
    stored = (_open(path).schema_arrow.metadata or {}).get(ABOUT, b"{}")
    with ROWS.reading(path):
        about = json.loads(stored)
    return about if isinstance(about, dict) else {}


def checked(schema: pa.Schema, path: Path) -> None:
    """Raise a UserError unless a file has the columns of a block, of the kinds they should be."""
    import pyarrow as pa

    if missing := [name for name in OF_IMAGE if name not in schema.names]:
        raise ROWS.refusal(path, f"no column {', '.join(missing)}")
    for name in schema.names:
        kind = schema.field(name).type
        if "." in name and not (pa.types.is_floating(kind) or pa.types.is_null(kind)):
            raise ROWS.refusal(path, f"values of type {kind}", name)


def _open(path: Path) -> Any:
    """The metadata of a file: `.schema_arrow`."""
    from pyarrow.parquet import ParquetFile

    ROWS.check(path)
    with ROWS.reading(path), ParquetFile(path) as file:
        return file


def _read(path: Path, columns: Sequence[str] | None) -> pa.Table:
    """Columns of a file, as far as it has them; FileNotFoundError where it is gone."""
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = names if columns is None else [name for name in columns if name in names]
            return file.read(wanted, use_threads=False)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise ROWS.refusal(path, reason(error)) from error


def _is_whole(file: StoredFile) -> bool:
    return file.is_whole


def _schema_key(path: Path) -> str:
    return str(_open(path).schema_arrow.to_string(show_field_metadata=True))


# pictures as columns ------------------------------------------------------------------------------


def _is_picture(field: pa.Field) -> bool:
    return bool(field.metadata and b"shape" in field.metadata)


def _packed(
    ids: Iterable[str], groups: Sequence[Pictures]
) -> dict[str, tuple[Any, dict[str, str] | None]]:
    """Columns of bytes, with what a reader needs: shape, dtype, and the scale of what was packed.

    Private images are bytes where all values are multiples of 1/255, as those of every picture that
    was not resampled. A target that equals the plain or the fed images is not stored twice.
    """
    import pyarrow as pa

    if not groups:
        return {}
    pictured = {image_id for names, _ in groups for image_id in names}
    columns: dict[str, tuple[Any, dict[str, str] | None]] = {
        "has_picture": (pa.array([image_id in pictured for image_id in ids]), None)
    }
    for name in dict.fromkeys(name for _, tensors in groups for name in tensors):
        having = [(names, tensors) for names, tensors in groups if name in tensors]
        parts = [t[name].cpu().contiguous().numpy() for _, t in having]
        metadata = {"shape": json.dumps(parts[0].shape[1:]), "dtype": str(parts[0].dtype)}
        same = [n for n in ("plain", "input") if name == "target" and _equal(having, name, n)]
        if same:
            columns[name] = pa.nulls(len(columns["has_picture"][0])), {**metadata, "same": same[0]}
            continue
        if name != "images" and parts[0].dtype == np.float32:
            small = [np.clip(np.round(p * np.float32(255)), 0, 255).astype(np.uint8) for p in parts]
            if all(map(np.array_equal, map(_scaled, small), parts)):
                parts, metadata = small, {**metadata, "dtype": "uint8", "scale": "1/255"}
        cells = {n: p[at].tobytes() for (names, _), p in zip(having, parts, strict=True)
                 for at, n in enumerate(names)}
        size = int(np.prod(parts[0].shape[1:])) * parts[0].dtype.itemsize
        columns[name] = pa.array([cells.get(n) for n in ids], pa.binary(size)), metadata
    return columns


def _equal(groups: Sequence[Pictures], name: str, other: str) -> bool:
    return all(other in t and t[name].equal(t[other]) for _, t in groups)


def _scaled(values: NDArray[np.uint8]) -> NDArray[np.float32]:
    return values.astype(np.float32) / np.float32(255)


def _unpacked(table: pa.Table, at: int) -> dict[str, Tensor]:
    """The tensors of the row at this place, bit for bit as they were written."""
    import torch

    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    for name in table.column_names:
        known = {k.decode(): v.decode() for k, v in table.schema.field(name).metadata.items()}
        if "same" in known:
            same[name] = known["same"]
            continue
        cell = table[name][at].as_buffer()
        if cell is None:  # others of the block have it
            continue
        shape = json.loads(known["shape"])
        values = np.frombuffer(cell, known["dtype"]).reshape(shape)
        tensor = torch.from_numpy(values.copy())
        tensors[name] = tensor.float() / 255 if "scale" in known else tensor
    return {**tensors, **{name: tensors[other] for name, other in same.items() if other in tensors}}


# cells as a table -----------------------------------------------------------------------------------


def _as_table(cells: Sequence[Mapping[str, Any]]) -> pa.Table:
    """A row for each cell; what is no number and no word, such as a list, is JSON."""
    import pyarrow as pa

    columns, fields = [], []
    for name in dict.fromkeys(name for cell in cells for name in cell):
        values = [cell.get(name) for cell in cells]
        as_json = any(isinstance(value, (list, tuple, dict)) for value in values)
        if as_json:
            values = [None if value is None else json.dumps(value) for value in values]
        columns.append(pa.array(values))
        fields.append(pa.field(name, columns[-1].type, metadata={"json": "1"} if as_json else None))
    return pa.table(columns, schema=pa.schema(fields))


def _from_table(table: pa.Table) -> list[dict[str, Any]]:
    packed = {f.name for f in table.schema if f.metadata and b"json" in f.metadata}
    return [
        {n: json.loads(v) if n in packed and v is not None else v for n, v in row.items()}
        for row in table.to_pylist()
    ]
