"""Shares against SciPy's intervals, and what must never be rounded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from mjp_privacy.metrics.statistics import Share, independent_trials


@given(st.integers(1, 5000), st.data())
def test_only_all_is_100_percent_and_only_none_is_0(of: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, of))
    share = Share(count, of)
    printed = float(share.percent_text().removesuffix(" %"))
    assert (printed == 100) == (count == of)
    assert (printed == 0) == (count == 0)
    assert abs(printed - share.percent) <= 0.5 + 1e-9


@pytest.mark.parametrize(("count", "of"), [(0, 7), (1, 200), (116, 200), (199, 200), (12, 12)])
def test_interval_is_wilsons(count: int, of: int) -> None:
    expected = binomtest(count, of).proportion_ci(method="wilson")
    low, high = Share(count, of).interval
    assert (low, high) == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-4)


@pytest.mark.parametrize(
    ("groups", "trials"),
    [
        (["a", "b", "c"], 3),
        (["a", "a", "b", "b"], 2),
        (["a", "a", "a", "b"], 1.6),  # (3 + 1)² / (9 + 1)
        (["a"] * 5, 1),
        ([], 0),
    ],
)
def test_crops_of_one_photograph_count_together(groups: list[str], trials: float) -> None:
    assert independent_trials(groups) == pytest.approx(trials)


def test_the_interval_of_crops_is_that_of_fewer_images() -> None:
    assert Share(20, 20, trials=6.0).interval == Share(6, 6).interval
    assert Share(10, 20, trials=6.0).interval == Share(3, 6).interval
    assert Share(19, 20, trials=6.0).interval[0] < Share(20, 20, trials=6.0).interval[0]


def test_text_holds_count_share_and_interval() -> None:
    assert Share(116, 200).text() == "116 of 200 (58 %, 51–65)"
    # 99.9, not 100: the interval does not hold "all"
    assert Share(199, 200).text() == "199 of 200 (99.5 %, 97–99.9)"
    assert Share(12, 12).text() == "12 of 12 (100 %, 76–100)"
    assert Share(0, 12).text() == "0 of 12 (0 %, 0–24)"


def test_a_share_of_nothing_has_no_percent() -> None:
    share = Share(0, 0)
    assert math.isnan(share.percent)
    assert all(map(math.isnan, share.interval))
    assert (share.percent_text(), share.text()) == ("–", "0 of 0")
