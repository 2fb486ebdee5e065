"""Intervals and tests of thousands of values, where nothing is drawn, against drawing."""

import numpy as np
import pytest
from scipy import stats

from mjp_privacy.metrics import statistics
from mjp_privacy.metrics.coded import Coded
from mjp_privacy.metrics.comparisons import MOST_FLIPPED, sign_flip_test
from mjp_privacy.metrics.resampling import (
    far_larger,
    flipped_sums_with_few_drawn,
    means_with_few_drawn,
    resampled_quantiles,
)
from mjp_privacy.metrics.statistics import (
    MOST_DRAWN,
    bootstrap_interval,
    median_interval,
    resampled_means,
    success_curve,
)

MANY = MOST_DRAWN + 452
TAILS = (0.025, 0.975)


@pytest.mark.parametrize("equal", [True, False])
def test_quantiles_are_those_of_very_many_resamples(equal: bool) -> None:
    """Of skewed sums over unequal groups: 20,000 draws miss an end by 1 % of the half width."""
    draws = np.random.default_rng(1)
    sizes = np.ones(400) if equal else draws.integers(1, 9, 400).astype(float)
    sums = sizes * draws.exponential(size=400) ** 2
    means = resampled_means(sums, sizes, resamples=20_000)
    low, high = np.quantile(means, TAILS)
    found = resampled_quantiles(sums, sizes, TAILS)
    assert found == pytest.approx([low, high], abs=0.02 * (high - low))
    both = resampled_quantiles(np.stack([sums, 2 * sums], axis=1), sizes, TAILS)
    assert np.allclose(both, [[end, 2 * end] for end in found])


def test_the_interval_of_many_is_centred_and_as_wide_as_theory_says() -> None:
    values = np.random.default_rng(2).normal(20, 4, MANY)
    low, high = bootstrap_interval(values)
    half = 1.959964 * values.std() / np.sqrt(MANY)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_the_interval_of_many_medians_is_that_of_order_statistics() -> None:
    values = np.sort(np.random.default_rng(3).exponential(size=MANY))
    low, high = median_interval(values)
    ranks = stats.binom.ppf(TAILS, MANY, 0.5).astype(int)
    near = 3  # places
    assert values[ranks[0] - near] <= low <= values[ranks[0] + near]
    assert values[ranks[1] - near] <= high <= values[ranks[1] + near]
    twice = np.repeat(values, 2)
    groups = [f"photo {at:05d}" for at in range(MANY) for _ in range(2)]
    assert median_interval(twice, groups) == pytest.approx((low, high), rel=1e-12)


