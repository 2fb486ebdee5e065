"""Many block files become one part: the same rows, each once, whenever it is killed."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mjp_privacy.experiment.compaction import compact, compact_cell
from mjp_privacy.experiment.finished import Finished
from mjp_privacy.experiment.part_file import PartTable
from mjp_privacy.experiment.row_columns import CELL_COLUMNS, ROW_COLUMNS

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import row_files
from mjp_privacy.experiment.store import RunStore

METRICS = (("psnr", "standard"), ("psnr", "paper"), ("zero_rows", "diagnostic"))


def block_rows(values: dict[str, float], status: str = "ok", code: str = "c0") -> pd.DataFrame:
    """The rows of some images; those that failed have no diagnostics."""
    shared = dict.fromkeys((*ROW_COLUMNS, *CELL_COLUMNS), "same") | {"dal_lambda": np.nan}
    rows = [
        shared
        | {"image_id": image, "metric": metric, "variant": variant, "value": value + at}
        | {"status": status, "reason": "" if status == "ok" else "broke", "code": code}
        | {"group": image[:1], "seed": 3}
        for image, value in values.items()
        for at, (metric, variant) in enumerate(METRICS)
        if status == "ok" or variant != "diagnostic"
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """Three blocks, the last of which failed."""
    made = RunStore(tmp_path)
    made.write_rows("cell", 0, block_rows({"b1": 1.0, "a1": np.inf}))
    made.write_rows("cell", 1, block_rows({"a2": 1 / 3, "c": -0.0}, code="c1"))
    made.write_rows("cell", 2, block_rows({"d": np.nan}, "failed"))
    return made


def files(store: RunStore) -> list[str]:
    return [path.name for path in store.row_files("cell")]


def psnr(store: RunStore) -> dict[str, float]:
    """What a report reads: PSNR by image, which must be what the rows say."""
    table, _ = store.score_table("cell")
    column = table.column("psnr", "standard")
    assert column is not None
    rows = store.read_rows("cell")
    assert not rows.duplicated(["image_id", "metric", "variant"]).any()
    rows = rows[(rows["metric"] == "psnr") & (rows["variant"] == "standard")]
    read = dict(zip(rows["image_id"], rows["value"], strict=True))
    found = {table.images.ids[at]: v for at, v in zip(column.at, column.values, strict=True)}
    assert found == pytest.approx(read, nan_ok=True)
    return found


def test_the_same_rows_come_back_in_their_order(store: RunStore) -> None:
    before = store.read_rows("cell")
    old, columns = store.score_table("cell")
    assert compact_cell(store, "cell", fewest_files=1) == 3
    assert files(store) == ["part-00000.parquet"]
    pd.testing.assert_frame_equal(store.read_rows("cell"), before)
    new, its_columns = store.score_table("cell")
    assert (new.images.ids, set(new.keys), its_columns) == (old.images.ids, set(old.keys), columns)
    for key in old.keys:
        one, other = old.column(*key), new.column(*key)
        assert one is not None
        assert other is not None
        assert one.values.tobytes() == other.values.tobytes()
        assert one.at.tolist() == other.at.tolist()
        assert one.statuses.tolist() == other.statuses.tolist()
        assert one.reasons.tolist() == other.reasons.tolist()
    assert old.codes is not None
    assert new.codes is not None
    assert old.codes.tolist() == new.codes.tolist()
    assert old.photographs is not None
    assert new.photographs is not None
    assert old.photographs.tolist() == new.photographs.tolist() == ["a", "a", "b", "c", "d"]


def test_a_part_is_an_ordinary_parquet_file(store: RunStore) -> None:
    compact_cell(store, "cell", fewest_files=1)
    rows = pd.read_parquet(store.row_files("cell")[0])
    psnrs = rows[(rows["metric"] == "psnr") & (rows["variant"] == "standard")]
    assert psnrs["image_id"].tolist() == ["a1", "a2", "b1", "c", "d"]
    assert psnrs["unit"].tolist() == [0, 1, 2, 3, 4]


def test_cells_with_few_files_are_left_as_they_are(store: RunStore) -> None:
    assert compact(store, fewest_files=4) == 0
    assert compact(store, fewest_files=3) == 1
    assert compact(store, fewest_files=1) == 0


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_killed_while_it_deletes_no_row_counts_twice(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, deleted: int
) -> None:
    before, left = psnr(store), [deleted]
    unlink = Path.unlink

    def stops(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".parquet":
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stops)
        with pytest.raises(KeyboardInterrupt):
            compact_cell(store, "cell", fewest_files=1)
    assert len(files(store)) == 4 - deleted
    assert psnr(store) == pytest.approx(before, nan_ok=True)
    assert compact_cell(store, "cell", fewest_files=1) > 0
    assert psnr(store) == pytest.approx(before, nan_ok=True)
    assert len(files(store)) == 1


def test_a_block_that_is_done_again_replaces_its_images(store: RunStore) -> None:
    compact_cell(store, "cell", fewest_files=1)
    store.merge_rows("cell", 2, [block_rows({"d": 4.0})], ["d"])
    store.merge_rows("cell", 1, [block_rows({"a2": 7.0}, "failed")], ["a2", "c"])
    expected = {"a1": np.inf, "a2": 7.0, "b1": 1.0, "c": 0.0, "d": 4.0}
    assert psnr(store) == expected
    assert [unit.image_id for unit in left_of(store, 1)] == ["a2"]
    compact_cell(store, "cell", fewest_files=1)
    assert files(store) == ["part-00001.parquet"]
    assert psnr(store) == expected
    assert store.read_rows("cell")["image_id"].drop_duplicates().tolist() == [
        *("b1", "a1", "a2", "c", "d")
    ]


def left_of(store: RunStore, index: int, ids: Sequence[str] = ("a2", "c")) -> list[Any]:
    records = [SimpleNamespace(image_id=image) for image in ids]
    block: Any = SimpleNamespace(index=index, records=records)
    return list(Finished(store).left("cell", block))


def test_what_is_finished_is_known_from_parts(store: RunStore) -> None:
    compact_cell(store, "cell", fewest_files=1)
    finished = Finished(store)
    records = [SimpleNamespace(image_id=image) for image in ("a2", "d", "b1")]
    block: Any = SimpleNamespace(index=1, records=records)
    state = finished.state("cell", block, "c1")
    assert state.left == 1  # d failed
    assert state.elsewhere == {}  # b1 was made by other code and is kept where it is
    assert state.kept == {"b1": "c0"}
    assert finished.codes() == {"c0", "c1"}
    moved = Finished(store, again=True).state("cell", block, "c0")
    assert moved.elsewhere == {0: frozenset({"b1"})}
    store.drop_images(
        "cell", 0, ["b1"]
    )  # its file is gone; its new rows will count before the part


def test_of_an_image_in_two_blocks_the_later_rows_count_as_a_whole(tmp_path: Path) -> None:
    """A worker has written the new block, and the old one is not yet cleared."""
    store = RunStore(tmp_path)
    store.write_rows("cell", 0, block_rows({"x": 1.0, "y": 2.0}))
    later = block_rows({"x": 5.0})
    store.write_rows("cell", 3, later[later["variant"] != "diagnostic"])
    assert psnr(store) == {"x": 5.0, "y": 2.0}
    assert (store.read_rows("cell")["image_id"] == "x").sum() == 2  # no diagnostic of the old ones
    assert [unit.image_id for unit in left_of(store, 0, ("x", "y"))] == ["x"]
    compact_cell(store, "cell", fewest_files=1)
    assert psnr(store) == {"x": 5.0, "y": 2.0}


@pytest.mark.parametrize("listing", ["block_files", "part_files"])
def test_a_folder_that_is_compacted_while_it_is_read(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    before = psnr(store)
    listed = getattr(row_files, listing)
    calls = []

    def lists_then_compacts(folder: Path) -> list[Path]:
        paths = listed(folder)
        if not calls:
            calls.append(folder)
            compact_cell(store, "cell", fewest_files=1)
        return paths

    monkeypatch.setattr(row_files, listing, lists_then_compacts)
    assert len(store.read_rows("cell")) == 14
    calls.clear()
    assert psnr(store) == pytest.approx(before, nan_ok=True)


def test_a_part_that_goes_after_it_was_opened_is_told(store: RunStore) -> None:
    compact_cell(store, "cell", fewest_files=1)
    table, _ = row_files.score_table(store.rows_folder("cell"))
    next(store.rows_folder("cell").glob("part-*.parquet")).unlink()
    with pytest.raises(
        UserError, match=r"went or was replaced while it was read.*Give the command again"
    ):
        table.column("psnr", "standard")


def test_a_column_without_any_value_is_compacted_twice(store: RunStore) -> None:
    for block in (1, 2):
        rows = block_rows({"a2": 9.0, "c": 9.0}).assign(group=None, mode=None)
        store.write_rows("cell", block, rows)
        compact_cell(store, "cell", fewest_files=1)
    assert store.read_rows("cell")["mode"].isna().any()


def test_a_small_part_before_a_large_one_is_left(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mjp_privacy.experiment import compaction

    folder = store.rows_folder("cell")
    store.write_rows("cell", 7, block_rows({"x": 1.0}))
    compact_cell(store, "cell", fewest_files=1)
    small = next(folder.glob("part-*.parquet")).read_bytes()
    store.write_rows("cell", 7, block_rows({"x": 7.0, "y": 7.0}))
    compact_cell(store, "cell", fewest_files=1)
    newest = next(folder.glob("part-*.parquet"))
    (folder / "part-00000.parquet").write_bytes(small)  # as a kill leaves it
    if newest.name == "part-00000.parquet":
        newest = newest.rename(folder / "part-00001.parquet")
        (folder / "part-00000.parquet").write_bytes(small)
    rows = store.read_rows("cell")
    monkeypatch.setattr(compaction, "MOST_ROWS", len(rows))  # the newest part is a large one
    store.write_rows("cell", 8, block_rows({"z": 8.0}))
    compact_cell(store, "cell", fewest_files=1)
    assert psnr(store)["x"] == 7.0


def test_a_file_that_somebody_wrote_meanwhile_is_kept(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mjp_privacy.experiment import compaction

    write = compaction.write_part

    def writes_late(path: Path, *pieces: Any) -> None:
        write(path, *pieces)
        store.write_rows("cell", 1, block_rows({"a2": 9.0, "c": 9.0}))

    monkeypatch.setattr(compaction, "write_part", writes_late)
    compact_cell(store, "cell", fewest_files=1)
    assert files(store) == ["part-00000.parquet", "00001.parquet"]
    assert psnr(store)["a2"] == 9.0


def test_a_file_with_an_image_twice_is_not_compacted(store: RunStore) -> None:
    rows = block_rows({"e": 1.0})
    store.write_rows("cell", 3, pd.concat([rows, rows]))
    with pytest.raises(ValueError, match="holds an image twice"):
        compact_cell(store, "cell", fewest_files=1)
    assert len(files(store)) == 4


def test_images_that_are_kept_in_a_part_keep_their_rows_together(store: RunStore) -> None:
    """As --keep leaves a block that is done again: one of its images keeps its rows in the part."""
    compact_cell(store, "cell", fewest_files=1)
    store.merge_rows("cell", 1, [block_rows({"c": 5.0, "new": 6.0})], ["a2", "c", "new"])
    for _ in range(2):  # two files of one block, and then one part of both
        images = store.read_rows("cell")["image_id"].tolist()
        assert images == [image for image in dict.fromkeys(images) for _ in METRICS][: len(images)]
        assert {*images} == {"b1", "a1", "a2", "c", "new", "d"}
        assert psnr(store)["c"] == 5.0
        compact_cell(store, "cell", fewest_files=1)
    assert files(store) == ["part-00001.parquet"]


def part_blocks(store: RunStore) -> list[list[int]]:
    """The blocks in each part of the cell."""
    parts = store.rows_of("cell")[0]
    return [sorted({*pd.read_parquet(path, columns=["block"])["block"]}) for path in parts]


def test_parts_are_filled_to_their_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mjp_privacy.experiment import compaction

    store = RunStore(tmp_path)
    for block in range(5):
        store.write_rows("cell", block, block_rows({f"i{block}": 1.0}))  # three rows each
    monkeypatch.setattr(compaction, "MOST_ROWS", 6)
    compact_cell(store, "cell", fewest_files=1)
    assert part_blocks(store) == [[0, 1], [2, 3], [4]]
    store.write_rows("cell", 5, block_rows({"i5": 1.0}))  # half of a part is no small one
    compact_cell(store, "cell", fewest_files=1)
    assert part_blocks(store) == [[0, 1], [2, 3], [4], [5]]
    monkeypatch.setattr(compaction, "MOST_ROWS", 8)
    store.write_rows("cell", 6, block_rows({"i6": 1.0}))
    compact_cell(store, "cell", fewest_files=1)
    assert part_blocks(store) == [[0, 1], [2, 3], [4, 5], [6]]


def test_the_metric_with_most_rows_stands_first_in_a_part(store: RunStore) -> None:
    compact_cell(store, "cell", fewest_files=1)
    (path,) = store.rows_of("cell")[0]
    assert list(PartTable(path).keys) == [
        *(("psnr", "standard"), ("psnr", "paper")),
        ("zero_rows", "diagnostic"),  # the failed image has none
    ]
