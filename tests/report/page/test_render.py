"""index.html as text: whole without scripts, closed to the network, safe from what a run says."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from mjp_privacy.report.notes import Flag
from mjp_privacy.report.page.data import script_json
from mjp_privacy.report.page.render import render_page
from mjp_privacy.report.page.terms import Terms
from tests.helpers.page_content import (
    HOSTILE,
    NAMES,
    PSNR,
    hostile_page,
    line,
    page_content,
    recorded_page,
)

VOID = {"meta", "link", "input", "img", "br", "hr", "path"}


class Reader(HTMLParser):
    """Elements with their attributes, the text of each, and tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.wrong: list[str] = []
        self._open: list[tuple[str, int]] = []
        self.feed(text)
        self.wrong += [tag for tag, _ in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        if tag not in VOID:
            self._open.append((tag, len(self.texts) - 1))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1][0] != tag:
            self.wrong.append(f"</{tag}>")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for _, place in self._open:
            self.texts[place] += data

    def found(self, tag: str, **attributes: str) -> Iterator[tuple[dict[str, str | None], str]]:
        """Attributes and text of the elements of a tag that have these attributes."""
        for (name, has), text in zip(self.elements, self.texts, strict=True):
            if name == tag and all(has.get(key) == value for key, value in attributes.items()):
                yield has, text

    def text(self, tag: str, **attributes: str) -> str:
        """The text of the only such element, white space made one blank."""
        (found,) = self.found(tag, **attributes)
        return " ".join(found[1].split())


@pytest.fixture(scope="module")
def page() -> Reader:
    return Reader(render_page(page_content()))


@pytest.mark.parametrize("content", [page_content, hostile_page, recorded_page])
def test_every_element_is_closed_and_every_id_is_there_once(content) -> None:
    page = Reader(render_page(content()))
    assert page.wrong == []
    identifiers = [has["id"] for _, has in page.elements if "id" in has]
    assert len(identifiers) == len(set(identifiers))


def test_links_inside_the_page_lead_somewhere(page: Reader) -> None:
    identifiers = {has["id"] for _, has in page.elements if "id" in has}
    targets = {str(has["href"])[1:] for has, _ in page.found("a") if "=" not in str(has["href"])}
    inside = {
        target for target in targets if f"#{target}" in {h["href"] for h, _ in page.found("a")}
    }
    assert inside > {"ladder", "line-2", "flag-1", "term-γ", "term-setting-c"}
    assert inside <= identifiers


def test_the_card_says_each_figure_with_its_interval_and_counts(page: Reader) -> None:
    cells = [" ".join(text.split()) for _, text in page.found("td", **{"role": "cell"})]
    assert len(cells) == 8
    # Line 2: inf and 100.5 count as 100, so (100 + 24.5 + 100 + 21) / 4 = 61.375.
    assert cells[5].startswith("2 of 4 exactly2 all at 20 dB or more mean 61.4 dB [60.1, 62.9]")
    assert "7.2 dB [5.9, 8.7]" in cells[4]
    assert cells[0] == "not run"
    classes = [str(has["class"]) for has, _ in page.found("td", **{"role": "cell"})]
    assert classes[:4] == ["none", "leaked", "none", "at-floor"]
    assert classes[4:] == ["at-floor", "leaked", "leaked", "at-floor"]


def test_the_answer_stands_first_and_what_stands_beside_it_after(page: Reader) -> None:
    card = page_content().card
    assert page.text("p", **{"class": "sentence"}) == card.verdict
    assert page.text("p", **{"class": "beside assumptions"}) == card.assumptions
    assert page.text("p", **{"class": "beside"}) == card.beside


def test_a_lines_median_is_capped_as_its_mean_is() -> None:
    content = page_content()
    last = replace(content.lines[-1], median_psnr=134.81)
    page = Reader(render_page(replace(content, lines=(*content.lines[:-1], last))))
    assert "134.81" not in page.text("tr", id="line-30")
    assert data_of(page)["lines"][-1]["median_psnr"] == 100
    assert data_of(page)["lines"][4]["median_psnr"] is None  # line 12 did not run


