"""Means and intervals against SciPy, against arithmetic by hand, and by their properties."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.resampling import draws
from mjp_privacy.metrics.statistics import (
    PSNR_CAP,
    Counts,
    bootstrap_interval,
    median_interval,
    resampled_means,
    summarise,
)


def test_summary_by_hand() -> None:
    summary = summarise([1.0, 2.0, 6.0], ["ok", "ok", "ok"])
    assert (summary.mean, summary.median, summary.exact, summary.n) == (3.0, 2.0, 0, 3)
    assert 1 <= summary.low < 3 < summary.high <= 6


def test_every_status_is_counted_and_only_ok_is_averaged() -> None:
    values = [1.0, 3.0, math.nan, math.nan, math.nan, math.nan, 50.0]
    statuses = ["ok", "ok", "ok", "failed", "unsupported", "unscored", "failed"]
    summary = summarise(values, statuses)
    assert summary.mean == 2.0
    # the ok value that is NaN counts as failed: it is not dropped in silence
    assert summary.counts == Counts(ok=2, failed=3, unsupported=1, unscored=1)
    assert summary.counts.total == len(values)


def test_psnr_is_capped_in_the_mean_only() -> None:
    values = [20.0, 130.0, math.inf, math.inf]
    summary = summarise(values, ["ok"] * 4, cap=PSNR_CAP)
    assert summary.mean == (20 + 100 + 100 + 100) / 4
    assert summary.exact == 2
    assert summary.median == math.inf
    assert summary.high <= 100


def test_a_single_image_has_no_interval() -> None:
    summary = summarise([7.0], ["ok"])
    assert (summary.mean, summary.median, summary.n) == (7.0, 7.0, 1)
    assert math.isnan(summary.low)
    assert math.isnan(summary.high)


def test_an_unknown_status_is_an_error() -> None:
    with pytest.raises(UserError, match=r"got 'okay'.*run the attack again"):
        summarise([1.0], ["okay"])


def test_unequal_lengths_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="one entry per image"):
        summarise([1.0, 2.0], ["ok"])
    with pytest.raises(ValueError, match="one entry per image"):
        summarise([1.0], ["ok"], groups=["a", "b"])


@pytest.mark.parametrize("n", [12, 200])
def test_interval_agrees_with_scipy(n: int) -> None:
    values = np.random.default_rng(n).gamma(2.0, 3.0, n)
    ours = bootstrap_interval(values, resamples=20_000)
    reference = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", random_state=5
    ).confidence_interval
    width = reference.high - reference.low
    assert ours == pytest.approx((reference.low, reference.high), abs=0.03 * width)


def test_groups_follow_the_images_that_were_scored() -> None:
    values, groups = [1.0, 9.0, 2.0, 3.0], ["a", "b", "a", "c"]
    summary = summarise(values, ["ok", "failed", "ok", "ok"], groups=groups)
    low, high = bootstrap_interval(np.array([1.0, 2.0, 3.0]), ["a", "a", "c"])
    assert (summary.mean, summary.low, summary.high) == (2.0, low, high)


@pytest.mark.parametrize("n", [5, 17, 255, 256, 300])
@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_are_those_of_resamples_written_out(n: int, grouped: bool) -> None:
    """Draw, gather and average, without counts or a cache: the same draws, the same interval."""
    generator = np.random.default_rng(n)
    values = generator.normal(20, 6, n)
    groups = [f"photo {i}" for i in generator.integers(0, 1 + n // 3, n)] if grouped else None
    names = np.arange(n) if groups is None else np.array(groups)
    parts = [values[names == name] for name in np.unique(names)]
    shape = (2000, len(parts))
    for found, statistic, kind in (
        (bootstrap_interval(values, groups), np.mean, np.int32),
        (median_interval(values, groups), np.median, np.int64),
    ):
        drawn = np.random.default_rng(0).integers(0, len(parts), size=shape, dtype=kind)
        figures = [statistic(np.concatenate([parts[i] for i in row])) for row in drawn]
        assert found == pytest.approx(tuple(np.quantile(figures, [0.025, 0.975])), rel=1e-12)


def test_several_means_come_from_the_same_resamples() -> None:
    sums, sizes = np.random.default_rng(6).normal(size=(9, 3)), np.arange(1.0, 10.0)
    together = resampled_means(sums, sizes)
    assert together.shape == (2000, 3)
    for at in range(3):
        assert together[:, at] == pytest.approx(resampled_means(sums[:, at], sizes))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_interval_lies_within_the_values_and_repeats(values: list[float]) -> None:
    array = np.array(values)
    low, high = bootstrap_interval(array)
    slack = 1e-9 * max(1.0, np.abs(array).max())
    assert array.min() - slack <= low <= high <= array.max() + slack
    assert bootstrap_interval(array) == (low, high)


def test_interval_of_the_median_agrees_with_scipy() -> None:
    values = np.random.default_rng(4).exponential(10.0, 101)
    ours = median_interval(values)
    known = scipy.stats.bootstrap(
        (values,), np.median, n_resamples=20000, method="percentile", rng=1
    ).confidence_interval
    spread = known.high - known.low
    assert ours == pytest.approx((known.low, known.high), abs=0.1 * spread)


def test_a_single_value_has_no_interval_of_the_median() -> None:
    assert all(map(math.isnan, median_interval(np.array([3.0]))))
    assert all(map(math.isnan, median_interval(np.array([3.0, 4.0]), ["a", "a"])))
    assert all(map(math.isnan, median_interval(np.array([3.0, math.inf]))))


@pytest.mark.parametrize("count", [2, 255, 256, 3000])
def test_each_resample_holds_as_many_groups_as_there_are(count: int) -> None:
    times = np.concatenate(draws(count, 300, seed=4))
    assert times.shape == (300, count)
    assert (times.sum(axis=1, dtype=np.int64) == count).all()
    # a count is near a Poisson variable: its variance is 1 - 1 / count
    assert times.var() == pytest.approx(1 - 1 / count, rel=0.15)
    assert not np.array_equal(times, np.concatenate(draws(count, 300, seed=5)))
