"""The page of the benchmarks says what their results hold."""

import socket

import pytest

from benchmarks import growth, page
from benchmarks.alternating import Timing, ratio

RESULTS = sorted(file.stem for file in page.RESULTS.glob("*.json"))


def test_the_page_holds_the_tables_of_the_results_which_name_no_machine() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text) == text, "python -m benchmarks.page writes it again"
    assert {*page.TABLES} <= {*RESULTS}
    assert all(f"<!-- table: {name} begin -->" in text for name in page.TABLES)
    for name in RESULTS:
        assert socket.gethostname() not in (page.RESULTS / f"{name}.json").read_text()


def test_an_exponent_is_that_of_the_power_and_a_ratio_the_median_of_the_repeats() -> None:
    assert growth.exponent((1, 2, 4, 8), (3, 12, 48, 192)) == pytest.approx((2, 0), abs=1e-9)
    noisy, spread = growth.exponent((1, 2, 4, 8), (3, 13, 45, 200))
    assert abs(noisy - 2) < 3 * spread
    slow, fast = Timing([4.0, 9.0, 8.0], []), Timing([1.0, 3.0, 1.0], [])
    assert ratio(slow, fast) == {"median": 4.0, "min": 3.0, "max": 8.0}
