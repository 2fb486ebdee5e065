"""One file of a run's rows: parquet, a row for each image, its pictures as columns of bytes.

    packed(ids, pictures)              the columns of pictures, as small as they are without loss
    write_file(path, schema, pieces)   a table in pieces, with checksums of its pages
    BlockContent.of(path)              its images and columns, or a UserError in one line
    at, table = read_pictures(path, 3); unpacked(table, 3 - at)   the tensors of its fourth image

`images`, the reconstructions, are float32 in [0, 1]. Private images are bytes where all values are
multiples of 1/255, as those of every picture that was not resampled; a target that equals the plain
or the fed images is not stored twice. A picture's field has metadata: shape and dtype, and scale or
same, of what was packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.core.read import FileKind

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

OF_IMAGE = ("image_id", "block", "status", "reason", "code", "group", "label_source")
"""Columns without which a file is none of a run; its digests and labels stand beside them."""
MOST_BYTES = 64 << 20  # of a row group that is put together of pieces
ABOUT = b"mjp_privacy"  # key of a file's metadata: the cell, the code, the machine, as JSON

ROWS = FileKind("a run's rows", "Run the attack again, which makes them again.", 1 << 50)

Pictures = tuple[Sequence[str], Mapping[str, "Tensor"]]
"""Ids of images, and the tensors (m, ...) to store of them."""
T = TypeVar("T")


class BlockContent(NamedTuple):
    """What is known of a file once it was opened."""

    ids: list[str]  # its images, all of them
    has_picture: list[bool]  # which of them have pictures
    columns: tuple[str, ...]  # without pictures

    @classmethod
    def of(cls, path: Path) -> BlockContent:
        """Read it; a UserError where it is no file of a block, or of another cell."""

        def read(file: Any) -> tuple[pa.Schema, pa.Table]:
            schema = file.schema_arrow
            names = [name for name in ("image_id", "has_picture") if name in schema.names]
            return schema, file.read(names, use_threads=False)

        schema, table = _opened(path, read)
        _check_columns(schema, path)
        ids = _names(table["image_id"], path)
        known = "has_picture" in table.column_names
        has = table["has_picture"].to_pylist() if known else [False] * len(ids)
        return cls(ids, has, tuple(n for n in schema.names if not is_picture(schema.field(n))))


_last_names: tuple[Any, list[str]] = (None, [])


def _names(column: pa.ChunkedArray, path: Path) -> list[str]:
    """The names of images; those of cells with the same images are one list in memory."""
    global _last_names
    known, last = _last_names
    if known is not None and known.equals(column):
        return last
    names: list[str] = column.to_pylist()
    if None in names or len(set(names)) < len(names):
        raise ROWS.refusal(path, "an image twice, or one without a name", "image_id")
    _last_names = column, names
    return names


def write_file(path: Path, schema: pa.Schema, pieces: Iterable[pa.Table]) -> None:
    """Write a table in pieces, which may lack columns of the schema; row groups hold MOST_BYTES or
    one piece."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    others = [column.name for column in schema if not is_picture(column)]
    layout: dict[str, Any] = {
        "compression": {n: "ZSTD" if n in others else "NONE" for n in schema.names},
        "use_dictionary": [c.name for c in schema if pa.types.is_string(c.type)],
        "write_statistics": others,
        "write_page_checksum": True,
    }
    with ParquetWriter(path, schema, **layout) as writer:
        group, size = [schema.empty_table()], 0
        for piece in pieces:
            if size and size + piece.nbytes > MOST_BYTES:
                writer.write_table(pa.concat_tables(group, promote_options="permissive"))
                group, size = [schema.empty_table()], 0
            group.append(piece)
            size += piece.nbytes
        writer.write_table(pa.concat_tables(group, promote_options="permissive"))


def about_of(schema: pa.Schema, path: Path) -> dict[str, Any]:
    """What a file says of its cell, its code and its machine."""
    with ROWS.reading(path):
        about = json.loads((schema.metadata or {}).get(ABOUT, b"{}"))
    return about if isinstance(about, dict) else {}


def _check_columns(schema: pa.Schema, path: Path) -> None:
    """Raise a UserError unless a file has the columns of a block, of the kinds they should be, and
    is of the cell in whose folder it lies."""
    from pyarrow import types

    if missing := [name for name in OF_IMAGE if name not in schema.names]:
        raise ROWS.refusal(path, f"no column {', '.join(missing)}")
    for column in schema:
        is_score = "." in column.name
        right = types.is_floating if is_score else types.is_string
        right = types.is_integer if column.name == "block" else right
        may_be_null = column.name not in ("image_id", "block", "status")
        is_right = right(column.type) or (may_be_null and types.is_null(column.type))
        if not is_right and (is_score or column.name in OF_IMAGE):
            raise ROWS.refusal(path, f"values of type {column.type}", column.name)
    if not is_of_its_cell(schema, path):
        raise ROWS.refusal(path, "rows of another cell")


