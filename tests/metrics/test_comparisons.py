"""Paired tests against SciPy, against enumeration, and by their properties."""

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mjp_privacy.metrics.statistics import (
    FLIPS,
    bootstrap_interval,
    holm,
    paired_test,
    sign_flip_test,
)

Floats = NDArray[np.float64]


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
    known = scipy.stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    assert test.p_flips == pytest.approx(known, rel=1e-9)
    assert test.smallest_p_flips == 2 / 2 ** int((differences != 0).sum())


def test_sign_flips_of_many_pairs_come_near_every_choice() -> None:
    differences = np.random.default_rng(8).normal(0.6, 1.0, 15)
    expected = scipy.stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    p, smallest = sign_flip_test(differences)
    assert 0.05 < expected < 0.5
    assert p == pytest.approx(expected, abs=4 * math.sqrt(expected / FLIPS))
    assert smallest == 1 / (FLIPS + 1)
    assert sign_flip_test(differences) == (p, smallest)  # the same flips each time
    assert sign_flip_test(np.zeros(3)) == (1.0, 1.0)


def test_figures_by_hand() -> None:
    test = paired_test([1.0, 2.0, 3.0, 10.0], [0.0, 2.0, 4.0, 0.0])
    assert (test.images, test.n, test.differing) == (4, 4, 3)
    assert (test.median, test.mean) == (0.5, 2.5)
    assert test.effect == pytest.approx((2.5 - 2.5 + 4) / 10)
    assert (test.low, test.high) == bootstrap_interval(np.array([1.0, 0.0, -1.0, 10.0]))
    exact = paired_test([math.inf, math.inf, 130.0, 20.0], [math.inf, 104.0, math.inf, 18.0])
    assert (exact.n, exact.differing, exact.mean, exact.median) == (4, 1, 0.5, 0.0)
    assert (exact.p, exact.p_flips) == (1.0, 1.0)
    nothing = paired_test([], [], groups=[])
    assert (nothing.images, nothing.n) == (0, 0)
    assert all(map(math.isnan, (nothing.mean, nothing.median, nothing.p, nothing.p_flips)))
    for first, second, more in (([1.0, math.nan], [1.0, 2.0], None), ([1.0], [2.0], ["a", "b"])):
        with pytest.raises(ValueError, match=r"finite|image"):
            paired_test(first, second, groups=more)


def test_crops_are_averaged_by_photograph_and_the_mean_is_over_images() -> None:
    generator = np.random.default_rng(3)
    first, second = generator.normal(20, 4, 24), generator.normal(18, 4, 24)
    groups = [f"photo {i % 7}" for i in range(24)]
    grouped = paired_test(first, second, groups=groups)
    alone = paired_test([(first - second)[i::7].mean() for i in range(7)], np.zeros(7))
    assert (grouped.images, grouped.n) == (24, 7)
    for name in ("median", "effect", "p", "p_flips", "smallest_p_flips"):
        assert getattr(grouped, name) == pytest.approx(getattr(alone, name)), name
    assert grouped.mean == pytest.approx(first.mean() - second.mean())
    assert (grouped.low, grouped.high) == bootstrap_interval(first - second, groups)


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
