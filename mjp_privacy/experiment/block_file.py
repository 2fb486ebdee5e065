"""One file of a run's rows: parquet, a row for each image, its pictures as columns of bytes.

    packed(ids, pictures)              the columns of pictures, as small as they are without loss
    write_file(path, schema, pieces)   a table in pieces, with checksums of its pages
    BlockContent.of(path)              its images and columns, or a UserError in one line
    unpacked(read_pictures(path, group), 3)   the tensors of the fourth image of a row group

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

Pictures = Mapping[str, Mapping[str, "Tensor"]]
"""The tensors to store of images, by their ids and names."""
T = TypeVar("T")


def by_image(ids: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The pictures of these images, whose tensors are (m, ...)."""
    return {name: {key: of[at] for key, of in tensors.items()} for at, name in enumerate(ids)}


class BlockContent(NamedTuple):
    """What is known of a file once it was opened."""

    ids: list[str]  # its images, all of them
    has_picture: list[bool]  # which of them have pictures
    columns: tuple[str, ...]  # without pictures
    groups: tuple[int, ...]  # the rows of each row group

    @classmethod
    def of(cls, path: Path) -> BlockContent:
        """Read it; a UserError where it is no file of a block, or of another cell."""

        def read(file: Any) -> tuple[pa.Schema, pa.Table, tuple[int, ...]]:
            schema, groups = file.schema_arrow, range(file.num_row_groups)
            names = [name for name in ("image_id", "has_picture") if name in schema.names]
            sizes = tuple(file.metadata.row_group(group).num_rows for group in groups)
            return schema, file.read(names, use_threads=False), sizes

        schema, table, groups = _opened(path, read)
        _check_columns(schema, path)
        ids = table["image_id"].to_pylist()
        if None in ids or len(set(ids)) < len(ids):
            raise ROWS.refusal(path, "an image twice, or one without a name", "image_id")
        known = "has_picture" in table.column_names
        has = table["has_picture"].to_pylist() if known else [False] * len(ids)
        columns = tuple(column.name for column in schema if not is_picture(column))
        return cls(ids, has, columns, groups)


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


def about_of(schema: pa.Schema, path: Path) -> dict[str, Any]:
    """What a file says of its cell, its code and its machine."""
    with ROWS.reading(path):
        about = json.loads((schema.metadata or {}).get(ABOUT, b"{}"))
    return about if isinstance(about, dict) else {}


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


def _opened(path: Path, use: Callable[[Any], T]) -> T:
    """What a library reads of a file: NoFile where it is gone by now, a UserError where it is not
    one; every page has a checksum of its own."""
    from pyarrow.parquet import ParquetFile

    ROWS.check(path)
    with ROWS.reading(path), ParquetFile(path, page_checksum_verification=True) as file:
        return use(file)


def schema_of(path: Path) -> pa.Schema:
    """The columns of a file, pictures among them."""
    return _opened(path, lambda file: file.schema_arrow)


def read_table(path: Path, columns: Sequence[str] | None) -> pa.Table:
    """Columns of a file, all of which it has; None: all."""
    return _opened(path, lambda file: file.read(columns, use_threads=False))


def read_pictures(path: Path, group: int) -> pa.Table:
    """The pictures of a row group."""

    def read(file: Any) -> pa.Table:
        names = [column.name for column in file.schema_arrow if is_picture(column)]
        return file.read_row_group(group, names, use_threads=False)

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
    """Whether a column holds pictures."""
    return bool(column.metadata and b"shape" in column.metadata)


def picture_layout(schema: pa.Schema) -> tuple[Any, ...]:
    """What the pictures of two files must have in common to stand in one."""
    known = (b"shape", b"dtype", b"scale", b"same")
    pictures = [column for column in schema if is_picture(column)]
    return tuple((c.name, *(c.metadata.get(key) for key in known)) for c in pictures)


def packed(ids: Sequence[str], pictures: Pictures) -> dict[str, tuple[Any, dict[str, str] | None]]:
    """The columns of pictures of these images, each with its field's metadata."""
    import pyarrow as pa

    if not pictures:
        return {}
    columns: dict[str, tuple[Any, dict[str, str] | None]] = {
        "has_picture": (pa.array([image_id in pictures for image_id in ids]), None)
    }
    arrays = {
        image_id: {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        for image_id, tensors in pictures.items()
    }
    for name in dict.fromkeys(name for own in arrays.values() for name in own):
        cells = {image_id: own[name] for image_id, own in arrays.items() if name in own}
        first = next(iter(cells.values()))
        metadata = {"shape": json.dumps(first.shape), "dtype": str(first.dtype)}
        for other in ("plain", "input") if name == "target" else ():
            pairs = [(own.get(name), own.get(other)) for own in arrays.values()]
            if all(_same_bits(one, two) for one, two in pairs):
                metadata["same"] = other
                break
        if "same" in metadata:
            columns[name] = pa.nulls(len(ids)), metadata
            continue
        if name != "images" and first.dtype == np.float32:
            with np.errstate(invalid="ignore"):  # of what is no number
                small = {
                    image_id: np.clip(np.round(values * np.float32(255)), 0, 255).astype("u1")
                    for image_id, values in cells.items()
                }
            again = {n: values.astype(np.float32) / np.float32(255) for n, values in small.items()}
            if all(_same_bits(again[n], values) for n, values in cells.items()):
                cells, metadata = small, {**metadata, "dtype": "uint8", "scale": "1/255"}
        contents = [cells[n].tobytes() if n in cells else None for n in ids]
        size = next(iter(cells.values())).nbytes
        columns[name] = pa.array(contents, pa.binary(size)), metadata
    return columns


def _same_bits(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return False
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
