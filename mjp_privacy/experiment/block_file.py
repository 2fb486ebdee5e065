"""One file of a run's rows: parquet, a row for each image, its pictures as columns of bytes.

    write_file(path, schema, pieces)          a table in pieces, with checksums of its pages
    BlockContent.of(path)                     its images and columns, or a UserError in one line
    unpacked(read_pictures(path), 3)          the tensors of its fourth image

`images`, the reconstructions, are float32 in [0, 1]. A picture's field has metadata: shape and
dtype, or the name of another one that it equals, as a target does. Private pictures are compressed:
they have few values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mjp_privacy.core.read import FileKind

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

OF_IMAGE = ("image_id", "block", "status", "reason", "code", "group", "label_source")
"""Columns without which a file is none of a run; its digests and labels stand beside them."""
ABOUT = b"mjp_privacy"  # key of a file's metadata: the cell, the code, the machine, as JSON

ROWS = FileKind("a run's rows", "Run the attack again, which makes them again.", 1 << 50)

Pictures = Mapping[str, Mapping[str, "Tensor"]]
"""The tensors to store of images, by their ids and names."""


def by_image(ids: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The pictures of these images, whose tensors are (m, ...)."""
    return {name: {key: of[at] for key, of in tensors.items()} for at, name in enumerate(ids)}


class BlockContent(NamedTuple):
    """What is known of a file once it was opened."""

    ids: list[str]  # its images, all of them
    has_picture: list[bool]  # which of them have pictures
    schema: pa.Schema
    about: dict[str, Any]  # of its cell, its code and its machine

    @property
    def columns(self) -> list[str]:
        """The names of all but pictures."""
        return [column.name for column in self.schema if not is_picture(column)]

    @property
    def compared(self) -> bool:
        """Whether its pictures were compared with their uploads by gradient, if that was possible;
        of an earlier version's file a column says it."""
        seen = "gradient_residual.diagnostic" in self.schema.names or not any(self.has_picture)
        return bool(self.about.get("compared", seen))

    @classmethod
    def of(cls, path: Path) -> BlockContent:
        """Read it; a UserError where it is no file of a block, or of another cell."""
        from pyarrow import types

        about = about_of(path)
        with opened(path) as file:
            schema = file.schema_arrow
            names = [name for name in ("image_id", "has_picture") if name in schema.names]
            table = file.read(names, use_threads=False)
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
        ids = table["image_id"].to_pylist()
        if None in ids or len(set(ids)) < len(ids):
            raise ROWS.refusal(path, "an image twice, or one without a name", "image_id")
        ids = list(map(sys.intern, ids))  # most cells have the same
        known = "has_picture" in table.column_names
        has = table["has_picture"].to_pylist() if known else [False] * len(ids)
        return cls(ids, has, schema, about)


def about_of(path: Path) -> dict[str, Any]:
    """What a file says of its cell, its code and its machine; a UserError where that cell is
    another one than the folder's."""
    with opened(path) as file:
        said = json.loads((file.schema_arrow.metadata or {}).get(ABOUT, b"{}"))
    about = said if isinstance(said, dict) else {}
    cell = about.get("cell")
    if isinstance(cell, dict) and cell.get("run_id", path.parent.name) != path.parent.name:
        raise ROWS.refusal(path, "rows of another cell")
    return about


def write_file(path: Path, schema: pa.Schema, pieces: Iterable[pa.Table]) -> None:
    """Write a table in pieces, which may lack columns of the schema."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    layout: dict[str, Any] = {
        "compression": {n: "NONE" if n == "images" else "ZSTD" for n in schema.names},
        "use_dictionary": [c.name for c in schema if pa.types.is_string(c.type)],
        "write_statistics": [column.name for column in schema if not is_picture(column)],
        "write_page_checksum": True,
    }
    whole = pa.concat_tables([schema.empty_table(), *pieces], promote_options="permissive")
    with ParquetWriter(path, schema, **layout) as writer:
        writer.write_table(whole)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file for pyarrow's calls: NoFile where it is gone by now, a UserError where it is not one;
    every page has a checksum of its own."""
    from pyarrow.parquet import ParquetFile

    ROWS.check(path)
    with ROWS.reading(path), ParquetFile(path, page_checksum_verification=True) as file:
        yield file


def read_table(path: Path, columns: Sequence[str] | None) -> pa.Table:
    """Columns of a file, all of which it has; None: all."""
    with opened(path) as file:
        return file.read(columns, use_threads=False)


def read_pictures(path: Path) -> pa.Table:
    """The columns of a file's pictures."""
    with opened(path) as file:
        names = [column.name for column in file.schema_arrow if is_picture(column)]
        return file.read(names, use_threads=False)


def joined_schema(contents: Sequence[BlockContent]) -> pa.Schema:
    """The columns of several files, and what they say of their cell."""
    import pyarrow as pa

    about = {key: value for each in contents for key, value in each.about.items()}
    codes = [each.about.get("code", {}) for each in contents]
    about["compared"] = all(each.compared for each in contents)
    about["code"] = {digest: files for code in codes for digest, files in code.items()}
    bare = [each.schema.remove_metadata() for each in contents]
    whole = pa.unify_schemas(bare, promote_options="permissive")
    return whole.with_metadata({ABOUT: json.dumps(about)})


# pictures as columns ------------------------------------------------------------------------------


def is_picture(column: pa.Field) -> bool:
    return bool(column.metadata and b"shape" in column.metadata)


def picture_layout(schema: pa.Schema) -> tuple[Any, ...]:
    """What the pictures of two files must have in common to stand in one."""
    return tuple((c.name, *sorted(c.metadata.items())) for c in schema if is_picture(c))


def with_pictures(table: pa.Table, ids: Sequence[str], pictures: Pictures) -> pa.Table:
    """The table of these images with the columns of their pictures."""
    import pyarrow as pa

    if pictures:
        table = table.append_column("has_picture", [[image_id in pictures for image_id in ids]])
    bits: dict[str, list[bytes | None]] = {}
    for name in sorted({name for own in pictures.values() for name in own}):
        own = {key: of[name].cpu().numpy() for key, of in pictures.items() if name in of}
        first = next(iter(own.values()))
        bits[name] = [own[image_id].tobytes() if image_id in own else None for image_id in ids]
        metadata = {"shape": json.dumps(first.shape), "dtype": str(first.dtype)}
        values = pa.array(bits[name], pa.binary(first.nbytes))
        for other in ("plain", "input") if name == "target" else ():
            if bits.get(other) == bits[name]:
                values, metadata = pa.nulls(len(ids)), {"shape": "[]", "same": other}
        table = table.append_column(pa.field(name, values.type, metadata=metadata), values)
    return table


def unpacked(table: pa.Table, at: int) -> dict[str, Tensor]:
    """The tensors of the row at this place, bit for bit as they were written."""
    import torch

    tensors: dict[str, Tensor] = {}
    for name in table.column_names:
        source = (table.schema.field(name).metadata.get(b"same") or name.encode()).decode()
        known, cell = table.schema.field(source).metadata, table[source][at].as_buffer()
        if cell is not None:  # else others of the block have it
            values = np.frombuffer(cell, known[b"dtype"].decode())
            tensors[name] = torch.from_numpy(values.reshape(json.loads(known[b"shape"])).copy())
    return tensors
