"""index.html in a real browser: nothing is fetched, nothing overflows, what can be used works."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.report.write import write_report
from tests.helpers.report_rows import HOSTILE, image_id, synthetic_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

DRIVER = """<!doctype html><meta charset="utf-8"><body style="margin: 0">
<iframe src="{page}" style="border: 0; width: {width}px; height: {height}px"></iframe>
<pre></pre>
<script>
const frame = document.querySelector('iframe');
const pause = () => new Promise((done) => setTimeout(done, 300));
frame.addEventListener('load', async () => {{
  const page = frame.contentWindow, doc = page.document;
  const all = (selector) => [...doc.querySelectorAll(selector)];
  const one = (selector) => doc.querySelector(selector);
  const lines = () => all('#lines tbody tr').filter((row) => !row.hidden)
    .map((row) => Number(row.cells[0].textContent));
  const answer = await (async () => {{ {script} }})();
  document.querySelector('pre').textContent = JSON.stringify(answer);
}}, {{once: true}});
</script>"""
"""A page that holds the report in a frame, and leaves as text what its script returns."""
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"),
    *("--disable-web-security", "--allow-file-access-from-files"),  # the script sees the frame
    *("--enable-logging=stderr", "--virtual-time-budget=20000"),
)
Ran = Callable[..., Any]


@pytest.fixture
def ran(page_folder: Path, tmp_path: Path) -> Ran:
    """What a script returns on a report's page, which may say nothing on the console but what
    matches `complaint`."""

    def run(
        script: str,
        folder: Path = page_folder,
        size: tuple[int, int] = (1280, 900),
        place: str = "",
        complaint: str = "$.",
    ) -> Any:
        address = (folder / "index.html").resolve().as_uri() + place
        driver = tmp_path / "driver.html"
        width, height = size
        driver.write_text(
            DRIVER.format(page=html.escape(address), width=width, height=height, script=script)
        )
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
        done = subprocess.run(
            [*command, driver.as_uri()], capture_output=True, text=True, timeout=120
        )
        said = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
        assert [line for line in said if not re.search(complaint, line)] == []
        assert (complaint == "$.") == (said == [])
        (answer,) = re.findall("<pre>(.+)</pre>", done.stdout, re.DOTALL)
        return json.loads(html.unescape(answer))

    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two runs of the same cells, one under names that are markup."""
    root = tmp_path_factory.mktemp("others")
    synthetic_run(root / "<img src=x>", model=HOSTILE)
    synthetic_run(root / "again")
    write_report([root / "<img src=x>", root / "again"], root / "two")
    return root / "two"


def test_no_width_overflows_and_nothing_is_fetched(ran: Ran, page_folder: Path, two: Path) -> None:
    script = """
      const found = [];
      for (const width of [390, 1280, 1920]) {
        frame.style.width = width + 'px';
        await pause();
        found.push(doc.documentElement.scrollWidth <= width);
        found.push(one('nav').scrollWidth <= one('nav').clientWidth);
      }
      const scripted = doc.documentElement.classList.contains('js');
      return [found, scripted, page.performance.getEntriesByType('resource').length];
    """
    for folder in (page_folder, two):
        assert ran(script, folder) == [[True] * 6, True, 0]


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_verdict_attacker_and_pictures_are_on_the_first_screen(
    ran: Ran, size: tuple[int, int]
) -> None:
    script = """
      return ['.verdict', '.assumptions', '.strip tbody tr'].map(
        (selector) => one(selector).getBoundingClientRect().bottom);
    """
    assert max(ran(script, size=size)) <= size[1]


def test_a_click_sorts_as_numbers_with_the_missing_last(ran: Ran) -> None:
    start, down, up, order, again = ran("""
      const head = (name) => all('#lines th').find((h) => h.textContent.startsWith(name));
      const sorted = (name) => { head(name).querySelector('button').click(); return lines(); };
      const start = lines(), down = sorted('PSNR'), up = sorted('PSNR');
      return [start, down, up, head('PSNR').ariaSort, sorted('#')];
    """)
    assert down != start
    assert sorted(down) == start == again
    assert (order, up[0]) == ("ascending", 1)  # the published attack


def test_filters_hide_lines_and_say_how_many_are_left(ran: Ran) -> None:
    start, left, count, again = ran("""
      const start = lines(), words = one('#filter-text');
      words.value = 'patch_gradient';
      words.dispatchEvent(new page.Event('input', {bubbles: true}));
      await pause();
      const left = lines(), count = one('#lines-count').textContent;
      one('#filters [type=reset]').click();
      await pause();
      return [start, left, count, lines()];
    """)
    assert left == [7]
    assert count.startswith("1 of ")
    assert again == start


def test_a_line_leads_to_its_pictures_and_one_to_all_that_attacks_made(ran: Ran) -> None:
    alts, is_open, texts, chosen, titles = ran("""
      page.location.hash = '#line=2';
      await pause();
      const alts = all('#gallery figure img').map((image) => image.alt);
      one('#gallery a').click();
      await pause();
      const title = () => one('#image-title').textContent, first = title();
      const is_open = one('#image-dialog').open;
      const texts = all('#image-grid figure').map((figure) => figure.innerText);
      const chosen = one('#image-grid .chosen').dataset.line;
      one('#image-dialog').dispatchEvent(
        new page.KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
      await pause();
      return [alts, is_open, texts, chosen, [first, title()]];
    """)
    assert len(alts) == 4
    assert alts[0].endswith("21.00 dB")
    assert alts[-1].endswith("exact")
    assert is_open
    assert texts[0] == "original"
    assert any(text.startswith("fed by ") for text in texts)
    assert chosen == "2"
    assert titles[0] != titles[1]


def test_mask_and_error_are_drawn_on_demand(ran: Ran) -> None:
    seen, squares, brighter = ran(
        """
      await pause();
      const chosen = (part) => one('#image-grid .chosen ' + part), seen = [];
      for (const [shows, part] of [['masks', 'svg'], ['errors', '.target']]) {
        seen.push(page.getComputedStyle(chosen(part)).visibility);
        one(`[data-shows=${shows}]`).click();
        seen.push(page.getComputedStyle(chosen(part)).visibility);
      }
      const filter = page.getComputedStyle(chosen('.pair')).filter;
      return [seen, chosen('path').getAttribute('d'), filter];
    """,
        place=f"#image={image_id(0)}&line=1",
    )
    assert seen == ["hidden", "visible"] * 2
    assert re.findall(r"M(\d) (\d)", squares) == [("0", str(row)) for row in range(4)]
    assert brighter == "brightness(4)"


def test_an_address_opens_its_view(ran: Ran) -> None:
    assert ran("await pause(); return !one('#line-4').hidden;", place="#line-4")
    script = "await pause(); return one('#image-dialog').open;"
    assert not ran(script, place="#image=no%20such&line=99%")


def test_hostile_names_run_nothing(ran: Ran, two: Path) -> None:
    """Nor would what got in all the same: a policy forbids it."""
    shown, line, elements, is_harmless = ran(
        """
      await pause();
      const shown = one('#image-grid').innerText, line = one('#gallery-line').innerText;
      const elements = all('img[src=x]').length;
      doc.body.insertAdjacentHTML('beforeend', '<img src=x onerror="bad=1">');
      await pause();
      return [shown, line, elements, page.bad === undefined];
    """,
        two,
        place=f"#image={image_id(0)}&line=1",
        complaint="Content Security Policy",
    )
    assert "<script>" in shown
    assert "<img src=x>" in line
    assert (elements, is_harmless) == (0, True)
