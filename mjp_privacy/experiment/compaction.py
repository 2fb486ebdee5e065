"""Puts the rows of finished blocks into few files: a step after a run, by one process.

    compact(RunStore(Path("results/demo")))            every cell of the folder
    compact_cell(store, "0b3a689adbb159cb")            one cell

A cell of 50,000 images has 2,500 files of 500 rows each, and opening a file takes as long as
reading ten thousand rows. Compacting writes them into one part (`part_file`), and then deletes
them, and the smaller parts that were there before. Nothing is lost if it is killed at any moment:
rows that are in a block's file and in a part count once (`row_files`), and the next call goes on. A
block that is done again afterwards gets a file of its own, whose images replace those of the part.
Once such a file is compacted too, older parts are written again without these images: were the
newer part damaged, their old rows would pass for current ones.

No other process may write rows of a cell while it is compacted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.experiment.open_rows import stamp
from mjp_privacy.experiment.part_file import (
    ENCODING,
    OWN,
    PartTable,
    part_name,
    part_number,
    write_part,
)
from mjp_privacy.experiment.row_columns import KEYS, NOT_DONE
from mjp_privacy.experiment.row_files import block_files, part_files, superseded
from mjp_privacy.experiment.score_table import Key

if TYPE_CHECKING:
    import pyarrow as pa

    from mjp_privacy.experiment.store import RunStore

FEWEST_FILES = 50
"""A cell with fewer files of blocks is left as it is: a part takes 0.3 MB however few its rows."""

MOST_ROWS = 2_000_000
"""Rows that are put together at a time, which bounds the memory (about 0.2 kB a row)."""


def compact(store: RunStore, *, fewest_files: int = FEWEST_FILES) -> int:
    """Compact every cell that has at least so many files of blocks; how many were compacted."""
    run_ids = store.stored_cells()
    return sum(compact_cell(store, run_id, fewest_files=fewest_files) > 0 for run_id in run_ids)


def compact_cell(store: RunStore, run_id: str, *, fewest_files: int = FEWEST_FILES) -> int:
    """Compact one cell; how many files of blocks were put into parts. ValueError or OSError where a
    file cannot be read or holds a row twice; nothing was then deleted."""
    folder = store.rows_folder(run_id)
    blocks = block_files(folder)
    if len(blocks) < max(1, fewest_files):
        return 0
    for files in _portions(part_files(folder), blocks):
        parts = part_files(folder)
        number = max(map(part_number, parts), default=-1) + 1
        stamps = {path: stamp(path.stat()) for path in files}
        for path in dict.fromkeys((*files, *parts)):  # damage must not get a new seal
            if store.changed(path):
                raise ValueError(f"{store.place(path)} changed after it was written")
        pictures = _pictures(store, run_id, files)
        write_part(folder / part_name(number), part_pieces(_gathered(files)), pictures)
        _drop_superseded(store, run_id, [path for path in part_files(folder) if path not in files])
        for path in files:
            if stamp(path.stat()) == stamps[path]:  # else somebody wrote it meanwhile
                path.unlink()
    return len(blocks)


def _pictures(store: RunStore, run_id: str, files: Sequence[Path]) -> dict[int, str]:
    """The digests of the pictures that the rows of these files belong to, by block."""
    pictures: dict[int, str] = {}
    for path in files:
        if path.stem.isdigit():  # its pictures are not those of a part that holds the block too
            pictures.pop(int(path.stem), None)
        pictures |= store.named_pictures(run_id, path)
    return pictures


def _drop_superseded(store: RunStore, run_id: str, parts: Sequence[Path]) -> None:
    """Leave every image in the last of these parts alone that holds it."""
    taken: set[str] = set()
    for path in reversed(parts):
        images = {*PartTable(path).images.ids}
        if again := images & taken:
            take_out(store, run_id, path, images=again)
        taken |= images


def take_out(
    store: RunStore,
    run_id: str,
    path: Path,
    blocks: Collection[int] = (),
    images: Collection[str] = (),
) -> None:
    """Write a part again without the rows of these blocks and images; it goes with its last row."""
    gathered = _gathered([path], blocks, images)
    pictures = _pictures(store, run_id, [path])
    if not gathered.length:
        path.unlink()
        return
    having = set(gathered.own["block"].tolist())
    left = {block: digest for block, digest in pictures.items() if block in having}
    write_part(path, part_pieces(gathered), left)


def _portions(parts: Sequence[Path], blocks: Sequence[Path]) -> Iterator[list[Path]]:
    """Files that become one part, in the order of what counts: last of all what counts most.

    Small parts behind the last large one are written again with the blocks; what is older stays as
    it is, for a later part counts.
    """
    from pyarrow.parquet import read_metadata

    sizes = {path: read_metadata(path).num_rows for path in (*parts, *blocks)}
    portion: list[Path] = []
    for path in parts:
        portion = [*portion, path] if sizes[path] < MOST_ROWS / 2 else []
    for path in blocks:
        if portion and sum(sizes[file] for file in portion) + sizes[path] > MOST_ROWS:
            yield portion
            portion = []
        portion.append(path)
    yield portion


# gathering ----------------------------------------------------------------------------------------


@dataclass
class Gathered:
    """Rows of many files: columns that are equal in all rows as one value, the others as arrays."""

    length: int
    equal: dict[str, pa.Scalar] = field(default_factory=dict)
    columns: dict[str, pa.ChunkedArray] = field(default_factory=dict)
    names: Sequence[str] = ()  # of all columns, in the order of the files
    own: dict[str, NDArray[np.integer]] = field(default_factory=dict)
    """`block`, `row`; `file`: the number of the file among those that were read; and `part`."""


def _gathered(
    files: Sequence[Path], without: Collection[int] = (), images: Collection[str] = ()
) -> Gathered:
    """All rows of these files, but in parts for those of the blocks and images that are named."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import ParquetFile

    tables, own = [], []
    for number, path in enumerate(files):
        whole = not path.stem.isdigit()  # a part
        with ParquetFile(path) as file:
            words = [f.name for f in file.schema_arrow if pa.types.is_string(f.type)]
        at_once = [name for name in words if not whole or name not in ENCODING]
        with ParquetFile(path, read_dictionary=at_once) as file:
            table = file.read(use_threads=False)
        for name in {*words} - {*at_once}:  # in this encoding they cannot be read as categories
            at = table.column_names.index(name)
            table = table.set_column(at, name, table[name].dictionary_encode())
        if whole and without:
            wanted = pc.invert(pc.is_in(table["block"], pa.array([*without], pa.int32())))
            table = table.filter(wanted)
        if whole and images:
            named = pc.is_in(table["image_id"].cast(pa.string()), pa.array([*images], pa.string()))
            table = table.filter(pc.invert(named))
        places = {
            "block": table["block"].to_numpy() if whole else np.full(len(table), int(path.stem)),
            "row": table["row"].to_numpy() if whole else np.arange(len(table)),
            "file": np.full(len(table), number),
            "part": np.full(len(table), whole),
        }
        own.append(places)
        tables.append(table.drop_columns([name for name in OWN if name in table.column_names]))
    joined = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    gathered = Gathered(len(joined), names=joined.column_names)
    for name in ("block", "row", "file", "part"):
        gathered.own[name] = np.concatenate([places[name] for places in own])
    for name in joined.column_names:
        _add(gathered, name, joined[name])
    return gathered