@pytest.mark.parametrize("interval", [bootstrap_interval, median_interval])
def test_the_bound_itself_is_drawn(interval, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(10).uniform(size=400)
    ends = []
    for bound in (399, 400, 401):
        monkeypatch.setattr(statistics, "MOST_DRAWN", bound)
        ends.append(interval(values))
    assert ends[1] == ends[2] != ends[0]


def test_bands_of_many_photographs_are_those_of_as_many_images() -> None:
    values = np.random.default_rng(4).uniform(0, 100, MANY)
    groups = [f"{at:05d}" for at in range(MANY)]
    drawn = success_curve(values, ["ok"] * MANY, [20.0, 50.0, 200.0], groups=groups)
    wilson = success_curve(values, ["ok"] * MANY, [20.0, 50.0, 200.0])
    assert drawn.share.tolist() == wilson.share.tolist()
    assert drawn.low.tolist() == wilson.low.tolist()
    assert drawn.high.tolist() == wilson.high.tolist()


def test_sign_flips_of_very_many_pairs_agree_with_drawn_ones() -> None:
    draws = np.random.default_rng(5)
    differences = draws.normal(0.03, 1, MOST_FLIPPED)
    drawn, _ = sign_flip_test(differences)
    more = np.append(differences, 1e-9)  # one pair more: nothing is drawn
    found, smallest = sign_flip_test(more)
    assert found == pytest.approx(drawn, abs=0.01)
    assert smallest == 0


def test_coded_words_are_those_of_a_list() -> None:
    words = Coded.of(["ok", "failed", "ok", "unscored"])
    assert words.words == ("failed", "ok", "unscored")
    assert words.counts() == {"failed": 1, "ok": 2, "unscored": 1}
    assert words.equal("ok").tolist() == [True, False, True, False]
    assert not words.equal("lost").any()
    some = words[np.array([True, False, True, False])]
    assert some.counts() == {"ok": 2}
    assert some.present().words == ("ok",)
    assert some.present().tolist() == ["ok", "ok"]


def test_where_few_values_decide_the_interval_is_drawn() -> None:
    values = np.zeros(MANY)
    values[:5] = 60.0
    low, high = bootstrap_interval(values)
    means = resampled_means(values, np.ones(MANY), resamples=20_000, seed=1)
    assert low == pytest.approx(np.quantile(means, TAILS[0]), abs=0.02)
    assert high == pytest.approx(np.quantile(means, TAILS[1]), abs=0.05)
    assert low >= 0


def test_no_end_of_a_share_leaves_zero_to_one() -> None:
    hits = np.zeros((MANY, 2))
    hits[0, 0], hits[1:, 1] = 1.0, 1.0
    low, high = resampled_quantiles(hits, np.ones(MANY), TAILS)
    assert (low >= 0).all()
    assert (high <= 1).all()


@pytest.mark.parametrize("large", [3, 5])
def test_sign_flips_of_few_large_differences_are_drawn(large: int) -> None:
    """All large ones have the same sign in 2 of 2**large choices; in half of these the small ones,
    which add up to nothing as observed, carry the sum further out."""
    rounding = np.random.default_rng(0).normal(0, 1e-6, 6000)
    small = rounding - rounding.mean()
    p, least = sign_flip_test(np.concatenate([np.full(large, 25.0), small]))
    assert p == pytest.approx(1 / 2**large, rel=0.1)
    assert least > 0


TAILED = {
    "lognormal": lambda draws: (draws.lognormal(0, 3, MANY), np.ones(MANY)),
    "both sides": lambda draws: (draws.standard_cauchy(MANY), np.ones(MANY)),
    "unequal groups": lambda draws: (
        (sizes := draws.integers(1, 30, MANY).astype(float)) * draws.lognormal(0, 2, MANY),
        sizes,
    ),
    "one": lambda draws: (np.append(draws.normal(20, 4, MANY - 1), 3000.0), np.ones(MANY)),
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
    assert not far_larger(ones).any()
    assert np.flatnonzero(far_larger(np.append(ones, [9.0, -20.0]))).tolist() == [300, 301]
    assert not far_larger(np.append(ones, 1.7)).any()  # 2.89 of 302.89: less than a hundredth
    assert far_larger(np.append(ones, 1.8)).sum() == 1  # 3.24 of 303.24
    assert not far_larger(np.ones(100)).any()  # each is a hundredth
    assert far_larger(np.ones(99)).all()
    assert not far_larger(np.zeros(4)).any()
    assert far_larger(np.array([])).shape == (0,)
    assert far_larger(np.append(np.zeros(9), 1.0)).tolist() == [False] * 9 + [True]


def test_the_few_are_never_many() -> None:
    """Each of these takes a little more than a hundredth of what is left."""
    falling = 0.9899 ** (np.arange(5000) / 2)
    few = far_larger(falling)
    assert 850 < few.sum() <= 917
    assert np.square(falling[~few]).sum() <= 1e-4 * np.square(falling).sum()


def test_signs_of_the_few_large_ones_are_those_of_all() -> None:
    """p of 6,000 pairs whose tails are long, beside 15,000 choices of all of their signs."""
    draws = np.random.default_rng(7)
    moved = draws.standard_t(1.2, MOST_FLIPPED + 1000)
    assert 0 < far_larger(moved).sum() < 150
    moved += 0.5 * np.abs(moved).max() / len(moved)
    bits = (draws.integers(0, 256, (500, len(moved) // 8), dtype=np.uint8) for _ in range(30))
    ups = np.concatenate([np.unpackbits(some, axis=1).astype(float) @ moved for some in bits])
    sums = 2 * ups - moved.sum()
    every = np.mean(np.abs(sums) >= abs(moved.sum()))
    p, least = sign_flip_test(moved)
    assert 0.05 < every < 0.95
    assert p == pytest.approx(every, abs=0.02)
    assert least == 1 / 10_001


def test_means_follow_the_sizes_that_a_resample_happens_to_hold() -> None:
    """Large groups with large values: a resample that holds many of them is itself larger."""
    sizes = np.random.default_rng(8).lognormal(0, 1, 300)
    sums, few = sizes**2, np.zeros(300, dtype=bool)
    few[np.argsort(-sizes)[:5]] = True
    every = np.quantile(resampled_means(sums, sizes, resamples=40_000, seed=1), TAILS)
    some = np.quantile(means_with_few_drawn(sums, sizes, few, 40_000, seed=2), TAILS)
    assert some == pytest.approx(every, abs=0.05 * (every[1] - every[0]) / 2)


def test_sums_under_random_signs_are_spread_as_all_terms() -> None:
    terms = np.append(np.random.default_rng(9).normal(0, 0.3, 500), [300.0, -400.0])
    few = np.abs(terms) > 200
    sums = flipped_sums_with_few_drawn(terms, few, 40_000, seed=3)
    assert sums.std() == pytest.approx(np.sqrt(np.square(terms).sum()), rel=0.01)
    rest = np.sqrt(np.square(terms[~few]).sum())
    for peak in (-700, -100, 100, 700):
        near = sums[np.abs(sums - peak) < 4 * rest]
        assert len(near) / len(sums) == pytest.approx(0.25, abs=0.01)
        assert near.std() == pytest.approx(rest, rel=0.03)
