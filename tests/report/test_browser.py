"""index.html in a real browser: nothing is fetched, nothing overflows, what can be used works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mjp_privacy.report.write import write_report
from tests.helpers.browser import Browser, chromium
from tests.helpers.report_rows import HOSTILE, image_id, synthetic_run

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]

NUMBERS = (
    "[...document.querySelectorAll('#lines tbody tr')].filter((r) => !r.hidden)"
    ".map((r) => Number(r.cells[0].textContent))"
)
DIALOG = "document.getElementById('image-dialog')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two runs of the same cells, one under names that are markup."""
    root = tmp_path_factory.mktemp("others")
    synthetic_run(root / "<img src=x>", model=HOSTILE)
    synthetic_run(root / "again")
    write_report([root / "<img src=x>", root / "again"], root / "two")
    return root


@pytest.fixture
def page(browser: Browser, page_folder: Path) -> Iterator[Browser]:
    """The usual page, at 1280 points; it must not complain whatever a test does to it."""
    browser.screen(1280, 900)
    browser.open(page_folder / "index.html")
    yield browser
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("file:")] == []


@pytest.mark.parametrize("dark", [False, True])
def test_no_width_overflows_and_nothing_is_asked_of_a_server(
    browser: Browser, page_folder: Path, others: Path, dark: bool
) -> None:
    for file in (page_folder, others / "two"):
        for width in (390, 1280, 1920):
            browser.screen(width, 800, dark=dark)
            browser.open(file / "index.html")
            assert browser.run("document.documentElement.classList.contains('js')")
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.complaints() == []
            assert browser.requests() == [(file / "index.html").as_uri()]


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_verdict_attacker_and_pictures_are_on_the_first_screen(
    browser: Browser, page_folder: Path, size: tuple[int, int]
) -> None:
    browser.screen(*size)
    browser.open(page_folder / "index.html")
    for selector in (".verdict", ".assumptions", ".strip tbody tr"):
        bottom = browser.run(f"document.querySelector('{selector}').getBoundingClientRect().bottom")
        assert bottom <= size[1], selector


def test_a_click_sorts_as_numbers_with_the_missing_last(page: Browser) -> None:
    head = "[...document.querySelectorAll('#lines th')].find((h) => h.textContent.startsWith('{}'))"
    start = page.run(NUMBERS)
    page.run(f"{head.format('PSNR')}.querySelector('button').click()")
    down = page.run(NUMBERS)
    assert down != start
    assert sorted(down) == start
    page.run(f"{head.format('PSNR')}.querySelector('button').click()")
    assert page.run(f"{head.format('PSNR')}.ariaSort") == "ascending"
    assert page.run(NUMBERS)[0] == 1  # the published attack
    page.run(f"{head.format('#')}.querySelector('button').click()")
    assert page.run(NUMBERS) == start


def test_filters_hide_lines_and_say_how_many_are_left(page: Browser) -> None:
    start = page.run(NUMBERS)
    page.click("#filter-text")
    page.send("Input.insertText", text="patch_gradient")
    assert page.run(NUMBERS) == [7]
    assert page.run("document.getElementById('lines-count').textContent").startswith("1 of ")
    page.click("#filters [type=reset]")
    page.until(f"{NUMBERS}.length === {len(start)}")


def test_a_line_leads_to_its_pictures_and_one_to_all_that_attacks_made(page: Browser) -> None:
    page.run("location.hash = '#line=2'")
    page.until("document.querySelectorAll('#gallery figure').length === 4")
    alts = page.run("[...document.querySelectorAll('#gallery img')].map((i) => i.alt)")
    assert alts[0].endswith("21.00 dB")
    assert alts[-1].endswith("exact")
    page.run("document.querySelector('#gallery a').focus()")
    page.press("Enter")
    page.until(f"{DIALOG}.open")
    texts = page.run("[...document.querySelectorAll('#image-grid figure')].map((f) => f.innerText)")
    assert texts[0] == "original"
    assert any(text.startswith("fed by ") for text in texts)
    assert page.run("document.querySelector('#image-grid .chosen').dataset.line") == "2"
    title = page.run("document.getElementById('image-title').textContent")
    page.press("ArrowRight")
    page.until(f"document.getElementById('image-title').textContent !== {json.dumps(title)}")
    page.press("Escape")
    page.until(f"!{DIALOG}.open")


def test_mask_and_error_are_drawn_on_demand(page: Browser) -> None:
    page.run(f"location.hash = '#image={image_id(0)}&line=1'")
    page.until(f"{DIALOG}.open")
    chosen = "document.querySelector('#image-grid .chosen {}')"
    seen = "getComputedStyle({}).visibility"
    for shows, selector in (("masks", "svg"), ("errors", ".target")):
        assert page.run(seen.format(chosen.format(selector))) == "hidden"
        page.click(f"[data-shows={shows}]")
        assert page.run(seen.format(chosen.format(selector))) == "visible"
    squares = page.run(chosen.format("path") + ".getAttribute('d')")
    assert re.findall(r"M(\d) (\d)", squares) == [("0", str(row)) for row in range(4)]
    assert page.run(f"getComputedStyle({chosen.format('.pair')}).filter") == "brightness(4)"


def test_an_address_opens_its_view(browser: Browser, page_folder: Path) -> None:
    browser.open(page_folder / "index.html", "#line-4")
    assert not browser.run("document.getElementById('line-4').hidden")
    browser.open(page_folder / "index.html", "#image=no%20such&line=99%")
    assert not browser.run(f"{DIALOG}.open")
    assert browser.complaints() == []


def test_hostile_names_run_nothing(browser: Browser, others: Path) -> None:
    browser.open(others / "two" / "index.html", f"#image={image_id(0)}&line=1")
    browser.until(f"{DIALOG}.open")
    assert "<script>" in browser.run("document.getElementById('image-grid').innerText")
    assert "<img src=x>" in browser.run("document.getElementById('gallery-line').innerText")
    assert browser.run("document.querySelectorAll('img[src=x]').length") == 0
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"bad=1\">')")
    browser.until("performance.now() > 0")
    assert browser.run("window.bad === undefined")
    assert any("Content Security Policy" in text for text in browser.complaints())


def test_the_page_prints(page: Browser) -> None:
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 0
