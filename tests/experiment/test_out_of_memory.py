"""A block that memory does not hold is computed in parts, with the same rows."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from mjp_privacy.core import machine
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment import in_parts
from mjp_privacy.experiment.cell import CellRows, CellWork
from tests.helpers.runs import KEYS, MJP, attack, names, photographs, rows, tensors, tiny

ATTACKS = [{"name": "patch_gradient"}, {"name": "masked_span"}, {"name": "grey"}]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"))


def config(**changes: Any) -> dict[str, Any]:
    grid = [{"models": ["MJP"], "settings": ["a", "b", "c"], "gammas": [0.5]}]
    return tiny(
        dtypes=["float64"], block=6, attacks=ATTACKS, models={"MJP": MJP}, grid=grid, **changes
    )


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    attack(images, out, config())
    return out


def limited(monkeypatch: pytest.MonkeyPatch, most: int, error: Exception) -> list[int]:
    """Let memory run out with more images than this; the numbers that were tried."""
    run, tried = CellWork.run, []

    def cramped(task: CellWork, records: Sequence[ImageRecord]) -> CellRows:
        tried.append(len(records))
        if len(records) > most:
            raise error
        return run(task, records)

    monkeypatch.setattr(CellWork, "run", cramped)
    return tried


def compared(out: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A run's rows, and its rows that say what was computed together."""
    table = rows(out).sort_values(KEYS, ignore_index=True)
    split = table["metric"] == in_parts.TOGETHER
    return table[~split].reset_index(drop=True), table[split]


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["python", "cuda", "cpu"])
def test_the_rows_of_a_split_block_are_those_of_the_whole(
    images: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    tried = limited(monkeypatch, 2, error)
    attack(images, tmp_path, config())
    assert Counter(tried) == {6: 9, 3: 9, 1: 54}, "each of 9 cells learns once what memory holds"
    expected, none = compared(whole)
    done, split = compared(tmp_path)
    assert none.empty
    columns = [name for name in expected if name != "value"]
    pd.testing.assert_frame_equal(done[columns], expected[columns])
    at_most = done["metric"].map({"psnr": 100.0}).fillna(float("inf"))  # beyond it is rounding
    difference = (done["value"].clip(upper=at_most) - expected["value"].clip(upper=at_most)).abs()
    assert difference.max() < 1e-6
    assert set(split["value"]) == {1.0}
    assert split.groupby("run_id")["image_id"].nunique().eq(len(names(6))).all()
    assert (
        "out of memory with 3 images, computed 1 at a time. Their rows say so"
        in capfd.readouterr().err
    )
    for run_id in set(expected["run_id"]):
        left, right = tensors(whole, run_id), tensors(tmp_path, run_id)
        assert left.keys() == right.keys()
        for name, stored in left.items():
            assert (stored["images"] - right[name]["images"]).abs().max() < 1e-5


def test_an_image_for_which_memory_never_suffices_fails_alone(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 0, MemoryError())
    summary = attack(images, tmp_path, config())
    assert summary.exit_code == 3
    table = rows(tmp_path)
    assert set(table["status"]) == {"failed"}
    reason = table["reason"].iloc[0]
    assert "out of memory with 1 image(s) that belong together" in reason
    assert "expected more memory, or a smaller client.batch" in reason


def test_a_federation_whose_weights_move_is_not_split(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = limited(monkeypatch, 2, MemoryError())
    attack(images, tmp_path, config(client={"server_lr": 0.1}))
    assert set(tried) == {6}
    assert "with 6 image(s) that belong together" in rows(tmp_path)["reason"].iloc[0]


def test_a_block_is_split_before_memory_runs_out(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(in_parts, "free_bytes", lambda device: 20_000_000)
    tried = limited(monkeypatch, 100, MemoryError())
    attack(images, tmp_path, config())
    assert 6 in tried, "controls need no uploads"
    assert min(tried) == 1
    assert "memory holds fewer images, computed 1 at a time" in capfd.readouterr().err


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    assert not machine.out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not machine.out_of_memory(ValueError("DefaultCPUAllocator"))


def test_free_memory_is_less_than_a_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text("3000000\n")
    used.write_text("1000000\n")
    monkeypatch.setattr(machine, "CGROUPS", ((str(limit), str(used)),))
    assert machine.free_bytes(torch.device("cpu")) == 2_000_000
    limit.write_text("max\n")
    unlimited = machine.free_bytes(torch.device("cpu"))
    assert unlimited is None or unlimited > 2_000_000
