"""Means, shares and intervals against SciPy, against resamples written out and by hand."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.statistics import (
    PSNR_CAP,
    Counts,
    Share,
    bootstrap_interval,
    independent_trials,
    median_interval,
    summarise,
)

TAILS = (0.025, 0.975)


def test_every_status_is_counted_and_only_ok_is_averaged() -> None:
    """PSNR is capped in the mean alone, and groups are those of the scored images."""
    values = [1.0, 3.0, math.nan, math.nan, math.nan, math.nan, 50.0]
    statuses = ["ok", "ok", "ok", "failed", "unsupported", "unscored", "failed"]
    summary = summarise(values, statuses)
    assert (summary.mean, summary.median, summary.n) == (2.0, 2.0, 2)
    # the ok value that is NaN counts as failed: it is not dropped in silence
    assert summary.counts == Counts(ok=2, failed=3, unsupported=1, unscored=1)
    with pytest.raises(UserError, match="'okay'"):
        summarise([1.0], ["okay"])
    with pytest.raises(ValueError, match="image"):
        summarise([1.0], ["ok"], groups=["a", "b"])
    summary = summarise([20.0, 130.0, math.inf, math.inf], ["ok"] * 4, cap=PSNR_CAP)
    assert (summary.mean, summary.median, summary.exact) == (80.0, math.inf, 2)
    assert summary.high <= 100
    statuses, groups = ["ok", "failed", "ok", "ok"], ["a", "b", "a", "c"]
    summary = summarise([1.0, 9.0, 2.0, 3.0], statuses, groups=groups)
    interval = bootstrap_interval(np.array([1.0, 2.0, 3.0]), ["a", "a", "c"])
    assert (summary.mean, summary.low, summary.high) == (2.0, *interval)


# intervals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 300])
@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_are_those_of_resamples_written_out(n: int, grouped: bool) -> None:
    """Draw, gather and average, without counts or a cache: the same draws, the same interval."""
    generator = np.random.default_rng(n)
    values = generator.normal(20, 6, n)
    groups = [f"photo {i}" for i in generator.integers(0, 1 + n // 3, n)] if grouped else None
    names = np.arange(n) if groups is None else np.array(groups)
    parts = [values[names == name] for name in np.unique(names)]
    for found, statistic, kind in (
        (bootstrap_interval(values, groups), np.mean, np.int32),
        (median_interval(values, groups), np.median, np.int64),
    ):
        draws = np.random.default_rng(0)
        drawn = draws.integers(0, len(parts), size=(2000, len(parts)), dtype=kind)
        figures = [statistic(np.concatenate([parts[i] for i in row])) for row in drawn]
        assert found == pytest.approx(tuple(np.quantile(figures, TAILS)), rel=1e-12)


def test_intervals_agree_with_scipys_and_few_or_endless_values_have_none() -> None:
    values = np.random.default_rng(4).gamma(2.0, 3.0, 101)
    mean, median = bootstrap_interval(values), median_interval(values)
    for ours, statistic, share in ((mean, np.mean, 0.03), (median, np.median, 0.1)):
        known = scipy.stats.bootstrap(
            (values,), statistic, n_resamples=20_000, method="percentile", rng=5
        ).confidence_interval
        assert ours == pytest.approx(tuple(known), abs=share * (known.high - known.low))
    for interval in (bootstrap_interval, median_interval):
        for few, groups in (([3.0], None), ([3.0, 4.0], ["a", "a"]), ([3.0, math.inf], None)):
            assert all(map(math.isnan, interval(np.array(few), groups)))


# shares -------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.data())
def test_only_all_is_100_percent_and_only_none_is_0(of: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, of))
    share = Share(count, of)
    printed = float(share.text().partition("(")[2].partition(" %")[0])
    assert (printed == 100) == (count == of)
    assert (printed == 0) == (count == 0)
    assert abs(printed - share.percent) <= 0.5 + 1e-9
    expected = binomtest(count, of).proportion_ci(method="wilson")
    assert share.interval == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-4)


def test_a_share_stands_with_its_count_and_crops_of_a_photograph_count_together() -> None:
    assert Share(199, 200).text() == "199 of 200 (99.5 %, 97–99.9)"  # not 100
    for groups, trials in (("abc", 3), ("aabb", 2), ("aaab", 1.6), ("aaaaa", 1), ("", 0)):
        assert independent_trials([*groups]) == pytest.approx(trials)  # (3 + 1)² / (9 + 1)
    assert Share(10, 20, trials=6.0).interval == Share(3, 6).interval
    share = Share(0, 0)
    assert all(map(math.isnan, (share.percent, *share.interval)))
    assert share.text() == "0 of 0"
    with pytest.raises(ValueError, match="not 3"):
        Share(3, 2)
