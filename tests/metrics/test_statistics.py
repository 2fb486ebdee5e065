"""Means, shares, intervals and paired tests: against SciPy, against resamples written out and every
choice enumerated, and by hand."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics import statistics
from mjp_privacy.metrics.statistics import (
    MOST_DRAWN,
    PSNR_CAP,
    Counts,
    Share,
    holm,
    independent_trials,
    mean_interval,
    median_interval,
    paired_test,
    range_of,
    summarise,
)

Floats = NDArray[np.float64]

TAILS = (0.025, 0.975)


def test_every_status_is_counted_and_only_ok_is_averaged() -> None:
    """PSNR is capped in the mean alone, and groups are those of the scored images."""
    values = [1.0, 3.0, math.nan, math.nan, math.nan, math.nan, 50.0]
    statuses = ["ok", "ok", "ok", "failed", "unsupported", "unscored", "failed"]
    summary = summarise(values, statuses)
    assert (summary.mean, summary.n) == (2.0, 2)
    # the ok value that is NaN counts as failed: it is not dropped in silence
    assert summary.counts == Counts(ok=2, failed=3, unsupported=1, unscored=1)
    with pytest.raises(UserError, match="'okay'"):
        summarise([1.0], ["okay"])
    summary = summarise([20.0, 130.0, math.inf, math.inf], ["ok"] * 4, within=range_of("psnr"))
    assert (summary.mean, summary.exact) == (80.0, 2)
    assert summary.high <= 100
    statuses, groups = ["ok", "failed", "ok", "ok"], ["a", "b", "a", "c"]
    summary = summarise([1.0, 9.0, 2.0, 3.0], statuses, groups=groups)
    interval = mean_interval(np.array([1.0, 2.0, 3.0]), ["a", "a", "c"])
    assert (summary.mean, summary.low, summary.high) == (2.0, *interval)


# intervals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [120, 300])
@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_are_those_of_resamples_written_out(n: int, grouped: bool) -> None:
    """Draw, gather and average, without counts or a cache: the same draws, the same interval."""
    generator = np.random.default_rng(n)
    values = generator.normal(20, 6, n)
    groups = [f"photo {i}" for i in generator.integers(0, 1 + n // 3, n)] if grouped else None
    names = np.arange(n) if groups is None else np.array(groups)
    parts = [values[names == name] for name in np.unique(names)]
    for found, statistic, kind in (
        (mean_interval(values, groups), np.mean, np.int32),
        (median_interval(values, groups), np.median, np.int64),
    ):
        draws = np.random.default_rng(0)
        drawn = draws.integers(0, len(parts), size=(2000, len(parts)), dtype=kind)
        figures = [statistic(np.concatenate([parts[i] for i in row])) for row in drawn]
        assert found == pytest.approx(tuple(np.quantile(figures, TAILS)), rel=1e-12)


@pytest.mark.parametrize("interval", [mean_interval, median_interval])
def test_beyond_the_groups_that_are_drawn_intervals_are_nearly_the_same(interval: Any) -> None:
    """3,000 groups of one to three skewed values, beside resamples of all of them."""
    generator = np.random.default_rng(6)
    sizes = generator.integers(1, 4, MOST_DRAWN + 952)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    values = generator.gamma(2.0, 3.0, len(groups)) + np.repeat(
        generator.normal(0, 2, len(sizes)), sizes
    )
    found = interval(values, groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "MOST_DRAWN", len(sizes))
        drawn = interval(values, groups)
    assert found == pytest.approx(drawn, abs=0.05 * (drawn[1] - drawn[0]))
    assert found != drawn


def test_of_few_groups_the_interval_is_students_and_covers_the_mean() -> None:
    generator = np.random.default_rng(8)
    values = generator.normal(20, 6, 12)
    known = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_interval(values) == pytest.approx((known.low, known.high), rel=1e-12)
    threes = [f"photo {at // 3}" for at in range(12)]  # groups of one size: of their means
    known = scipy.stats.ttest_1samp(values.reshape(4, 3).mean(1), 0).confidence_interval(0.95)
    assert mean_interval(values, threes) == pytest.approx((known.low, known.high), rel=1e-12)
    for count in (2, 5, 29):
        found = np.array([mean_interval(row) for row in generator.normal(0, 1, (2000, count))])
        assert 0.935 < np.mean((found[:, 0] < 0) & (found[:, 1] > 0)) < 0.965
    for metric, two, ends in (("ssim", [0.9, 1.0], (-1, 1)), ("ceiling_psnr", [1, 99], (0, 100))):
        assert range_of(metric) == ends
        summary = summarise(two, ["ok"] * 2, within=ends)
        assert ends[0] <= summary.low < summary.high == ends[1]
    test = paired_test([90.0, 30.0], [20.0, 20.0])
    assert (test.low, test.high) == (-PSNR_CAP, PSNR_CAP)
    assert all(map(math.isnan, median_interval(values[:5])))


def test_a_few_groups_that_decide_alone_are_drawn_and_no_interval_leaves_the_range() -> None:
    values = np.full(MOST_DRAWN + 952, 100.0)
    values[0] = 20.0
    assert mean_interval(values)[1] <= 100.0
    values[:] = 1e-4
    values[::20] = 1.0
    assert mean_interval(values)[0] >= 1e-4


def test_intervals_agree_with_scipys_and_few_or_endless_values_have_none() -> None:
    values = np.random.default_rng(4).gamma(2.0, 3.0, 101)
    mean, median = mean_interval(values), median_interval(values)
    for ours, statistic, share in ((mean, np.mean, 0.03), (median, np.median, 0.1)):
        known = scipy.stats.bootstrap(
            (values,), statistic, n_resamples=20_000, method="percentile", rng=5
        ).confidence_interval
        assert ours == pytest.approx(tuple(known), abs=share * (known.high - known.low))
    for interval in (mean_interval, median_interval):
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


# paired tests -------------------------------------------------------------------------------------


def with_ties(seed: int, n: int, shift: float = 0.3) -> Floats:
    """Differences in steps of one half: many ties, many zeros."""
    return np.round(2 * np.random.default_rng(seed).normal(shift, 1.2, n)) / 2


@pytest.mark.parametrize("n", [3, 50, 90])
def test_wilcoxon_is_scipys(n: int) -> None:
    """Exact up to 50 pairs, normal beyond; ties as they are, zeros by Pratt's rule."""
    differences = np.random.default_rng(n).normal(0.3, 1.0, n)
    how = {"method": "exact"} if n <= 50 else {"method": "approx", "correction": False}
    expected = scipy.stats.wilcoxon(differences, **how).pvalue
    assert paired_test(differences, np.zeros(n)).p == pytest.approx(expected, rel=1e-9)
    tied = with_ties(n, 120)
    assert (tied == 0).sum() > 5
    how = {"zero_method": "pratt", "method": "approx", "correction": False}
    test, expected = paired_test(tied, np.zeros(120)), scipy.stats.wilcoxon(tied, **how).pvalue
    assert test.p == pytest.approx(expected, rel=1e-9)
    # zsplit gives half of the zeros' ranks to each side, so they cancel in the effect
    how = {"zero_method": "zsplit", "alternative": "greater", "method": "approx"}
    above, total = scipy.stats.wilcoxon(tied, **how).statistic, 120 * 121 / 2
    assert test.effect == pytest.approx((2 * above - total) / total)


