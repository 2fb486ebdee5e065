"""A part: the rows of many blocks of one cell in one file, a metric after the other.

A block's file holds some 500 rows, and a million images in a hundred cells are millions of files.
A part has the same columns and four more,

    block, row  where the row stood: in which block's file, at which place in it
    unit        the place of its image among the part's images, in the order of their ids
    done        whether none of the image's rows failed

and each metric and variant has a row group of its own, ordered by unit, so that a metric of fifty
thousand images is read in a millisecond, and without their names. Other programs read the file as
any other parquet file; its metadata (`mjp_privacy.part`) list the row groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, reason
from mjp_privacy.core.sealed import write_sealed
from mjp_privacy.experiment.block_file import own_metadata
from mjp_privacy.experiment.image_names import Images
from mjp_privacy.experiment.open_rows import open_rows, stamp_and_metadata
from mjp_privacy.experiment.score_table import UNREADABLE, Column, Key
from mjp_privacy.metrics.coded import Coded

if TYPE_CHECKING:
    import pyarrow as pa

OWN = ("block", "row", "unit", "done")
"""Columns that the rows of blocks do not have."""

ENCODING = {
    "unit": "DELTA_BINARY_PACKED",
    "row": "DELTA_BINARY_PACKED",
    "image_id": "DELTA_BYTE_ARRAY",  # sorted names share most of their letters
    "group": "DELTA_BYTE_ARRAY",
    "value": "BYTE_STREAM_SPLIT",
}
"""How columns are encoded in which nearly every entry is another."""

METADATA = b"mjp_privacy.part"

PART = FileKind("the rows of many blocks", "Run the attack again, which makes them again.", 1 << 50)


def part_name(number: int) -> str:
    """The name of a part's file: part-00000.parquet."""
    return f"part-{number:05d}.parquet"


def part_number(path: Path) -> int:
    """The number in a part's name."""
    return int(path.stem.removeprefix("part-"))


def write_part(
    path: Path, pieces: Sequence[tuple[Key, Any]], pictures: Mapping[int, str] | None = None
) -> None:
    """Write a part: for every metric and variant a table ordered by unit, with equal columns.

    pictures: the digests of the files of pictures that the rows belong to, by block
    """
    from pyarrow.parquet import ParquetWriter

    schema = pieces[0][1].schema
    encoding = {name: kind for name, kind in ENCODING.items() if name in schema.names}
    layout: dict[str, Any] = {
        "use_dictionary": [name for name in schema.names if name not in encoding],
        "column_encoding": encoding,
    }
    layout["store_schema"] = False  # so that words are read as words, not as categories

    def write(temporary: Path) -> None:
        with ParquetWriter(temporary, schema, compression="zstd", **layout) as writer:
            for _, table in pieces:
                writer.write_table(table, row_group_size=len(table))
            keys = json.dumps([list(key) for key, _ in pieces])
            writer.add_key_value_metadata({METADATA.decode(): keys, **own_metadata(pictures or {})})

    write_sealed(path, write)


def part_frame(path: Path) -> tuple[pd.DataFrame, NDArray[np.int64], NDArray[np.int64]]:
    """The rows of a part as blocks had them; the block of each, and its place in that block."""
    with open_rows(path) as file:
        table = file.read()
    frame = table.drop_columns(list(OWN)).to_pandas()
    block, row = (table[name].to_numpy().astype(np.int64) for name in ("block", "row"))
    return frame, block, row


class PartGone(UserError, FileNotFoundError):
    """A file of rows that was there a moment ago, and is not, or is another one by now."""


def gone(path: Path) -> PartGone:
    """The error of a file of rows that went, or was replaced, while it was read."""
    return PartGone(
        f"{path} went or was replaced while it was read: expected a run folder that stays as it "
        "is, but a run that ends there put its rows into other files. Give the command again."
    )