def is_of_its_cell(schema: pa.Schema, path: Path) -> bool:
    """Whether a file is of the cell in whose folder it lies, as far as it says."""
    cell = about_of(schema, path).get("cell")
    return not isinstance(cell, dict) or cell.get("run_id", path.parent.name) == path.parent.name


def _opened(path: Path, use: Callable[[Any], T]) -> T:
    """What a library reads of a file: NoFile where it is gone by now, a UserError where it is not
    one; every page has a checksum of its own."""
    from pyarrow.parquet import ParquetFile

    ROWS.check(path)
    with ROWS.reading(path), ParquetFile(path, page_checksum_verification=True) as file:
        return use(file)


def schema_of(path: Path) -> pa.Schema:
    return _opened(path, lambda file: file.schema_arrow)


def read_table(path: Path, columns: Sequence[str] | None) -> pa.Table:
    """Columns of a file, all of which it has."""
    return _opened(path, lambda file: file.read(columns, use_threads=False))


def read_pictures(path: Path, row: int) -> tuple[int, pa.Table]:
    """The pictures of the row group that holds a row, and that group's first row."""

    def read(file: Any) -> tuple[int, pa.Table]:
        names = [column.name for column in file.schema_arrow if is_picture(column)]
        first = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if row < first + count:
                return first, file.read_row_group(group, names, use_threads=False)
            first += count
        raise ValueError(f"no row {row}")

    return _opened(path, read)


def joined_schema(paths: Sequence[Path]) -> pa.Schema:
    """The columns of several files, and what they say of their cell."""
    import pyarrow as pa

    schemas = [schema_of(path) for path in paths]
    abouts = [about_of(schema, path) for schema, path in zip(schemas, paths, strict=True)]
    about = {key: value for each in abouts for key, value in each.items()}
    about["code"] = {digest: of for each in abouts for digest, of in each.get("code", {}).items()}
    bare = [schema.remove_metadata() for schema in schemas]
    whole = pa.unify_schemas(bare, promote_options="permissive")
    return whole.with_metadata({ABOUT: json.dumps(about)})


# pictures as columns ------------------------------------------------------------------------------


def is_picture(column: pa.Field) -> bool:
    return bool(column.metadata and b"shape" in column.metadata)


def picture_layout(schema: pa.Schema) -> tuple[Any, ...]:
    """What the pictures of two files must have in common to stand in one."""
    known = (b"shape", b"dtype", b"scale", b"same")
    pictures = [column for column in schema if is_picture(column)]
    return tuple((c.name, *(c.metadata.get(key) for key in known)) for c in pictures)


def packed(
    ids: Iterable[str], groups: Sequence[Pictures]
) -> dict[str, tuple[Any, dict[str, str] | None]]:
    """The columns of pictures of these images, each with its field's metadata."""
    import pyarrow as pa

    if not groups:
        return {}
    arrays = [{name: t.cpu().numpy() for name, t in tensors.items()} for _, tensors in groups]
    pictured = {image_id for names, _ in groups for image_id in names}
    columns: dict[str, tuple[Any, dict[str, str] | None]] = {
        "has_picture": (pa.array([image_id in pictured for image_id in ids]), None)
    }
    for name in dict.fromkeys(name for of_group in arrays for name in of_group):
        parts = [of_group[name] for of_group in arrays if name in of_group]
        metadata = {"shape": json.dumps(parts[0].shape[1:]), "dtype": str(parts[0].dtype)}
        for other in ("plain", "input") if name == "target" else ():
            theirs = [of_group[other] for of_group in arrays if other in of_group]
            if len(parts) == len(theirs) == len(arrays) and all(map(_same_bits, parts, theirs)):
                metadata["same"] = other
                break
        if "same" in metadata:
            columns[name] = pa.nulls(len(columns["has_picture"][0])), metadata
            continue
        if name != "images" and parts[0].dtype == np.float32:
            with np.errstate(invalid="ignore"):  # of what is no number
                small = [np.clip(np.round(p * np.float32(255)), 0, 255).astype("u1") for p in parts]
            again = [values.astype(np.float32) / np.float32(255) for values in small]
            if all(map(_same_bits, again, parts)):
                parts, metadata = small, {**metadata, "dtype": "uint8", "scale": "1/255"}
        having = [names for (names, _), known in zip(groups, arrays, strict=True) if name in known]
        cells = {
            image_id: part[at].tobytes()
            for names, part in zip(having, parts, strict=True)
            for at, image_id in enumerate(names)
        }
        size = int(np.prod(parts[0].shape[1:])) * parts[0].dtype.itemsize
        columns[name] = pa.array([cells.get(n) for n in ids], pa.binary(size)), metadata
    return columns


def _same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and one.tobytes() == other.tobytes()


def unpacked(table: pa.Table, at: int) -> dict[str, Tensor]:
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
        values = np.frombuffer(cell, known["dtype"]).reshape(json.loads(known["shape"]))
        tensor = torch.from_numpy(values.copy())
        tensors[name] = tensor.float() / 255 if "scale" in known else tensor
    return {**tensors, **{name: tensors[other] for name, other in same.items() if other in tensors}}
