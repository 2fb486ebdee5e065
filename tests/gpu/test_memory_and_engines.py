"""On a GPU: a block that its memory does not hold is split, and workers each get a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from mjp_privacy.core.machine import free_bytes
from mjp_privacy.experiment.cell import TOGETHER
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run import run_experiment
from tests.helpers.runs import KEYS, MJP, photographs, rows, same_rows, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def config() -> dict[str, Any]:
    grid = [{"models": ["MJP"], "settings": ["c"], "gammas": [0.5]}]
    wide = {**MJP, "img_size": 128, "embed_dim": 768, "num_heads": 12}
    attacks = [{"name": "patch_gradient"}]
    return tiny(dtypes=["float64"], block=6, models={"MJP": wide}, grid=grid, attacks=attacks)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A process that may take little more of the GPU than it has."""
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved()
    share = (taken + 200 * 2**20) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_real_lack_of_memory_splits_a_block(tmp_path: Path, little_memory: None) -> None:
    images = photographs(tmp_path / "images")
    summary = run_experiment(config(), images=images, out=tmp_path / "cramped", device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert summary.exit_code == 0, summary
    run_experiment(config(), images=images, out=tmp_path / "roomy", device="cuda")
    cramped, roomy = (rows(tmp_path / name) for name in ("cramped", "roomy"))
    split = cramped["metric"] == TOGETHER
    assert split.any(), "memory sufficed: the test shows nothing"
    left = cramped[~split].sort_values(KEYS)["value"].clip(upper=60).to_numpy()
    right = roomy.sort_values(KEYS)["value"].clip(upper=60).to_numpy()
    assert pd.Series(abs(left - right)).max() <= 1e-3


def test_free_memory_is_that_of_the_device() -> None:
    device = torch.device("cuda")
    before = free_bytes(device)
    held = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    after = free_bytes(device)
    assert before is not None
    assert after is not None
    assert before - after >= len(held) - 2**21


def test_one_worker_for_each_gpu_gives_the_rows_of_one_process(tmp_path: Path) -> None:
    images = photographs(tmp_path / "images")
    engine = EngineConfig(kind="local")
    run_experiment(tiny(), images=images, out=tmp_path / "here", device="cuda")
    run_experiment(tiny(), images=images, out=tmp_path / "local", device="cuda", engine=engine)
    same_rows(tmp_path / "here", tmp_path / "local")
