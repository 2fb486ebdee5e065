"""index.html in a real browser: nothing is fetched, nothing overflows, what can be used works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from mjp_privacy.report.page.content import PageContent
from mjp_privacy.report.page.render import render_page
from mjp_privacy.report.tables.text import number
from tests.helpers.browser import Browser, chromium
from tests.helpers.page_content import PSNR, hostile_page, line, page_content, recorded_page

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium is installed (looked for chromium, google-chrome)"
)

SHOWN = "[...document.querySelectorAll('#lines tbody tr')].filter((r) => !r.hidden)"
NUMBERS = f"{SHOWN}.map((r) => Number(r.dataset.line))"
FOCUS = "document.activeElement.getAttribute('aria-label')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three made-up pages, written once."""
    made = tmp_path_factory.mktemp("pages")
    for build in (page_content, hostile_page, recorded_page):
        write(made / f"{build.__name__}.html", build())
    write(made / "two_runs.html", two_runs())
    return made


def write(file: Path, content: PageContent) -> None:
    file.write_text(render_page(content), encoding="utf-8")


def two_runs() -> PageContent:
    """The page with line 2 made again in another run, 3 dB better where it was not exact."""
    content = page_content()
    psnr = tuple(value + 3 for value in PSNR[2])
    again = line(40, "pixel_lattice", psnr, run="runs/again", remark="=SUM(A1)")
    shown = {**content.scores, 40: {"psnr": psnr}}
    first = [found for found in content.lines if found.number == 2]
    others = [found for found in content.lines if found.number != 2]
    return replace(content, lines=(*first, *others, again), scores=shown)


@pytest.fixture
def page(browser: Browser, folder: Path) -> Iterator[Browser]:
    """The usual page, at 1280 points; it must not complain whatever a test does to it."""
    browser.screen(1280, 800)
    browser.open(folder / "page_content.html")
    yield browser
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("file:")] == []


@pytest.mark.parametrize("name", ["page_content", "hostile_page", "recorded_page"])
@pytest.mark.parametrize("dark", [False, True])
def test_no_width_overflows_and_nothing_is_asked_of_a_server(
    browser: Browser, folder: Path, name: str, dark: bool
) -> None:
    for width in (390, 1280, 1920):
        browser.screen(width, 800, dark=dark)
        browser.open(folder / f"{name}.html")
        assert browser.run("document.documentElement.classList.contains('js')")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.complaints() == []
        assert browser.requests() == [(folder / f"{name}.html").as_uri()]


def test_the_answer_and_the_strip_are_on_the_first_screen(page: Browser) -> None:
    for selector in (".sentence", ".card-table", ".strip"):
        bottom = page.run(f"document.querySelector('{selector}').getBoundingClientRect().bottom")
        assert bottom <= 800, selector


def test_a_click_sorts_as_numbers_with_the_missing_last_both_ways(page: Browser) -> None:
    assert page.run(NUMBERS) == [1, 2, 10, 12, 30]
    page.click("th[data-key=psnr] button")
    assert page.run(NUMBERS) == [30, 10, 2, 1, 12]
    state = "document.querySelector('th[data-key=psnr]').ariaSort"
    assert page.run(state) == "descending"
    page.click("th[data-key=psnr] button")
    assert page.run(NUMBERS) == [1, 2, 10, 30, 12]
    assert page.run(state) == "ascending"
    page.click("th[data-key=uploads] button")
    assert page.run(NUMBERS) == [1, 2, 12, 30, 10]
    page.click("th[data-key=attack] button")
    assert page.run(NUMBERS) == [1, 30, 12, 2, 10]
    assert page.run(state) == "none"


def test_filters_hide_lines_and_say_how_many_are_left(page: Browser) -> None:
    count = "document.getElementById('lines-count').textContent"
    assert page.run(count) == "5 of 7 lines shown"
    page.click("#filter-folded")
    assert page.run(count) == "7 of 7 lines shown"
    choose(page, "filter-client", "=plain")
    assert page.run(NUMBERS) == [30]
    page.click("#filter-reset")
    assert page.run(count) == "5 of 7 lines shown"
    page.click("#filter-text")
    page.send("Input.insertText", text="lattice MJP")
    assert page.run(NUMBERS) == [2, 10]
    choose(page, "filter-gamma", "=0")
    assert page.run(count) == "0 of 7 lines shown"
    assert not page.run("document.getElementById('lines-none').hidden")


