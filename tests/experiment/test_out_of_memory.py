"""A block that memory does not hold is computed in parts, with the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment import cell
from mjp_privacy.experiment.cell import TOGETHER, CellResult, CellTask
from tests.helpers.runs import (
    MJP,
    attack,
    cells,
    one_cell,
    outcome,
    rows,
    said,
    tensors,
    tiny,
)

ATTACKS = [{"name": "patch_gradient"}, {"name": "masked_span"}, {"name": "grey"}]


def config(**changes: Any) -> dict[str, Any]:
    grid = [{"models": ["MJP"], "settings": ["a", "c"], "gammas": [0.5]}]
    content = {"dtypes": ["float64"], "block": 6, "attacks": ATTACKS, "models": {"MJP": MJP}}
    return tiny(**content, grid=grid, **changes)


@pytest.fixture(scope="module")
def undivided(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undivided")
    attack(images, out, config())
    return out


def limited(monkeypatch: pytest.MonkeyPatch, most: int, error: Exception) -> list[int]:
    """Let memory run out with more images than this; the numbers that were tried."""
    run, tried = CellTask.run, []

    def cramped(task: CellTask, records: Sequence[ImageRecord]) -> CellResult:
        tried.append(len(records))
        if len(records) > most:
            raise error
        return run(task, records)

    monkeypatch.setattr(CellTask, "run", cramped)
    return tried


def compared(out: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A run's rows, and its rows that say what was computed together."""
    table = rows(out)
    split = table["metric"] == TOGETHER
    return table[~split].reset_index(drop=True), table[split]


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
]


def test_the_rows_of_a_split_block_are_those_of_the_whole(
    images: Path,
    undivided: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = limited(monkeypatch, 2, OUT_OF_MEMORY[1])
    assert attack(images, tmp_path, config()).exit_code == 0
    assert Counter(tried) == {6: 6, 3: 6, 1: 36}, "each of 6 cells learns once what memory holds"
    expected, none = compared(undivided)
    done, split = compared(tmp_path)
    assert none.empty
    columns = [name for name in expected if name != "value"]
    pd.testing.assert_frame_equal(done[columns], expected[columns])
    at_most = done["metric"].map({"psnr": 100.0}).fillna(float("inf"))  # beyond it is rounding
    difference = (done["value"].clip(upper=at_most) - expected["value"].clip(upper=at_most)).abs()
    assert difference.max() < 1e-6
    assert set(split["value"]) == {1.0}
    assert split.groupby("run_id")["image_id"].nunique().eq(6).all()
    assert TOGETHER in said(tmp_path)
    for run_id in set(expected["run_id"]):
        left, right = tensors(undivided, run_id), tensors(tmp_path, run_id)
        assert left.keys() == right.keys()
        for name, stored in left.items():
            assert (stored["images"] - right[name]["images"]).abs().max() < 1e-5


def test_a_cell_of_several_blocks_learns_once(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = limited(monkeypatch, 1, MemoryError())
    attack(images, tmp_path, one_cell(attacks=[{"name": "patch_gradient"}]))
    assert tried == [3, 1, 1, 1, 1, 1, 1]


def test_an_image_for_which_memory_never_suffices_fails_alone(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 0, MemoryError())
    assert attack(images, tmp_path, config(), limit=2).exit_code == 3
    for entry in cells(tmp_path):
        for status, reason in outcome(tmp_path, run_id=entry["run_id"]).values():
            assert status == "failed"
            assert all(n in reason for n in ("out of memory", "1 image", "client.batch"))


def test_a_federation_whose_weights_move_is_not_split(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = limited(monkeypatch, 2, MemoryError())
    attack(images, tmp_path, config(client={"server_lr": 0.1}))
    assert set(tried) == {6}
    assert "6 image" in rows(tmp_path)["reason"].iloc[0]


def test_a_block_is_split_before_memory_runs_out(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "free_bytes", lambda device: 20_000_000)
    tried = limited(monkeypatch, 100, MemoryError())
    attack(images, tmp_path, one_cell(attacks=ATTACKS, dtypes=["float64"], block=6))
    assert 6 in tried, "controls need no uploads"
    assert min(tried) == 1
    assert TOGETHER in said(tmp_path)
