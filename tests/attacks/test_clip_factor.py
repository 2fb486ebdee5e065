"""The factor of the clip, planted over its whole range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attacks.equations.sent_gradients import _golden_section, clip_factors

PATCHES, WIDTH, VALUES, MASKED = 6, 20, 30, 2


def clipped(factor: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, part, total, hidden) of one upload: G = A^T X with the masked patches in it, and the
    public part in the rows with this factor."""
    draws = torch.Generator().manual_seed(seed)
    rows, part, x = (
        torch.randn(PATCHES, size, generator=draws, dtype=torch.float64)
        for size in (WIDTH, WIDTH, VALUES)
    )
    hidden = torch.arange(PATCHES) < MASKED
    return rows + factor * part, part, rows.mT @ x, hidden


@pytest.mark.parametrize("factor", [0.0, 1e-5, 0.003, 0.3, 0.51, 0.77, 1.0])
def test_a_planted_factor_is_found(factor: float) -> None:
    uploads = [clipped(factor, seed) for seed in range(3)]
    found = clip_factors(*(torch.stack(parts) for parts in zip(*uploads, strict=True)))
    assert found.shape == (3,)
    assert found.tolist() == pytest.approx([factor] * 3, abs=3e-8)


@pytest.mark.parametrize(("lower", "upper"), [(0.0, 1.0), (-3.0, 2.0), (0.2, 0.4)])
@pytest.mark.parametrize("least", [0.21, 0.3, 0.39])
def test_the_golden_section_finds_the_least_value(lower: float, upper: float, least: float) -> None:
    asked: list[float] = []

    def value(x: float) -> float:
        asked.append(x)
        return abs(x - least)

    found = _golden_section(value, lower, upper)
    assert found == pytest.approx(least, abs=1e-9)
    assert all(lower <= x <= upper for x in asked)
    assert len(asked) == 2 + 48
