"""index.html as text: whole without scripts, closed to the network, and what it holds."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.report.write import ReportSummary
from tests.helpers.report_rows import PSNR, approved

VOID = {"meta", "link", "input", "img", "br", "hr"}


class Reader(HTMLParser):
    """Elements with their attributes and texts, and tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.wrong: list[str] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self._open.append((tag, self.elements[-1][2]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop()[0] != tag:
            self.wrong.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        for _, texts in self._open:
            texts.append(data)

    def found(self, tag: str, **has: str) -> Iterator[tuple[dict[str, str], str]]:
        """Attributes and text of the elements of a tag that have these attributes."""
        for name, attributes, texts in self.elements:
            if name == tag and has.items() <= attributes.items():
                yield attributes, " ".join("".join(texts).split())

    def data(self) -> dict[str, Any]:
        """What the script reads."""
        ((_, text),) = self.found("script", type="application/json")
        found: dict[str, Any] = json.loads(text)
        return found


@pytest.fixture(scope="module")
def page(page_folder: Path) -> Reader:
    return Reader((page_folder / "index.html").read_text(encoding="utf-8"))


def test_the_page_has_the_approved_structure(page: Reader) -> None:
    """Sections, tables, charts and controls in their order, without what they hold; first the
    answer, then the pictures."""
    shown = ("section", "h2", "figure", "table", "details", "form", "button", "dialog")
    lines = []
    for tag, has, texts in page.elements:
        if tag in shown:
            text = "".join(texts) if tag in ("h2", "button") else ""
            lines.append(f"{tag} {has.get('id', '')} {text}".rstrip() + "\n")
    approved("page.txt", "".join(lines))
    wanted = ["verdict", "assumptions", "strip", "card-table", "table5"]
    seen = [has.get("class") or has.get("id") for _, has, _ in page.elements]
    assert [name for name in seen if name in wanted] == wanted


def test_elements_are_closed_ids_are_unique_and_links_lead_somewhere(page: Reader) -> None:
    assert page.wrong == []
    ids = [has["id"] for _, has, _ in page.elements if "id" in has]
    assert len(ids) == len(set(ids))
    inside = [has["href"][1:] for has, _ in page.found("a") if has["href"].startswith("#")]
    assert {target for target in inside if "=" not in target} <= set(ids)
    levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert all(later - earlier <= 1 for earlier, later in pairwise([0, *levels]))
    assert all(has.get("alt") for has, _ in page.found("img"))


def test_no_request_leaves_it_and_no_other_script_runs(page: Reader) -> None:
    """Addresses and handlers, also of strangers: test_hostile_words.py."""
    ((policy, _),) = page.found("meta", **{"http-equiv": "Content-Security-Policy"})
    ((_, _), (_, _)) = page.found("script")
    script = next(
        "".join(texts) for tag, has, texts in page.elements if tag == "script" and not has
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(part.strip().split(" ", 1) for part in policy["content"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"


def test_every_file_is_there_and_linked(page: Reader, written: tuple[Path, ReportSummary]) -> None:
    out, summary = written
    made = {path.relative_to(out).as_posix() for path in summary.files}
    assert made == {
        *("index.html", "samples.csv", "pictures/index.csv"),
        *(f"table{number}.{kind}" for number in ("", "5") for kind in ("md", "tex", "csv")),
        "figures/success.svg",
    }
    assert summary.files[0] == out / "index.html"
    assert all(path.stat().st_size for path in summary.files)
    assert not list(out.rglob("*.tmp"))
    assert made - {has["href"] for has, _ in page.found("a") if "download" in has} == {"index.html"}


def test_the_page_holds_the_pictures_that_it_shows(page: Reader) -> None:
    kept = {key for key, _ in page.data()["pictures"]}
    assert {lines["made"] for shown in page.data()["shown"] for _, lines in shown["lines"]} <= kept
    assert len(list(page.found("img"))) == 3 * 5  # images times columns of the strip
    assert len(page.data()["shown"]) == 4


def test_the_script_gets_every_score(page: Reader) -> None:
    lines = {line["number"]: line for line in page.data()["lines"]}
    for number, psnr in enumerate(PSNR.values(), 1):
        known = [v for v in lines[number]["scores"].get("psnr", []) if v is not None]
        read = [math.inf if v == "Infinity" else v for v in known]
        assert read == [value for value in psnr if isinstance(value, float)]
    assert lines[2]["exact"] == [int(value == math.inf) for value in PSNR["pixel_lattice"]]
    assert [text for _, text in page.found("tr", id="line-5") if "failed" in text]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours `#rrggbb`."""

    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_has_the_contrast_of_wcag_aa_in_light_and_dark(page: Reader) -> None:
    style = next(text for _, text in page.found("style"))
    schemes = re.findall(r":root \{([^}]*--ink[^}]*)\}", style)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
        for text in ("ink", "muted", "accent", "warm"):
            for ground in ("paper", "band", "warm-band"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