@pytest.mark.parametrize("seed", range(3))
def test_few_pairs_with_ties_and_zeros_against_every_choice_of_signs(seed: int) -> None:
    differences = with_ties(seed, 9)
    test = paired_test(differences, np.zeros(9))
    size = scipy.stats.rankdata(np.abs(differences))[differences != 0]
    observed = size[differences[differences != 0] > 0].sum()
    sums = [np.dot(size, choice) for choice in product((0, 1), repeat=len(size))]
    tails = np.mean(np.array(sums) <= observed), np.mean(np.array(sums) >= observed)
    assert test.p == pytest.approx(min(1.0, 2 * min(tails)), rel=1e-12)


def test_figures_by_hand() -> None:
    test = paired_test([1.0, 2.0, 3.0, 10.0], [0.0, 2.0, 4.0, 0.0])
    assert (test.images, test.n) == (4, 4)
    assert (test.median, test.mean) == (0.5, 2.5)
    assert test.effect == pytest.approx((2.5 - 2.5 + 4) / 10)
    assert (test.low, test.high) == mean_interval(np.array([1.0, 0.0, -1.0, 10.0]))
    exact = paired_test([math.inf, math.inf, 130.0, 20.0], [math.inf, 104.0, math.inf, 18.0])
    assert (exact.n, exact.mean, exact.median) == (4, 0.5, 0.0)
    assert exact.p == 1.0
    nothing = paired_test([], [], groups=[])
    assert (nothing.images, nothing.n) == (0, 0)
    assert all(map(math.isnan, (nothing.mean, nothing.median, nothing.p)))


def test_crops_are_averaged_by_photograph_and_the_mean_is_over_images() -> None:
    generator = np.random.default_rng(3)
    first, second = generator.normal(20, 4, 24), generator.normal(18, 4, 24)
    groups = [f"photo {i % 7}" for i in range(24)]
    grouped = paired_test(first, second, groups=groups)
    alone = paired_test([(first - second)[i::7].mean() for i in range(7)], np.zeros(7))
    assert (grouped.images, grouped.n) == (24, 7)
    for name in ("median", "effect", "p"):
        assert getattr(grouped, name) == pytest.approx(getattr(alone, name)), name
    assert grouped.mean == pytest.approx(first.mean() - second.mean())
    assert (grouped.low, grouped.high) == mean_interval(first - second, groups)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.5))
def test_holm_rejects_what_its_steps_reject(p_values: list[float], alpha: float) -> None:
    """Textbook: compare the i-th smallest of m with alpha / (m - i), stop at the first larger."""
    order, rejected = sorted(range(len(p_values)), key=p_values.__getitem__), set()
    for step, at in enumerate(order):
        if (len(p_values) - step) * p_values[at] > alpha:
            break
        rejected.add(at)
    *found, missing = holm([*p_values, math.nan])  # which is no test, and counts for none
    assert {at for at, p in enumerate(found) if p <= alpha} == rejected
    assert math.isnan(missing)