def test_the_bars_of_the_card_are_the_shares(page: Reader) -> None:
    widths = [has["style"] for has, _ in page.found("b") if "style" in has]
    shares = ("100.00", "0.00", "50.00", "100.00")  # a floor has none
    assert widths == [f"width:{share}%" for share in shares]


def test_a_cell_between_floor_and_exact_is_neither_warm_nor_muted() -> None:
    content = page_content()
    row = content.card.rows[1]
    assert row.one_upload is not None
    some = replace(row.one_upload, exact=0)
    card = replace(content.card, rows=(replace(row, one_upload=some),))
    cells = list(Reader(render_page(replace(content, card=card))).found("td", role="cell"))
    assert cells[1][0]["class"] == "partly"


def test_flags_are_explained_and_a_lines_own_flag_too() -> None:
    content = page_content()
    own = Flag("own", "noise not modelled", "The client adds noise.")
    last = replace(content.lines[-1], marks=("own", "unknown"))
    content = replace(content, flags=(own,), lines=(*content.lines[:-1], last))
    page = Reader(render_page(content))
    assert page.text("div", id="flag-3") == "3 noise not modelledThe client adds noise."
    assert "closed form3 pictures" in page.text("tr", id="line-30")


def test_every_line_and_table_is_there_without_scripts(page: Reader) -> None:
    rows = {has["data-line"]: text for has, text in page.found("tr") if "data-line" in has}
    assert list(rows) == [str(found.number) for found in page_content().lines]
    assert "needs more than one step" in rows["12"]
    assert "4 not scored" in " ".join(rows["12"].split())
    assert "grey (control)" in rows["11"]
    assert len(list(page.found("svg"))) == 4
    assert {"Paired tests", "Beside the paper", "Diagnostics"} <= {
        t for _, t in page.found("caption")
    }


def test_columns_have_scopes_and_tables_have_captions(page: Reader) -> None:
    assert all(has.get("scope") in ("col", "row") for has, _ in page.found("th"))
    assert len(list(page.found("table"))) == len(list(page.found("caption")))
    assert all(has.get("alt") for has, _ in page.found("img"))


def test_headings_never_skip_a_level(page: Reader) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_the_strip_shows_the_same_pictures_in_every_column(page: Reader) -> None:
    keys = [has["data-key"] for has, _ in page.found("img") if "data-key" in has]
    columns = ("original", "fed", "1", "2", "10")
    assert keys == [f"{name}/{column}" for name in NAMES for column in columns]
    alt = {has["data-key"]: has["alt"] for has, _ in page.found("img") if "data-key" in has}
    assert alt["astronaut/2"] == "astronaut: best, one upload, ≥ 100 dB, exact"
    assert alt["rocket/1"] == "rocket: published attack (APRIL), 4.0 dB"


def data_of(page: Reader) -> dict:
    (found,) = page.found("script", type="application/json")
    return json.loads(found[1])


def test_a_picture_is_in_the_file_once(page: Reader) -> None:
    in_data = {key for key, _ in data_of(page)["pictures"]}
    in_page = {has["data-key"] for has, _ in page.found("img")}
    assert in_data.isdisjoint(in_page)
    assert in_data | in_page == set(page_content().pictures)


def test_the_scripts_get_every_score(page: Reader) -> None:
    scores = dict(data_of(page)["scores"])
    assert scores[2]["psnr"] == ["inf", 24.5, 100.5, 21.0]
    assert scores[12]["psnr"] == [None] * 4
    for number, psnr in PSNR.items():
        read = [
            math.inf if v == "inf" else math.nan if v is None else v for v in scores[number]["psnr"]
        ]
        assert read == pytest.approx(list(psnr), nan_ok=True)


def test_the_policy_names_the_one_script_and_nothing_else(page: Reader) -> None:
    (script,) = [text for has, text in page.found("script") if not has]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    ((policy, _),) = page.found("meta", **{"http-equiv": "Content-Security-Policy"})
    parts = dict(part.strip().split(" ", 1) for part in str(policy["content"]).split(";"))
    assert parts["default-src"] == "'none'"
    assert parts["script-src"] == f"'sha256-{digest}'"
    assert parts["img-src"] == "data: blob:"


