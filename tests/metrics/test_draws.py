"""Matrices of draws: what they hold, and which are kept."""

import numpy as np
import pytest

from mjp_privacy.metrics import resampling as module
from mjp_privacy.metrics.resampling import draws


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    module._kept.clear()


@pytest.mark.parametrize("count", [2, 255, 256, 3000])
def test_each_resample_holds_as_many_groups_as_there_are(count: int) -> None:
    times = np.concatenate(list(draws(count, 300, seed=4)))
    assert times.shape == (300, count)
    assert (times.sum(axis=1, dtype=np.int64) == count).all()
    # a count is near a Poisson variable: its variance is 1 - 1 / count
    assert times.var() == pytest.approx(1 - 1 / count, rel=0.15)
    assert np.array_equal(times, np.concatenate(list(draws(count, 300, seed=4))))
    assert not np.array_equal(times, np.concatenate(list(draws(count, 300, seed=5))))


def test_a_matrix_is_drawn_once() -> None:
    first, second = list(draws(2048, 2000, 0)), list(draws(2048, 2000, 0))
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_what_fills_the_bound_is_kept_and_the_least_used_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 10 * 30)
    for count in (10, 20):
        list(draws(count, 10, 0))
    assert [key[0] for key in module._kept] == [10, 20]  # 300 bytes in all
    list(draws(10, 10, 0))
    assert [key[0] for key in module._kept] == [20, 10]
    list(draws(5, 10, 0))
    assert [key[0] for key in module._kept] == [10, 5]
    list(draws(30, 10, 0))
    assert [key[0] for key in module._kept] == [30]
    list(draws(31, 10, 0))
    assert [key[0] for key in module._kept] == [30]