def _add(gathered: Gathered, name: str, column: pa.ChunkedArray) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in (*KEYS, "value"):
        if column.null_count == len(column):
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            kind = pa.string() if pa.types.is_null(kind) else kind
            gathered.equal[name] = pa.scalar(None, kind)
            return
        if not column.null_count and pc.all(pc.equal(column, column[0])).as_py():
            gathered.equal[name] = column[0]
            return
    gathered.columns[name] = column


# arranging ----------------------------------------------------------------------------------------


def part_pieces(gathered: Gathered) -> list[tuple[Key, pa.Table]]:
    """The rows that count, as `write_part` takes them; the metric of most images comes first."""
    rows = pd.DataFrame({name: _words(gathered, name) for name in (*KEYS, "status")})
    counting = _counting(rows, gathered.own["file"], gathered.own["part"].astype(bool))
    if rows[counting].duplicated(list(KEYS)).any():
        raise ValueError("a file holds an image twice for the same metric")
    ids = sorted(map(str, rows.loc[counting, "image_id"].unique()))
    unit = pd.Index(ids).get_indexer(rows["image_id"].astype(object)).astype(np.int32)
    failed = np.zeros(len(ids), dtype=bool)
    failed[unit[counting & rows["status"].isin(NOT_DONE).to_numpy()]] = True
    extra = {**gathered.own, "unit": unit, "done": ~failed[unit]}
    at = pd.Series(np.flatnonzero(counting))
    kinds = [rows[name].astype(object).to_numpy()[counting] for name in ("metric", "variant")]
    of_key = {key: places.to_numpy(dtype=np.int64) for key, places in at.groupby(kinds, sort=True)}
    keys = sorted(of_key, key=lambda key: (-len(of_key[key]), key != ("psnr", "standard"), key))
    return [(key, _piece(gathered, extra, of_key[key])) for key in keys]


def _counting(
    rows: pd.DataFrame, file: NDArray[np.integer], part: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Rows that count: of an image in several files those of blocks, or else of the last part."""
    counting = np.ones(len(rows), dtype=bool)
    counting[~part] = ~superseded(rows[~part], file[~part].astype(np.int64))
    if part.any():
        image, _ = pd.factorize(rows["image_id"])
        last = np.full(image.max() + 1, -1, dtype=np.int64)
        np.maximum.at(last, image[counting], file[counting])
        counting &= ~part | (file == last[image])
    return counting


def _words(gathered: Gathered, name: str) -> Any:
    if name in gathered.equal:
        return pd.Categorical([gathered.equal[name].as_py()] * gathered.length)
    return gathered.columns[name].to_pandas(strings_to_categorical=True)


def _piece(gathered: Gathered, extra: dict[str, Any], places: NDArray[np.int64]) -> pa.Table:
    """The rows of one metric, ordered by unit, as a table."""
    import pyarrow as pa

    places = places[np.argsort(extra["unit"][places], kind="stable")]
    kinds = {"block": np.int32, "row": np.int32, "unit": np.int32, "done": bool}
    columns = {name: column.take(pa.array(places)) for name, column in gathered.columns.items()}
    columns |= {name: _repeated(value, len(places)) for name, value in gathered.equal.items()}
    columns |= {name: pa.array(extra[name][places].astype(kinds[name])) for name in OWN}
    return pa.table({name: columns[name] for name in (*gathered.names, *OWN)})


def _repeated(value: pa.Scalar, times: int) -> pa.Array:
    import pyarrow as pa

    if not pa.types.is_dictionary(value.type):
        return pa.repeat(value, times)
    words = pa.array([value.as_py()], value.type.value_type)
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(times, dtype=np.int32)), words)