class PartTable:
    """The rows of a part, read when they are asked for: PartTable(path).column("psnr", "paper")."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = stamp_and_metadata(path)
        self._metadata = self._file[1]
        stored = (self._metadata.metadata or {}).get(METADATA)
        if stored is None:
            raise ValueError(f"{path.name} has no list of its row groups")
        self.keys: Sequence[Key] = [(metric, variant) for metric, variant in json.loads(stored)]
        if len(self.keys) != self._metadata.num_row_groups:
            raise ValueError(f"{path.name} lists other row groups than it has")
        self.twice = None  # whoever wrote the part saw to it
        self.columns = frozenset(self._metadata.schema.names) - {*OWN}

    @cached_property
    def _known(self) -> _Known:
        import pyarrow.compute as pc

        rows = self._image_table(("status", "reason", "group", "code"))
        lost = rows.filter(pc.equal(rows["status"], UNREADABLE)).to_pandas()
        return _Known(
            Images.of_column(_whole(rows["image_id"])),
            _photographs(rows),
            _words(rows, "code"),
            dict(zip(lost["image_id"], lost["reason"].astype(object).fillna(""), strict=True)),
        )

    def image_rows(self, columns: Sequence[str]) -> pd.DataFrame:
        """A row for each image in the order of its unit: its id, and what its first row says."""
        rows = self._image_table(columns).to_pandas()
        return rows.astype(dict.fromkeys(rows.columns.drop("unit"), object))

    def _image_table(self, columns: Sequence[str]) -> pa.Table:
        """Row groups are read until all images were met; the first of a run's has all of them."""
        import pyarrow as pa

        wanted = ["unit", "image_id", *(n for n in columns if n in self.columns or n in OWN)]
        tables: list[pa.Table] = []
        met = np.zeros(self._count, dtype=bool)
        for group in range(len(self.keys)):
            table = self._read(group, wanted)
            unit = table["unit"].to_numpy()
            tables.append(table if not met.any() else table.filter(pa.array(~met[unit])))
            met[unit] = True
            if met.all():
                break
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables(tables).unify_dictionaries().sort_by("unit")

    @cached_property
    def _count(self) -> int:
        """The number of images: the statistics of each row group hold its largest unit."""
        at = self._metadata.schema.names.index("unit")
        groups = range(self._metadata.num_row_groups)
        largest = [self._metadata.row_group(g).column(at).statistics.max for g in groups]
        return int(max(largest)) + 1

    @property
    def images(self) -> Images:
        """All images with rows."""
        return self._known.images

    @property
    def photographs(self) -> Coded | None:
        """The photograph that each image was cut from; None where each is its own."""
        return self._known.photographs

    @property
    def codes(self) -> Coded | None:
        """The digest of the code that made each image."""
        return self._known.codes

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why images could not be read, by their id."""
        return self._known.unreadable

    def column(self, metric: str, variant: str) -> Column | None:
        """The rows of one metric; None where it was not computed."""
        if (metric, variant) not in self.keys:
            return None
        group = self.keys.index((metric, variant))
        count = self._metadata.row_group(group).num_rows
        words = {name: self._only_word(group, name) for name in ("status", "reason")}
        different = [name for name, word in words.items() if word is None]
        every = count == self._count
        table = self._read(group, ["value", *([] if every else ["unit"]), *different])
        statuses, reasons = (
            _coded(table[name]) if word is None else Coded.equal_words(word, count)
            for name, word in words.items()
        )
        at = self.images.everywhere if every else table["unit"].to_numpy()
        return Column(at, table["value"].to_numpy(), statuses, reasons)

    def words(self, name: str) -> Iterator[tuple[NDArray[np.integer], Coded]]:
        """What rows say in a column of words, metric by metric: their units and their words. Where
        all rows of a metric say nothing it is left out, unread."""
        for group in range(len(self.keys)):
            if self._only_word(group, name) != "":
                table = self._read(group, ["unit", name])
                yield table["unit"].to_numpy(), _coded(table[name])

    def _only_word(self, group: int, name: str) -> str | None:
        """The word that stands in all rows of a row group, by its statistics; None: they differ."""
        at = self._metadata.schema.names.index(name)
        known = self._metadata.row_group(group).column(at).statistics
        if known is None or not known.has_null_count:
            return None
        if known.null_count == self._metadata.row_group(group).num_rows:
            return ""
        same = not known.null_count and known.has_min_max and known.min == known.max
        return str(known.min) if same else None

    def _read(self, group: int, columns: Sequence[str]) -> Any:
        words = [name for name in columns if name in ("status", "reason", "code")]
        try:
            with open_rows(self.path, words, known=self._file) as file:
                return file.read_row_group(group, columns=list(columns), use_threads=False)
        except FileNotFoundError as error:
            raise gone(self.path) from error
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise PART.refusal(self.path, reason(error)) from error


class _Known(NamedTuple):
    """What a part says of its images."""

    images: Images
    photographs: Coded | None
    codes: Coded | None
    unreadable: Mapping[str, str]


def _photographs(rows: pa.Table) -> Coded | None:
    import pyarrow.compute as pc

    if "group" not in rows.column_names:
        return None
    said = pc.coalesce(rows["group"], rows["image_id"])
    return None if pc.all(pc.equal(said, rows["image_id"])).as_py() else _coded(said)


def _words(rows: pa.Table, name: str) -> Coded | None:
    if name not in rows.column_names or rows[name].null_count == len(rows):
        return None
    return _coded(rows[name])


def _whole(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _coded(column: pa.ChunkedArray) -> Coded:
    """A column of words; a missing one is "" ."""
    import pyarrow as pa

    whole = _whole(column)
    whole = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    words = ["" if word is None else word for word in whole.dictionary.to_pylist()]
    codes = whole.indices
    if codes.null_count:
        codes = codes.fill_null(len(words))
        words.append("")
    different = sorted(set(words))
    at = {word: code for code, word in enumerate(different)}
    place = np.array([at[word] for word in words] or [0], dtype=np.int32)
    return Coded(place[codes.to_numpy()], tuple(different))