@pytest.mark.parametrize("content", [page_content, hostile_page])
def test_nothing_is_fetched_and_no_handler_stands_in_the_markup(content) -> None:
    page = Reader(render_page(content()))
    for tag, has in page.elements:
        assert not [name for name in has if name.startswith("on")], tag
        for name in ("src", "href"):
            value = has.get(name)
            if value is not None:
                assert value.startswith(("data:", "#")) or (tag == "a" and ":" not in value)


def test_hostile_names_stay_text() -> None:
    page = Reader(render_page(hostile_page()))
    assert len(list(page.found("script"))) == 2
    assert page.text("h1") == " ".join(HOSTILE.split())
    assert data_of(page)["lines"][0]["attack"] == HOSTILE
    assert all("alert" not in str(has.get("src", "")) for has, _ in page.found("img"))


def test_json_for_a_script_cannot_close_it() -> None:
    text = script_json({"name": HOSTILE + "\u2029<!--\ud800"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text)["name"] == HOSTILE + "\u2029<!--\ud800"


def test_a_name_that_is_no_unicode_can_be_written() -> None:
    content = page_content()
    odd = replace(content.lines[0], client="file\udc80", attack="a\udc80")
    picture = replace(content.shown[0], image_id="x\udc80")
    made = replace(content, lines=(odd, *content.lines[1:]), shown=(picture, *content.shown[1:]))
    render_page(made).encode("utf-8")


def test_a_picture_from_elsewhere_is_refused() -> None:
    content = page_content()
    with pytest.raises(ValueError, match="no data URI"):
        render_page(replace(content, pictures={**content.pictures, "x": "https://example.org/x"}))


def test_recorded_uploads_show_pictures_and_residuals_without_truth() -> None:
    page = Reader(render_page(recorded_page()))
    keys = [has["data-key"] for has, _ in page.found("img") if "data-key" in has]
    assert keys == [f"{name}/{column}" for name in NAMES for column in (1, 2, 10)]
    assert "0.0123 [0.0100, 0.0200]" in " ".join(page.text("tr", id="line-1").split())
    assert not list(page.found("td", role="cell"))
    assert not list(page.found("section", id="distributions"))


def test_a_section_without_charts_can_say_why() -> None:
    content = replace(page_content(), charts={}, further={"tradeoff": "One client: no trade-off."})
    page = Reader(render_page(content))
    assert "One client: no trade-off." in page.text("section", id="tradeoff")
    assert not list(page.found("section", id="uploads"))


def test_terms_are_linked_once_a_text_and_only_as_whole_words() -> None:
    terms = Terms((("γ", "share"), ("floor", "grey"), ("setting (c)", "order"), ("a", "no")))
    text = terms.linked("γ and γ in setting (c) & a floorboard on the Floor")
    assert text.count("<a ") == 3
    assert "&amp; a floorboard" in text
    assert '<a class="term" href="#term-floor" title="grey">Floor</a>' in text
    assert terms.term("unknown <b>") == "unknown &lt;b&gt;"
    assert 'href="#term-setting-c"' in terms.term("c", "setting (c)")


def test_equal_terms_have_anchors_of_their_own() -> None:
    keys = [key for key, _, _ in Terms((("γ!", "1"), ("γ", "2"), ("γ?", "3"))).entries]
    assert len(set(keys)) == 3


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours `#rrggbb`."""

    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_has_the_contrast_of_wcag_aa_in_light_and_dark(page: Reader) -> None:
    style = page.text("style")
    schemes = re.findall(r":root \{([^}]*--ink[^}]*)\}", style)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
        for text in ("ink", "muted", "accent", "warm"):
            for ground in ("paper", "band", "warm-band"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def test_ten_lines_of_a_thousand_pictures_are_fast_and_small() -> None:
    content = page_content()
    count = 1000
    values = tuple(float(v) + math.pi for v in range(count))
    scores = {
        n: dict.fromkeys(("psnr", "ssim", "lpips", "mse", "fft2d"), values) for n in range(10)
    }
    made = replace(
        content,
        lines=tuple(line(n, f"attack {n}", values) for n in range(10)),
        scores=scores,
        image_ids=tuple(f"image {n}" for n in range(count)),
    )
    start = time.perf_counter()
    text = render_page(made)
    assert time.perf_counter() - start < 2
    assert len(text) - sum(map(len, content.pictures.values())) < 1_000_000
