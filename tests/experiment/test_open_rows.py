"""Rows are read while a run replaces their files: what is read is one file, never half of two."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mjp_privacy.experiment.compaction import compact_cell, take_out
from mjp_privacy.experiment.open_rows import Replaced, open_rows
from mjp_privacy.experiment.part_file import PartGone, PartTable
from mjp_privacy.experiment.row_columns import CELL_COLUMNS, ROW_COLUMNS

from mjp_privacy.experiment import row_files
from mjp_privacy.experiment.store import RunStore

Read = Callable[[RunStore], set[str]]


def rows_of(images: list[str]) -> pd.DataFrame:
    shared = dict.fromkeys((*ROW_COLUMNS, *CELL_COLUMNS), "same") | {"dal_lambda": 0.0}
    rows = [shared | {"image_id": image, "value": 1.0, "status": "ok"} for image in images]
    return pd.DataFrame(rows)


def many(letter: str, count: int) -> list[str]:
    """So different names that the two files differ in size and layout."""
    return [f"{letter}{number * 7919:06d}" for number in range(count)]


def images_of_table(store: RunStore) -> set[str]:
    return {*store.score_table("cell")[0].images.ids}


def images_of_units(store: RunStore) -> set[str]:
    return {*store._block_of("cell")}


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    made = RunStore(tmp_path)
    made.write_rows("cell", 0, rows_of(many("a", 400)))
    return made


@pytest.mark.parametrize("read", [images_of_table, images_of_units])
def test_a_block_is_replaced_when_its_metadata_were_read(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, read: Read
) -> None:
    before, after = {*many("a", 400)}, {*many("b", 3)}
    assert read(store) == before
    replaced: list[str] = []

    def replace() -> None:
        if not replaced:
            replaced.append("once")
            store.write_rows("cell", 0, rows_of(sorted(after)))

    original, metadata = pq.ParquetFile.__init__, pq.read_metadata

    def opened(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        replace()

    def metadata_read(*args: Any, **options: Any) -> Any:
        known = metadata(*args, **options)
        replace()
        return known

    monkeypatch.setattr(pq.ParquetFile, "__init__", opened)
    monkeypatch.setattr(pq, "read_metadata", metadata_read)
    assert read(store) == before
    assert replaced
    monkeypatch.undo()
    store.write_rows("cell", 0, rows_of(sorted(after)))
    assert read(store) == after


@pytest.fixture
def part_of_two(store: RunStore) -> Path:
    """The one file of the store's rows: its block and another one, compacted."""
    store.write_rows("cell", 1, rows_of(many("b", 3)))
    compact_cell(store, "cell", fewest_files=1)
    [path] = row_files.part_files(store.rows_folder("cell"))
    return path


def test_a_part_that_is_written_again_is_another_one(store: RunStore, part_of_two: Path) -> None:
    part, later = PartTable(part_of_two), PartTable(part_of_two)
    assert len(part.images.ids) == 403
    take_out(store, "cell", part_of_two, blocks=[1])
    with pytest.raises(PartGone, match="went or was replaced"):
        later.column("same", "same")
    assert images_of_table(store) == {*many("a", 400)}


def test_a_folder_whose_part_is_written_again_is_read_again(
    store: RunStore, part_of_two: Path
) -> None:
    times: list[PartTable] = []

    def read(parts: list[Path], blocks: list[Path]) -> set[str]:
        assert (parts, blocks) == ([part_of_two], [])
        times.append(PartTable(part_of_two))
        if len(times) == 1:
            take_out(store, "cell", part_of_two, blocks=[1])
        return {*times[-1].images.ids}

    whole = row_files.settled(store.rows_folder("cell"), row_files.NOTHING, read)
    assert whole == {*many("a", 400)}
    assert len(times) == 2


def test_the_blocks_of_a_folder_are_looked_up_again_if_a_part_is_written_meanwhile(
    store: RunStore, part_of_two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, times = PartTable.image_rows, []

    def replaced_before(self: PartTable, columns: Any) -> Any:
        times.append(self.path)
        if len(times) == 1:
            take_out(store, "cell", part_of_two, blocks=[1])
        return original(self, columns)

    monkeypatch.setattr(PartTable, "image_rows", replaced_before)
    assert images_of_units(store) == {*many("a", 400)}
    assert len(times) == 2


def test_a_stale_handle_of_a_network_file_system_is_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows_of(["a"]).to_parquet(path)
    with pytest.raises(Replaced), open_rows(path):
        raise OSError(errno.ESTALE, "Stale file handle")
    with pytest.raises(OSError, match="disk error"), open_rows(path):
        raise OSError(errno.EIO, "disk error")


def test_words_that_a_file_lacks_are_no_error(store: RunStore) -> None:
    path = store.rows_path("cell", 0)
    with open_rows(path, words=("image_id", "no_such_column")) as file:
        assert pa.types.is_dictionary(file.read(["image_id"])["image_id"].type)
