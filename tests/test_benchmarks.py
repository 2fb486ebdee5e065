"""The page of the benchmarks says what their results hold."""

import socket

from benchmarks import pipeline as page
from benchmarks.pipeline import Timing, ratio


def test_the_page_holds_the_tables_of_the_results_which_name_no_machine() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text) == text
    results = list(page.RESULTS.glob("*.json"))
    assert len(results) == text.count("<!-- table: ") / 2
    for file in results:
        assert f"<!-- table: {file.stem} begin -->" in text
        assert socket.gethostname() not in file.read_text(encoding="utf-8")


def test_a_ratio_is_the_median_of_the_repeats() -> None:
    slow, fast = Timing([4.0, 9.0, 8.0], []), Timing([1.0, 3.0, 1.0], [])
    assert ratio(slow, fast) == {"median": 4.0, "min": 3.0, "max": 8.0}
