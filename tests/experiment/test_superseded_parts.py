"""An older part never brings back rows that a newer one has replaced."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from mjp_privacy.experiment.compaction import compact_cell
from mjp_privacy.experiment.damage import find_damage
from mjp_privacy.experiment.part_file import PartTable

from mjp_privacy.experiment import compaction
from mjp_privacy.experiment.store import RunStore
from tests.experiment.test_compaction import block_rows, psnr

OLD, NEW = {"a": 1.0, "b": 2.0}, {"a": 11.0}


def own_rows(values: dict[str, float]) -> pd.DataFrame:
    """Rows of some images of the cell in which these tests write."""
    return block_rows(values).assign(run_id="cell")


def images_of(store: RunStore) -> list[list[str]]:
    """The images in each part, the earliest first."""
    return [list(PartTable(path).images.ids) for path in store.rows_of("cell")[0]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """A large part of two blocks; one image of the first block was done again."""
    monkeypatch.setattr(compaction, "MOST_ROWS", 12)
    made = RunStore(tmp_path)
    made.write_rows("cell", 0, own_rows(OLD))
    made.write_rows("cell", 1, own_rows({"c": 3.0, "d": 4.0}))
    compact_cell(made, "cell", fewest_files=1)
    made.write_rows("cell", 0, own_rows(NEW))
    return made


def shown(store: RunStore) -> dict[str, float]:
    """What a report that examined the folder first reads."""
    rows = store.read_rows("cell", find_damage(store).left_out("cell"))
    rows = rows[(rows["metric"] == "psnr") & (rows["variant"] == "standard")]
    return dict(zip(rows["image_id"], rows["value"], strict=True))


def test_a_damaged_newer_part_brings_no_older_rows_back(store: RunStore) -> None:
    compact_cell(store, "cell", fewest_files=1)
    assert images_of(store) == [["b", "c", "d"], ["a"]]
    assert psnr(store) == {"a": 11.0, "b": 2.0, "c": 3.0, "d": 4.0}
    newer = store.rows_of("cell")[0][1]
    content = bytearray(newer.read_bytes())
    content[60] ^= 4
    newer.write_bytes(content)
    assert [fault.path for fault in find_damage(store).faults] == [newer]
    assert shown(store) == {"b": 2.0, "c": 3.0, "d": 4.0}
    newer.unlink()
    assert shown(store) == {"b": 2.0, "c": 3.0, "d": 4.0}


def test_a_part_of_superseded_rows_alone_goes(store: RunStore) -> None:
    store.write_rows("cell", 0, own_rows(dict.fromkeys("abcd", 20.0)))
    compact_cell(store, "cell", fewest_files=1)
    assert images_of(store) == [["a", "b", "c", "d"]]
    assert set(psnr(store).values()) == {20.0}


@pytest.mark.parametrize("killed_in", ["write_part", "take_out"])
def test_killed_at_any_moment_no_row_is_lost_and_none_comes_back(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    do = getattr(compaction, killed_in)

    def does_and_dies(*arguments: object, **named: object) -> None:
        if killed_in == "write_part":
            do(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compaction, killed_in, does_and_dies)
        with pytest.raises(KeyboardInterrupt):
            compact_cell(store, "cell", fewest_files=1)
    expected = {"a": 11.0, "b": 2.0, "c": 3.0, "d": 4.0}
    assert psnr(store) == expected
    compact_cell(store, "cell", fewest_files=1)
    assert psnr(store) == expected
    assert images_of(store) == [["b", "c", "d"], ["a"]]


def test_parts_that_an_earlier_version_left_are_mended_by_the_next_compaction(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compaction, "_drop_superseded", lambda *_: None)
        compact_cell(store, "cell", fewest_files=1)
    assert images_of(store) == [["a", "b", "c", "d"], ["a"]]
    store.write_rows("cell", 2, own_rows({"e": 5.0}))
    compact_cell(store, "cell", fewest_files=1)
    assert images_of(store) == [["b", "c", "d"], ["a", "e"]]


def test_a_damaged_older_part_gets_no_new_seal(store: RunStore) -> None:
    (older,) = store.rows_of("cell")[0]
    content = bytearray(older.read_bytes())
    content[60] ^= 4
    older.write_bytes(content)
    with pytest.raises(ValueError, match=r"part-00000\.parquet changed after it was written"):
        compact_cell(store, "cell", fewest_files=1)
    assert older.read_bytes() == content
    assert len(store.row_files("cell")) == 2


def test_pictures_of_a_block_stay_named_by_what_is_left_of_it(store: RunStore) -> None:
    digest = "0" * 63 + "1"
    (older,) = store.rows_of("cell")[0]
    rows = compaction.part_pieces(compaction._gathered([older]))
    compaction.write_part(older, rows, {0: digest, 1: digest})
    store.write_rows("cell", 1, own_rows({"c": 30.0, "d": 40.0}))
    compact_cell(store, "cell", fewest_files=1)
    assert images_of(store)[0] == ["b"]
    assert store.named_pictures("cell", older) == {0: digest}


def test_seconds_are_read_where_scores_say_another_reason(tmp_path: Path) -> None:
    """Uploads without private images: the scores are `unscored`, diagnostics alone were late."""
    from mjp_privacy.experiment.stored_units import read_units

    from mjp_privacy.core.budget import over_budget

    store = RunStore(tmp_path)
    rows = own_rows({"a": 1.0, "b": 2.0, "c": 3.0})
    scored = rows["variant"] != "diagnostic"
    rows.loc[scored, ["status", "reason"]] = ["unscored", "no private images"]
    for image, seconds in (("a", 0.5), ("c", 2.0)):
        rows.loc[~scored & (rows["image_id"] == image), "reason"] = over_budget(seconds)
    store.write_rows("cell", 0, rows)

    def late() -> dict[str, float]:
        return {unit.image_id: unit.late for unit in read_units(*store.rows_of("cell"))}

    assert late() == {"a": 0.5, "b": 0.0, "c": 2.0}
    compact_cell(store, "cell", fewest_files=1)
    assert [path.name for path in store.row_files("cell")] == ["part-00000.parquet"]
    assert late() == {"a": 0.5, "b": 0.0, "c": 2.0}
    frame = pd.read_parquet(store.row_files("cell")[0])
    assert frame.iloc[0]["status"] == "unscored"
