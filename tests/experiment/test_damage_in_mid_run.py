"""What rots while a run works gets no new seal, and a disk's mood is no damage."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from mjp_privacy.experiment.block_file import PICTURES
from mjp_privacy.experiment.compaction import compact_cell
from mjp_privacy.experiment.damage import find_damage
from mjp_privacy.experiment.row_columns import CELL_COLUMNS, ROW_COLUMNS
from pyarrow import parquet

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.gate.file_kind import Unreadable
from mjp_privacy.experiment import damage
from mjp_privacy.experiment.store import RunStore

CELL = "cell"


def block_rows(images: str, value: float = 1.0) -> pd.DataFrame:
    """A row for each letter."""
    shared = dict.fromkeys((*ROW_COLUMNS, *CELL_COLUMNS), "same")
    shared |= {
        "run_id": CELL,
        "status": "ok",
        "reason": "",
        "metric": "psnr",
        "variant": "standard",
    }
    return pd.DataFrame([shared | {"image_id": name, "value": value} for name in images])


def put(store: RunStore, block: int, images: str, value: float = 1.0) -> None:
    tensors = {"images": torch.full((len(images), 3, 4, 4), 0.5)}
    store.pictures.write(CELL, block, tensors, [*images])
    store.write_rows(CELL, block, block_rows(images, value))


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    made = RunStore(tmp_path)
    made.write_cells([{"cell_key": "k", "run_id": CELL}])
    put(made, 0, "ab")
    put(made, 1, "cd")
    assert not find_damage(made).faults
    return made


def rot(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_rows_are_not_compacted(store: RunStore) -> None:
    rot(store.rows_path(CELL, 0))
    before = store.row_files(CELL)
    with pytest.raises(ValueError, match=r"00000\.parquet changed after it was written"):
        compact_cell(store, CELL, fewest_files=1)
    assert store.row_files(CELL) == before
    assert [fault.path for fault in find_damage(store).faults] == [store.rows_path(CELL, 0)]


@pytest.mark.parametrize("of_rows", [True, False])
def test_a_damaged_block_is_not_merged(store: RunStore, of_rows: bool) -> None:
    rot(store.rows_path(CELL, 0) if of_rows else store.pictures.path(CELL, 0))
    store.drop_images(CELL, 0, ["a"])  # as if `a` moved to another block
    assert [path.name for path in store.row_files(CELL)] == ["00001.parquet"]
    assert len([*store.root.glob("damaged/*/*/00000.*")]) == 2
    store.merge_rows(CELL, 0, [block_rows("e")], "e")
    assert sorted(store.read_rows(CELL)["image_id"]) == ["c", "d", "e"]
    assert not find_damage(store).faults


def test_older_rows_do_not_come_back_for_damaged_ones(store: RunStore) -> None:
    compact_cell(store, CELL, fewest_files=1)
    put(store, 0, "ab", 9.0)
    rot(store.rows_path(CELL, 0))
    found = find_damage(store)
    assert {1.0} == set(store.read_rows(CELL, found.left_out(CELL))["value"])
    assert set(store.read_rows(CELL, found.left_out(CELL))["image_id"]) == {"c", "d"}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE])
def test_what_cannot_be_read_now_is_not_damaged(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(path: Path) -> Any:
        raise OSError(number, "no", str(path))

    monkeypatch.setattr(damage, "read_seal", fails)
    with pytest.raises(Unreadable, match=r"expected .*; got "):
        find_damage(store)
    assert not (store.root / "damaged").exists()


@pytest.mark.parametrize("named", [[], {"x": "1"}, {"0": 5}, {"0": "short"}, "no json"])
def test_rows_that_name_odd_pictures_are_damaged(store: RunStore, named: Any) -> None:
    """A stranger's folder can hold any content under a right seal."""
    path = store.rows_path(CELL, 0)
    table = parquet.read_table(path)
    text = named if isinstance(named, str) else json.dumps(named)
    parquet.write_table(table.replace_schema_metadata({PICTURES: text}), path)
    with pytest.raises(UserError):
        store.named_pictures(CELL, path)
    assert path in {fault.path for fault in find_damage(store).faults}


def test_rows_of_another_cell_are_damaged(store: RunStore) -> None:
    """A seal says that a file is whole, not that it lies where it belongs."""
    for kind in ("rows", "reconstructions"):
        shutil.copytree(store.root / kind / CELL, store.root / kind / "other")
    found = find_damage(store)
    assert {fault.path.parent.name for fault in found.faults} == {"other"}
    assert "the rows of another cell, cell" in found.faults[0].words
    assert store.read_rows("other", found.left_out("other")).empty


def test_a_pipe_among_the_pictures_keeps_nobody_waiting(store: RunStore) -> None:
    path = store.pictures.path(CELL, 0)
    path.unlink()
    os.mkfifo(path)
    assert store.reconstructed(CELL) == ["c", "d"]
    assert store.find_reconstruction(CELL, "a") is None
