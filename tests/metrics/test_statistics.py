"""Means, shares, intervals and success curves against SciPy, against resamples written out, by hand
and by their properties; and of thousands of values, where nothing is drawn, against drawing."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.resampling import (
    draws,
    far_larger,
    means_with_few_drawn,
    resampled_quantiles,
)
from mjp_privacy.metrics.statistics import (
    MOST_DRAWN,
    PSNR_CAP,
    Counts,
    Share,
    bootstrap_interval,
    independent_trials,
    median_interval,
    resampled_means,
    success_curve,
    summarise,
)
from tests.helpers.report_rows import score_interval

TAILS = (0.025, 0.975)
MANY = MOST_DRAWN + 452

# summaries ----------------------------------------------------------------------------------------


def test_every_status_is_counted_and_only_ok_is_averaged() -> None:
    values = [1.0, 3.0, math.nan, math.nan, math.nan, math.nan, 50.0]
    statuses = ["ok", "ok", "ok", "failed", "unsupported", "unscored", "failed"]
    summary = summarise(values, statuses)
    assert (summary.mean, summary.median, summary.n) == (2.0, 2.0, 2)
    # the ok value that is NaN counts as failed: it is not dropped in silence
    assert summary.counts == Counts(ok=2, failed=3, unsupported=1, unscored=1)
    assert summary.counts.total == len(values)
    with pytest.raises(UserError, match="'okay'"):
        summarise([1.0], ["okay"])


def test_psnr_is_capped_in_the_mean_only() -> None:
    summary = summarise([20.0, 130.0, math.inf, math.inf], ["ok"] * 4, cap=PSNR_CAP)
    assert (summary.mean, summary.median, summary.exact) == (80.0, math.inf, 2)
    assert summary.high <= 100
    single = summarise([7.0], ["ok"])
    assert (single.mean, single.n) == (7.0, 1)
    assert math.isnan(single.low + single.high)


def test_groups_follow_the_images_that_were_scored() -> None:
    values, groups = [1.0, 9.0, 2.0, 3.0], ["a", "b", "a", "c"]
    summary = summarise(values, ["ok", "failed", "ok", "ok"], groups=groups)
    low, high = bootstrap_interval(np.array([1.0, 2.0, 3.0]), ["a", "a", "c"])
    assert (summary.mean, summary.low, summary.high) == (2.0, low, high)
    for one, two, more in (([1.0, 2.0], ["ok"], None), ([1.0], ["ok"], ["a", "b"])):
        for figure in (summarise, success_curve):
            with pytest.raises(ValueError, match="image"):
                figure(one, two, groups=more)


# intervals of few values --------------------------------------------------------------------------


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
        assert found == pytest.approx(tuple(np.quantile(figures, TAILS)), rel=1e-12)


def test_intervals_agree_with_scipys() -> None:
    values = np.random.default_rng(4).gamma(2.0, 3.0, 101)
    mean, median = (bootstrap_interval(values, resamples=20_000), median_interval(values))
    for ours, statistic, share in ((mean, np.mean, 0.03), (median, np.median, 0.1)):
        known = scipy.stats.bootstrap(
            (values,), statistic, n_resamples=20_000, method="percentile", rng=5
        ).confidence_interval
        assert ours == pytest.approx(tuple(known), abs=share * (known.high - known.low))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_interval_lies_within_the_values_and_repeats(values: list[float]) -> None:
    array = np.array(values)
    low, high = bootstrap_interval(array)
    slack = 1e-9 * max(1.0, np.abs(array).max())
    assert array.min() - slack <= low <= high <= array.max() + slack
    assert bootstrap_interval(array) == (low, high)


def test_what_has_no_interval() -> None:
    for interval in (bootstrap_interval, median_interval):
        assert all(map(math.isnan, interval(np.array([3.0]))))
        assert all(map(math.isnan, interval(np.array([3.0, 4.0]), ["a", "a"])))
        assert all(map(math.isnan, interval(np.array([3.0, math.inf]))))


@pytest.mark.parametrize("count", [2, 255, 256, 3000])
def test_each_resample_holds_as_many_groups_as_there_are(count: int) -> None:
    times = np.concatenate(draws(count, 300, seed=4))
    assert times.shape == (300, count)
    assert (times.sum(axis=1, dtype=np.int64) == count).all()
    # a count is near a Poisson variable: its variance is 1 - 1 / count
    assert times.var() == pytest.approx(1 - 1 / count, rel=0.15)
    assert not np.array_equal(times, np.concatenate(draws(count, 300, seed=5)))
    sums, sizes = np.random.default_rng(6).normal(size=(9, 3)), np.arange(1.0, 10.0)
    together = resampled_means(sums, sizes)
    for at in range(3):
        assert together[:, at] == pytest.approx(resampled_means(sums[:, at], sizes))


# intervals of thousands of values -----------------------------------------------------------------


@pytest.mark.parametrize("equal", [True, False])
def test_quantiles_are_those_of_very_many_resamples(equal: bool) -> None:
    """Of skewed sums over unequal groups: 20,000 draws miss an end by 1 % of the half width."""
    chance = np.random.default_rng(1)
    sizes = np.ones(400) if equal else chance.integers(1, 9, 400).astype(float)
    sums = sizes * chance.exponential(size=400) ** 2
    low, high = np.quantile(resampled_means(sums, sizes, resamples=20_000), TAILS)
    found = resampled_quantiles(sums, sizes, TAILS)
    assert found == pytest.approx([low, high], abs=0.02 * (high - low))
    both = resampled_quantiles(np.stack([sums, 2 * sums], axis=1), sizes, TAILS)
    assert np.allclose(both, [[end, 2 * end] for end in found])
    hits = np.zeros((MANY, 2))  # a share stays one
    hits[0, 0], hits[1:, 1] = 1.0, 1.0
    low, high = resampled_quantiles(hits, np.ones(MANY), TAILS)
    assert (low >= 0).all()
    assert (high <= 1).all()


def test_the_interval_of_many_medians_is_that_of_order_statistics() -> None:
    values = np.sort(np.random.default_rng(3).exponential(size=MANY))
    low, high = median_interval(values)
    ranks = scipy.stats.binom.ppf(TAILS, MANY, 0.5).astype(int)
    for end, rank in ((low, ranks[0]), (high, ranks[1])):
        assert values[rank - 3] <= end <= values[rank + 3]
    groups = [f"photo {at:05d}" for at in range(MANY) for _ in range(2)]
    twice = median_interval(np.repeat(values, 2), groups)
    assert twice == pytest.approx((low, high), rel=1e-12)


def test_where_few_values_decide_the_interval_is_drawn() -> None:
    values = np.zeros(MANY)
    values[:5] = 60.0
    low, high = bootstrap_interval(values)
    means = resampled_means(values, np.ones(MANY), resamples=20_000, seed=1)
    assert low == pytest.approx(np.quantile(means, TAILS[0]), abs=0.02)
    assert high == pytest.approx(np.quantile(means, TAILS[1]), abs=0.05)
    assert low >= 0


TAILED = {
    "lognormal": lambda chance: (chance.lognormal(0, 3, MANY), np.ones(MANY)),
    "both sides": lambda chance: (chance.standard_cauchy(MANY), np.ones(MANY)),
    "unequal groups": lambda chance: (
        (sizes := chance.integers(1, 30, MANY).astype(float)) * chance.lognormal(0, 2, MANY),
        sizes,
    ),
    "one": lambda chance: (np.append(chance.normal(20, 4, MANY - 1), 3000.0), np.ones(MANY)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TAILED)
def test_drawing_the_few_large_ones_is_drawing_all(name: str) -> None:
    """Ends of 40,000 resamples, in which each group is drawn or only the few: chance moves either
    by 0.7 % of the half width."""
    sums, sizes = TAILED[name](np.random.default_rng(3))
    few = far_larger(sums - sums.sum() / sizes.sum() * sizes)
    assert 0 < few.sum() < 150
    points = (*TAILS, 0.1, 0.5, 0.9)
    every = np.quantile(resampled_means(sums, sizes, resamples=40_000, seed=1), points)
    some = np.quantile(means_with_few_drawn(sums, sizes, few, 40_000, seed=2), points)
    assert some == pytest.approx(every, abs=0.03 * (every[1] - every[0]) / 2)


def test_the_few_are_those_that_outweigh_a_hundredth_of_what_is_left() -> None:
    ones = np.ones(300)
    for values, larger in (
        (ones, []),
        (np.append(ones, [9.0, -20.0]), [300, 301]),
        (np.append(ones, 1.7), []),  # 2.89 of 302.89: less than a hundredth
        (np.append(ones, 1.8), [300]),  # 3.24 of 303.24
        (np.ones(100), []),  # each is a hundredth
        (np.ones(99), [*range(99)]),
        (np.zeros(4), []),
        (np.array([]), []),
        (np.append(np.zeros(9), 1.0), [9]),
    ):
        assert np.flatnonzero(far_larger(values)).tolist() == larger


# shares -------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.data())
def test_only_all_is_100_percent_and_only_none_is_0(of: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, of))
    share = Share(count, of)
    printed = float(share.percent_text().removesuffix(" %"))
    assert (printed == 100) == (count == of)
    assert (printed == 0) == (count == 0)
    assert abs(printed - share.percent) <= 0.5 + 1e-9


@pytest.mark.parametrize(
    ("count", "of", "text"),
    [
        (116, 200, "116 of 200 (58 %, 51–65)"),
        (199, 200, "199 of 200 (99.5 %, 97–99.9)"),  # not 100: the interval does not hold "all"
        (12, 12, "12 of 12 (100 %, 76–100)"),
        (0, 12, "0 of 12 (0 %, 0–24)"),
    ],
)
def test_interval_is_wilsons_and_stands_with_count_and_share(
    count: int, of: int, text: str
) -> None:
    share, expected = Share(count, of), binomtest(count, of).proportion_ci(method="wilson")
    assert share.interval == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-4)
    assert share.text() == text


def test_crops_of_one_photograph_count_together_and_nothing_has_no_percent() -> None:
    for groups, trials in (("abc", 3), ("aabb", 2), ("aaab", 1.6), ("aaaaa", 1), ("", 0)):
        assert independent_trials([*groups]) == pytest.approx(trials)  # (3 + 1)² / (9 + 1)
    assert Share(20, 20, trials=6.0).interval == Share(6, 6).interval
    assert Share(10, 20, trials=6.0).interval == Share(3, 6).interval
    assert Share(19, 20, trials=6.0).interval[0] < Share(20, 20, trials=6.0).interval[0]
    share = Share(0, 0)
    assert all(map(math.isnan, (share.percent, *share.interval)))
    assert (share.percent_text(), share.text()) == ("–", "0 of 0")


# success curves -----------------------------------------------------------------------------------


def test_failures_count_as_not_recovered_and_unscored_images_not_at_all() -> None:
    values = [12.0, math.inf, 20.0, *[math.nan] * 4, 55.0]
    statuses = ["ok", "ok", "ok", "failed", "unsupported", "unscored", "ok", "ok"]
    curve = success_curve(values, statuses, [0, 12, 20, 20.5, 60, 100])
    assert curve.of == 7  # the ok value that is NaN is a failure
    assert curve.share * 7 / 100 == pytest.approx([4, 4, 3, 2, 1, 1])
    curve = success_curve([0.1, 0.3, math.nan], ["ok", "ok", "failed"], [0.1, 0.2, 1], higher=False)
    assert curve.share == pytest.approx([100 / 3, 100 / 3, 200 / 3])
    for groups in (None, ["a"]):
        empty = success_curve([math.nan], ["unscored"], [20.0], groups=groups)
        assert empty.of == 0
        assert np.isnan([empty.share[0], empty.low[0], empty.high[0]]).all()


def test_bands_are_wilsons_over_photographs() -> None:
    values = np.random.default_rng(0).normal(25, 8, 60)
    curve = success_curve(values, ["ok"] * 60, [-100, 10, 25, 30, 90])
    for at, limit in enumerate(curve.thresholds):
        known = binomtest(int((values >= limit).sum()), 60).proportion_ci(method="wilson")
        band = curve.low[at], curve.high[at]
        assert band == pytest.approx((100 * known.low, 100 * known.high), abs=1e-3)
    assert curve.photographs is None
    generator = np.random.default_rng(1)
    names = [f"photo {i}" for i in range(12) for _ in range(1 + i % 4)]
    base = dict(zip(sorted(set(names)), generator.normal(25, 8, 12), strict=True))
    values = np.array([base[name] for name in names]) + generator.normal(0, 0.5, len(names))
    curve = success_curve(values, ["ok"] * len(names), [20.0, 25.0], groups=names)
    trials = 30**2 / (3 * (1 + 4 + 9 + 16))  # Kish's, by hand
    for at, limit in enumerate((20.0, 25.0)):
        low, high = score_interval(float(np.mean(values >= limit)), trials)
        assert (curve.low[at], curve.high[at]) == pytest.approx((100 * low, 100 * high), abs=1e-3)
    assert curve.photographs == 12
    for photographs in (1, 5):  # all of few is not certainty
        names = [f"photo {i % photographs}" for i in range(40)]
        curve = success_curve([30.0] * 40, ["ok"] * 40, [20.0, 40.0], groups=names)
        known = binomtest(photographs, photographs).proportion_ci(method="wilson")
        assert (curve.low[0], curve.high[0]) == pytest.approx((100 * known.low, 100), abs=1e-3)
        assert (curve.low[1], curve.high[1]) == pytest.approx((0, 100 - curve.low[0]), abs=1e-3)


def test_bands_of_crops_hold_the_true_share_as_often_as_they_say() -> None:
    """On average over true shares: of ten photographs whose two crops agree, and of eighteen whose
    one to three crops agree in part."""
    generator = np.random.default_rng(2)
    for sizes, agree in (([2] * 10, 1.0), ([1, 2, 3] * 6, 0.6)):
        names = [f"{i}" for i, size in enumerate(sizes) for _ in range(size)]
        held = 0
        for true in np.linspace(0.05, 0.95, 1000):
            of_photograph = generator.random(len(sizes)) < true
            own = generator.random(len(names)) < true
            shared = generator.random(len(names)) < agree
            hits = np.where(shared, np.repeat(of_photograph, sizes), own)
            curve = success_curve(hits * 1.0, ["ok"] * len(names), [0.5], groups=names)
            held += bool(curve.low[0] <= 100 * true <= curve.high[0])
        assert held / 1000 > 0.94
