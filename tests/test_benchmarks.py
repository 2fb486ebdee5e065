"""The page of the benchmarks says what their results hold."""

from pathlib import Path

import pytest

from benchmarks import growth, page
from benchmarks.alternating import Timing, ratio

RESULTS = sorted(file.stem for file in page.RESULTS.glob("*.json"))


def test_the_page_holds_the_tables_of_the_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text) == text, "python -m benchmarks.page writes it again"


@pytest.mark.parametrize("name", page.TABLES)
def test_every_table_has_its_place_and_its_results(name: str) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert f"<!-- table: {name} begin -->" in text
    assert name in RESULTS


def test_an_exponent_is_that_of_the_power() -> None:
    k, error = growth.exponent((1, 2, 4, 8), (3, 12, 48, 192))
    assert k == pytest.approx(2)
    assert error == pytest.approx(0, abs=1e-9)
    noisy, spread = growth.exponent((1, 2, 4, 8), (3, 13, 45, 200))
    assert abs(noisy - 2) < 3 * spread


def test_a_ratio_is_the_median_of_the_repeats_own() -> None:
    slow, fast = Timing([4.0, 9.0, 8.0], []), Timing([1.0, 3.0, 1.0], [])
    assert ratio(slow, fast) == {"median": 4.0, "min": 3.0, "max": 8.0}


def test_results_name_no_machine(tmp_path: Path) -> None:
    import socket

    for name in RESULTS:
        assert socket.gethostname() not in (page.RESULTS / f"{name}.json").read_text()
