"""Intervals and tests of thousands of values, where nothing is drawn, against drawing."""

import numpy as np
import pytest
from scipy import stats

from mjp_privacy.metrics.comparisons import MOST_FLIPPED, sign_flip_test
from mjp_privacy.metrics.resampling import (
    far_larger,
    means_with_few_drawn,
    resampled_quantiles,
)
from mjp_privacy.metrics.statistics import (
    MOST_DRAWN,
    bootstrap_interval,
    median_interval,
    resampled_means,
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


def test_sign_flips_of_very_many_pairs_agree_with_drawn_ones() -> None:
    draws = np.random.default_rng(5)
    differences = draws.normal(0.03, 1, MOST_FLIPPED)
    drawn, _ = sign_flip_test(differences)
    more = np.append(differences, 1e-9)  # one pair more: nothing is drawn
    found, smallest = sign_flip_test(more)
    assert found == pytest.approx(drawn, abs=0.01)
    assert smallest == 0


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
