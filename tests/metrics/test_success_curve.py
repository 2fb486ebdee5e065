"""Success curves against plain loops and SciPy's intervals."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from mjp_privacy.metrics.statistics import success_curve
from tests.helpers.report_rows import score_interval

VALUES = [12.0, math.inf, 20.0, math.nan, math.nan, math.nan, math.nan, 55.0]
STATUSES = ["ok", "ok", "ok", "failed", "unsupported", "unscored", "ok", "ok"]


def test_failures_count_as_not_recovered_and_unscored_images_not_at_all() -> None:
    curve = success_curve(VALUES, STATUSES, [0, 12, 20, 20.5, 60, 100])
    assert curve.of == 7  # the ok value that is NaN is a failure
    assert curve.share * 7 / 100 == pytest.approx([4, 4, 3, 2, 1, 1])


def test_where_lower_is_better_thresholds_are_upper_bounds() -> None:
    curve = success_curve([0.1, 0.3, math.nan], ["ok", "ok", "failed"], [0.1, 0.2, 1], higher=False)
    assert curve.share == pytest.approx([100 / 3, 100 / 3, 200 / 3])


def test_bands_are_wilsons() -> None:
    values = np.random.default_rng(0).normal(25, 8, 60)
    curve = success_curve(values, ["ok"] * 60, [-100, 10, 25, 30, 90])
    for at, limit in enumerate(curve.thresholds):
        expected = binomtest(int((values >= limit).sum()), 60).proportion_ci(method="wilson")
        band = curve.low[at], curve.high[at]
        assert band == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-3)
    assert curve.photographs is None


def test_bands_take_crops_of_a_photograph_together() -> None:
    generator = np.random.default_rng(1)
    names = [f"photo {i}" for i in range(12) for _ in range(1 + i % 4)]
    base = dict(zip(sorted(set(names)), generator.normal(25, 8, 12), strict=True))
    values = np.array([base[name] for name in names]) + generator.normal(0, 0.5, len(names))
    curve = success_curve(values, ["ok"] * len(names), [20.0, 25.0], groups=names)
    trials = 30**2 / (3 * (1 + 4 + 9 + 16))  # Kish's, by hand
    for at, limit in enumerate((20.0, 25.0)):
        share = float(np.mean(values >= limit))
        low, high = score_interval(share, trials)
        assert (curve.low[at], curve.high[at]) == pytest.approx((100 * low, 100 * high), abs=1e-3)
    assert curve.photographs == 12


def test_all_of_few_photographs_is_not_certainty() -> None:
    """Where all images agree the band is Wilson's over the photographs."""
    names = [f"photo {i % 5}" for i in range(40)]
    curve = success_curve([30.0] * 40, ["ok"] * 40, [20.0, 40.0], groups=names)
    every, none = (binomtest(k, 5).proportion_ci(method="wilson") for k in (5, 0))
    assert (curve.low[0], curve.high[0]) == pytest.approx((100 * every.low, 100), abs=1e-3)
    assert (curve.low[1], curve.high[1]) == pytest.approx((0, 100 * none.high), abs=1e-3)


def test_one_photograph_is_one_trial_and_no_image_has_no_share() -> None:
    curve = success_curve([30.0, 31.0], ["ok", "ok"], [20.0], groups=["a", "a"])
    assert curve.share[0] == 100
    single = binomtest(1, 1).proportion_ci(method="wilson")
    assert (curve.low[0], curve.high[0]) == pytest.approx((100 * single.low, 100), abs=1e-3)
    for groups in (None, ["a"]):
        empty = success_curve([math.nan], ["unscored"], [20.0], groups=groups)
        assert empty.of == 0
        assert np.isnan([empty.share[0], empty.low[0], empty.high[0]]).all()


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
