"""Columns and images of stored rows that few runs have: none, one for all, some for a few."""

from pathlib import Path

import pandas as pd
import pytest
from mjp_privacy.experiment.compaction import compact_cell
from mjp_privacy.experiment.part_file import PartTable
from mjp_privacy.experiment.row_columns import CELL_COLUMNS, ROW_COLUMNS

from mjp_privacy.experiment import row_files
from mjp_privacy.experiment.store import RunStore
from tests.experiment.test_compaction import block_rows


def one_metric(values: dict[str, float], metric: str = "psnr") -> pd.DataFrame:
    rows = block_rows(values)
    rows = rows[(rows["metric"] == "psnr") & (rows["variant"] == "standard")]
    return rows.assign(metric=metric)


def scores(store: RunStore, metric: str) -> dict[str, float]:
    table, _ = store.score_table("cell")
    column = table.column(metric, "standard")
    assert column is not None
    return {table.images.ids[at]: v for at, v in zip(column.at, column.values, strict=True)}


def test_a_cell_of_a_single_metric_is_compacted(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write_rows("cell", 0, one_metric({"b": 1.0}))
    store.write_rows("cell", 1, one_metric({"a": 2.0}))
    before = store.read_rows("cell")
    assert compact_cell(store, "cell", fewest_files=1) == 2
    pd.testing.assert_frame_equal(store.read_rows("cell"), before)
    assert scores(store, "psnr") == {"a": 2.0, "b": 1.0}


def test_images_that_no_metric_has_all_of_are_each_met_once(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write_rows("cell", 0, one_metric({"a": 1.0, "b": 2.0}))
    store.write_rows("cell", 1, one_metric({"b": 3.0, "c": 4.0}, "ssim").assign(code="late"))
    store.write_rows("cell", 2, one_metric({"d": 5.0}, "ssim"))
    compact_cell(store, "cell", fewest_files=1)
    (path,) = store.row_files("cell")
    part = PartTable(path)
    rows = part.image_rows(("block", "code"))
    assert part.images.ids == ("a", "b", "c", "d")
    assert sorted(rows["image_id"]) == ["a", "b", "c", "d"]
    assert dict(zip(rows["image_id"], rows["code"], strict=True))["c"] == "late"


def test_rows_of_before_there_were_digests_of_code_are_read_from_a_part(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for block, image in enumerate("ab"):
        store.write_rows("cell", block, block_rows({image: 1.0}).drop(columns="code"))
    compact_cell(store, "cell", fewest_files=1)
    table, columns = store.score_table("cell")
    assert "code" not in columns
    assert table.codes is None
    assert table.images.ids == ("a", "b")


def test_a_part_without_its_list_of_metrics_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    block_rows({"a": 1.0}).to_parquet(path)
    with pytest.raises(ValueError, match=r"part-00000\.parquet has no list of its row groups"):
        PartTable(path)


def test_the_columns_are_those_of_the_files_and_of_the_schema_where_there_are_none(
    tmp_path: Path,
) -> None:
    store = RunStore(tmp_path)
    store.write_rows("cell", 0, block_rows({"a": 1.0}).assign(of_tomorrow="new"))
    folder = store.rows_folder("cell")
    assert "of_tomorrow" in row_files.row_columns(folder)
    assert row_files.row_columns(tmp_path / "rows" / "none") == [*ROW_COLUMNS, *CELL_COLUMNS]


def test_a_block_that_rotted_in_mid_run_is_set_aside_before_rows_are_added(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write_rows("cell", 0, block_rows({"a": 1.0, "b": 2.0}))
    path = store.rows_path("cell", 0)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    store.merge_rows("cell", 0, [block_rows({"b": 5.0})], ["a", "b"])
    assert set(store.read_rows("cell")["image_id"]) == {"b"}  # a is done again
    assert any((tmp_path / "damaged").rglob("*.parquet"))
