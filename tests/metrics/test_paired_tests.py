"""Paired tests against SciPy, against enumeration, and by their properties."""

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mjp_privacy.metrics.comparisons import (
    FLIPS,
    holm,
    paired_test,
    sign_flip_test,
    signed_ranks,
    wilcoxon_p,
)
from mjp_privacy.metrics.statistics import bootstrap_interval

Floats = NDArray[np.float64]


def with_ties(seed: int, n: int, shift: float = 0.3) -> Floats:
    """Differences in steps of one half: many ties, many zeros."""
    return np.round(2 * np.random.default_rng(seed).normal(shift, 1.2, n)) / 2


@pytest.mark.parametrize("n", [3, 12, 35, 50])
def test_wilcoxon_is_exact_as_scipys(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.3, 1.0, n)
    expected = scipy.stats.wilcoxon(differences, method="exact").pvalue
    assert paired_test(differences, np.zeros(n)).p == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("differences", [np.random.default_rng(1).normal(0.1, 1, 90)])
def test_wilcoxon_of_many_is_normal_as_scipys(differences: Floats) -> None:
    expected = scipy.stats.wilcoxon(differences, method="approx", correction=False).pvalue
    assert wilcoxon_p(signed_ranks(differences)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_zeros_by_pratt_and_ties_as_scipys(seed: int) -> None:
    differences = with_ties(seed, 120)
    assert (differences == 0).sum() > 5
    expected = scipy.stats.wilcoxon(
        differences, zero_method="pratt", method="approx", correction=False
    ).pvalue
    assert paired_test(differences, np.zeros(120)).p == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_few_pairs_with_ties_and_zeros_against_every_choice_of_signs(seed: int) -> None:
    differences = with_ties(seed, 9)
    size = scipy.stats.rankdata(np.abs(differences))[differences != 0]
    observed = size[differences[differences != 0] > 0].sum()
    sums = [np.dot(size, choice) for choice in product((0, 1), repeat=len(size))]
    tails = np.mean(np.array(sums) <= observed), np.mean(np.array(sums) >= observed)
    expected = min(1.0, 2 * min(tails))
    assert wilcoxon_p(signed_ranks(differences)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_effect_follows_from_scipys_rank_sums(seed: int) -> None:
    """zsplit gives half of the zeros' ranks to each side, so they cancel in the effect."""
    differences = with_ties(seed, 60)
    above = scipy.stats.wilcoxon(
        differences, zero_method="zsplit", alternative="greater", method="approx"
    ).statistic
    total = 60 * 61 / 2
    effect = paired_test(differences, np.zeros(60)).effect
    assert effect == pytest.approx((2 * above - total) / total)


@pytest.mark.parametrize("seed", range(4))
def test_sign_flips_of_few_pairs_are_scipys_permutation_test(seed: int) -> None:
    differences = with_ties(seed, 10)
    expected = scipy.stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    p, smallest = sign_flip_test(differences)
    assert p == pytest.approx(expected, rel=1e-9)
    assert smallest == 2 / 2 ** int((differences != 0).sum())


def test_chance_alone_is_seldom_significant() -> None:
    samples = np.random.default_rng(0).normal(0.0, 1.0, (400, 14))
    tests = [paired_test(sample, np.zeros(14)) for sample in samples]
    for ps in ([test.p for test in tests], [test.p_flips for test in tests]):
        assert 0.02 <= np.mean(np.array(ps) <= 0.05) <= 0.08


def test_two_exact_images_differ_by_nothing() -> None:
    test = paired_test([math.inf, math.inf, 130.0, 20.0], [math.inf, 104.0, math.inf, 18.0])
    assert (test.n, test.differing, test.mean, test.median) == (4, 1, 0.5, 0.0)
    assert (test.p, test.p_flips) == (1.0, 1.0)


def test_figures_by_hand() -> None:
    test = paired_test([1.0, 2.0, 3.0, 10.0], [0.0, 2.0, 4.0, 0.0])
    assert (test.images, test.n, test.differing) == (4, 4, 3)
    assert (test.median, test.mean) == (0.5, 2.5)
    assert test.effect == pytest.approx((2.5 - 2.5 + 4) / 10)
    assert (test.low, test.high) == bootstrap_interval(np.array([1.0, 0.0, -1.0, 10.0]))


def test_crops_are_averaged_by_photograph_first() -> None:
    generator = np.random.default_rng(3)
    first, second = generator.normal(20, 4, 24), generator.normal(18, 4, 24)
    groups = [f"photo {i % 7}" for i in range(24)]
    means = np.array([(first - second)[i::7].mean() for i in range(7)])
    grouped = paired_test(first, second, groups=groups)
    alone = paired_test(means, np.zeros(7))
    assert (grouped.images, grouped.n) == (24, 7)
    for name in ("median", "effect", "p", "p_flips", "smallest_p_flips"):
        assert getattr(grouped, name) == pytest.approx(getattr(alone, name)), name


def test_the_mean_difference_is_that_of_the_means_over_images() -> None:
    generator = np.random.default_rng(3)
    first, second = generator.normal(20, 4, 24), generator.normal(18, 4, 24)
    test = paired_test(first, second, groups=[f"photo {i % 7}" for i in range(24)])
    assert test.mean == pytest.approx(first.mean() - second.mean())
    blocks = [(first - second)[i::7] for i in range(7)]
    means = [
        np.concatenate([blocks[i] for i in generator.integers(0, 7, 7)]).mean() for _ in range(8000)
    ]
    low, high = np.quantile(means, [0.025, 0.975])
    assert (test.low, test.high) == pytest.approx((low, high), abs=0.3)


def test_no_pairs_have_no_figures() -> None:
    for groups in (None, []):
        test = paired_test([], [], groups=groups)
        assert (test.images, test.n) == (0, 0)
        assert all(map(math.isnan, (test.mean, test.median, test.p, test.p_flips)))


def test_missing_scores_and_unequal_lengths_are_our_own_mistakes() -> None:
    with pytest.raises(ValueError, match="finite"):
        paired_test([1.0, math.nan], [1.0, 2.0])
    with pytest.raises(ValueError, match="one entry per image"):
        paired_test([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="one entry per image"):
        paired_test([1.0], [2.0], groups=["a", "b"])


# Holm ---------------------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.5))
def test_holm_rejects_what_its_steps_reject(p_values: list[float], alpha: float) -> None:
    """Textbook: compare the i-th smallest of m with alpha / (m - i), stop at the first larger."""
    order, rejected = sorted(range(len(p_values)), key=p_values.__getitem__), set()
    for step, at in enumerate(order):
        if (len(p_values) - step) * p_values[at] > alpha:
            break
        rejected.add(at)
    assert {at for at, p in enumerate(holm(p_values)) if p <= alpha} == rejected


def test_holm_leaves_missing_tests_out_of_the_count() -> None:
    adjusted = holm([0.01, math.nan, 0.02])
    assert math.isnan(adjusted[1])
    assert (adjusted[0], adjusted[2]) == (0.02, 0.02)


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
