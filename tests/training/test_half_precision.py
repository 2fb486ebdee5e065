"""A training in bfloat16 says where this CPU is slow at it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mjp_privacy.training import half_precision
from mjp_privacy.training.run import train
from tests.helpers.training import small

CPU = torch.device("cpu")


def test_only_a_cpu_that_is_slow_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    half = small(recipe={"precision": "bfloat16"})
    monkeypatch.setattr(half_precision, "bfloat16_times", lambda: 12.4)
    assert "slower in bfloat16" in str(half_precision.slow_bfloat16(half, CPU))
    assert half_precision.slow_bfloat16(half, torch.device("cuda")) is None
    whole = small(recipe={"precision": "float32"})
    assert half_precision.slow_bfloat16(whole, CPU) is None
    monkeypatch.setattr(half_precision, "bfloat16_times", lambda: 0.6)
    assert half_precision.slow_bfloat16(half, CPU) is None


def test_the_ratio_is_of_bfloat16_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.bfloat16: 0.6, torch.float32: 0.1}
    monkeypatch.setattr(half_precision, "shortest", lambda left, right: seconds[left.dtype])
    assert half_precision.bfloat16_times() == pytest.approx(6.0)
    monkeypatch.undo()
    assert half_precision.shortest(torch.ones(2, 2), torch.ones(2, 2)) > 0


def test_a_training_says_it_once_and_a_finished_one_does_not(
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(half_precision, "bfloat16_times", lambda: 12.4)
    config = small(recipe={"precision": "bfloat16", "epochs": 1})
    train(config, data=data, out=tmp_path / "run", device="cpu")
    assert capfd.readouterr().err.count("--precision float32") == 1
    train(config, data=data, out=tmp_path / "run", device="cpu")
    assert "--precision float32" not in capfd.readouterr().err