def choose(page: Browser, identifier: str, value: str) -> None:
    page.run(
        f"(() => {{ const s = document.getElementById('{identifier}');"
        f"s.value = {json.dumps(value)};"
        "s.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_the_keyboard_opens_a_lines_pictures_and_escape_gives_the_focus_back(page: Browser) -> None:
    page.run("document.querySelector('#line-2 button.open').focus()")
    page.press("Enter")
    page.until("document.getElementById('line-dialog').open")
    shown = page.run(
        "[...document.querySelectorAll('#line-dialog figure')].map((f) =>"
        " [f.querySelector('img').alt, f.innerText.replace(/\\s+/g, ' ')])"
    )
    assert [alt for alt, _ in shown] == [  # by PSNR; two count as 100 and keep their order
        *("rocket, 21.0 dB", "chelsea, 24.5 dB", "astronaut, ≥ 100 dB", "coffee, ≥ 100 dB"),
    ]
    # A quantile of 4 scores stands at 0, .15, .75, 1.5, 2.25, 2.85 and 3 of their places; equal
    # scores are told apart by their place.
    marks = [re.sub(r".*dB( · exact)? ?", "", text) for _, text in shown]
    assert marks == ["lowest 5 %", "25 %", "median 75 %", "95 % highest"]
    assert "exact" in shown[3][1]
    assert page.run("location.hash") == "#line=2"
    page.press("Tab")
    page.press("Enter")
    page.until("document.getElementById('image-dialog').open")
    assert page.run("location.hash") == "#image=rocket&line=2"
    page.press("Escape")
    page.until("!document.getElementById('image-dialog').open")
    assert page.run("document.getElementById('line-dialog').open")
    page.press("Escape")
    page.until("!document.getElementById('line-dialog').open")
    assert page.run(FOCUS) == "Pictures of line 2"


def test_a_picture_shows_every_attack_with_its_scores(page: Browser) -> None:
    page.click(".strip img[data-key='coffee/2']")
    page.until("document.getElementById('image-dialog').open")
    figures = "[...document.querySelectorAll('#image-dialog figure')]"
    texts = page.run(f"{figures}.filter((f) => f.offsetParent).map((f) => f.innerText)")
    assert texts[0] == "original"
    assert texts[1].startswith("fed by ")
    assert [text.split("\n")[0] for text in texts[2:]] == [
        *("APRIL as published", "pixel_lattice exact", "rounds_lattice exact", "closed form exact"),
    ]
    assert re.search(r"PSNR\s+7\.2 dB", texts[2])  # 7.25, as the strip writes it
    assert re.search(r"SSIM\s+0\.0725", texts[2])
    assert page.run(f"{figures}.find((f) => f.matches('.chosen')).dataset.line") == "2"
    page.click("#image-after")
    page.until("document.getElementById('image-dialog-title').textContent === 'rocket'")


def test_the_mask_and_the_error_are_drawn_where_they_are(page: Browser) -> None:
    page.run("location.hash = '#image=coffee&line=1'")
    page.until("document.getElementById('image-dialog').open")
    page.click("#show-mask")
    canvas = "document.querySelector('#image-dialog [data-line=\"1\"] canvas.{}')"
    page.until(f"{canvas.format('mask')} !== null")
    drawn = canvas.format("mask") + ".getContext('2d').getImageData(0, 0, 96, 96).data"
    middles = (
        "[...Array(36).keys()].map((p) => 4 * (96 * (8 + 16 * (p / 6 | 0)) + 8 + 16 * (p % 6)))"
    )
    alphas = page.run(f"(() => {{ const d = {drawn}; return {middles}.map((i) => d[i + 3]); }})()")
    assert [alpha > 0 for alpha in alphas] == [place % 4 == 0 for place in range(36)]
    page.click("#show-mask")
    page.click("#show-error")
    page.until(f"{canvas.format('error')} !== null && {canvas.format('mask')} === null")
    sums = (
        '[1, 10].map((n) => document.querySelector(`#image-dialog [data-line="${n}"] canvas.error`)'
        ".getContext('2d').getImageData(0, 0, 96, 96).data.reduce((a, b) => a + b, 0))"
    )
    page.until("document.querySelectorAll('#image-dialog canvas.error').length >= 5")
    bad, exact = page.run(sums)
    assert exact == 96 * 96 * 255  # opaque black
    assert bad > exact * 1.5


def test_in_setting_b_the_error_is_against_what_was_fed(browser: Browser, tmp_path: Path) -> None:
    content = page_content()
    lines = tuple(replace(found, setting="b") for found in content.lines)
    fed = content.pictures["coffee/fed"]
    write(
        tmp_path / "b.html",
        replace(content, lines=lines, pictures={**content.pictures, "coffee/1": fed}),
    )
    browser.open(tmp_path / "b.html", "#image=coffee&line=1")
    browser.click("#show-error")
    browser.until("document.querySelectorAll('#image-dialog canvas.error').length >= 5")
    sums = (
        '[1, 10].map((n) => document.querySelector(`#image-dialog [data-line="${n}"] canvas.error`)'
        ".getContext('2d').getImageData(0, 0, 96, 96).data.reduce((a, b) => a + b, 0))"
    )
    same, turned = browser.run(sums)
    assert same == 96 * 96 * 255
    assert turned > same * 1.2


def test_lines_of_the_chosen_client_stand_first(page: Browser) -> None:
    page.run("location.hash = '#image=coffee&line=30'")
    page.until("document.getElementById('image-dialog').open")
    order = "[...document.querySelectorAll('#image-dialog figure[data-line]')]"
    assert page.run(f"{order}.map((f) => Number(f.dataset.line))") == [30, 1, 2, 10, 11, 20]


def test_the_scripts_write_numbers_as_the_tables_do(page: Browser) -> None:
    source = (files("mjp_privacy.report.page") / "assets" / "data.js").read_text(encoding="utf-8")
    functions = re.findall(r"^function (?:numberText|halfToEven)\(.*?^}$", source, re.M | re.S)
    values = [7.25, 0.125, 0.375, 2.675, 1.005, -0.5, 2.5, 1e-5, -3e-7, 0.0, 99.995, 1234.5]
    values += [float(v) for v in np.random.default_rng(0).normal(0, 30, 200)]
    assert len(functions) == 2
    for decimals in range(1, 5):
        written = f"{values}.map((v) => numberText(v, {decimals}))"
        found = page.run(f"{{ const DASH = '–'; {' '.join(functions)} {written} }}")
        assert found == [number(value, decimals) for value in values]


def test_an_address_opens_its_view(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page_content.html", "#image=chelsea&line=10")
    browser.until("document.getElementById('image-dialog').open")
    assert browser.run("document.getElementById('image-dialog-title').textContent") == "chelsea"
    browser.open(folder / "page_content.html", "#line-11")
    assert not browser.run("document.getElementById('line-11').hidden")
    browser.open(folder / "page_content.html", "#image=no%20such&line=99%")
    assert not browser.run("document.getElementById('image-dialog').open")
    assert browser.complaints() == []


def test_two_runs_are_compared_on_their_common_pictures(browser: Browser, folder: Path) -> None:
    browser.screen(1280, 800)
    browser.open(folder / "two_runs.html")
    chosen = "['first', 'second'].map((s) => document.getElementById(`compare-${s}`).value)"
    assert browser.run(chosen) == ["2", "40"]
    rows = (
        "[...document.querySelectorAll('#compare-result tr')]"
        ".map((r) => [...r.cells].map((c) => c.textContent))"
    )
    found = browser.run(rows)
    assert found[1] == ["PSNR", "61.38", "62.88", "+1.50", "+1.50", "4"]
    assert found[2][-1] == "0"  # the second line has no SSIM
    assert found[-4:-2] == [
        ["chelsea", "24.50", "27.50", "+3.00"],
        ["rocket", "21.00", "24.00", "+3.00"],
    ]


def test_the_csv_holds_what_is_shown_and_no_formula(browser: Browser, folder: Path) -> None:
    browser.open(folder / "two_runs.html")
    browser.run("URL.createObjectURL = (blob) => { window.saved = blob; return 'data:,'; }")
    browser.run("HTMLAnchorElement.prototype.click = function () {}")
    choose(browser, "filter-run", "=runs/again")
    browser.click("#download-csv")
    header, row = browser.run("saved.text()").lstrip("\ufeff").strip().split("\r\n")
    cells = dict(zip(header.split(","), row.split(","), strict=True))
    assert cells["number"] == "40"
    assert float(cells["psnr_mean"]) == pytest.approx((100 + 27.5 + 100 + 24) / 4)
    assert cells["remark"] == "'=SUM(A1)"
    choose(browser, "filter-run", "")
    assert len(browser.run("(document.getElementById('download-csv').click(), saved.text())")) > 0


def test_hostile_names_run_nothing(browser: Browser, folder: Path) -> None:
    browser.screen(1280, 800)
    browser.open(folder / "hostile_page.html")
    browser.click("#gallery a")
    browser.until("document.getElementById('image-dialog').open")
    assert "<img src=x" in browser.run("document.getElementById('image-dialog-title').textContent")
    browser.press("Escape")
    browser.click("#line-1 button.open")
    browser.until("document.getElementById('line-dialog').open")
    assert browser.run("document.querySelectorAll('img[src=x]').length") == 0
    assert browser.complaints() == []


def test_a_script_that_is_not_the_pages_own_does_not_run(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page_content.html")
    browser.run(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.bad=1\">')"
    )
    browser.until("performance.now() > 0")
    assert any("Content Security Policy" in text for text in browser.complaints())
    assert browser.run("window.bad === undefined")


def test_recorded_uploads_open_without_an_original(browser: Browser, folder: Path) -> None:
    browser.screen(1280, 800)
    browser.open(folder / "recorded_page.html")
    browser.click("#gallery a")
    browser.until("document.getElementById('image-dialog').open")
    text = browser.run("document.getElementById('image-dialog').innerText")
    assert "recorded uploads come without truth" in text
    assert re.search(r"gradient residual\s+0\.0100", text)
    assert browser.run("document.getElementById('show-error').disabled")
    assert browser.complaints() == []


def test_the_page_prints_with_its_details_open(page: Browser) -> None:
    page.run(
        "addEventListener('beforeprint', () => { window.open_then = "
        "document.querySelectorAll('details[open]').length; })"
    )
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 0
    assert page.run("open_then") == 3
    assert page.run("document.querySelectorAll('details[open]').length") == 0
