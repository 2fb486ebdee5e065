"""The writer of SVG: what it makes is XML whatever it is given, and scales are right."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from mjp_privacy.core.drawing import COLOURS
from mjp_privacy.report.charts.axes import psnr_scale, round_ticks
from mjp_privacy.report.charts.svg import (
    SHAPES,
    Drawing,
    Scale,
    escape,
    marker_outline,
    number,
    shade,
    standalone,
    stretched,
)

NAMESPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = "</svg><script>alert(\"1\")</script> & \x00\x1b\ud800\u202e 'x' var(--ink, red)"


def test_hostile_text_is_text_wherever_it_stands() -> None:
    drawing = Drawing(100, HOSTILE, HOSTILE)
    drawing.text((1, 2), HOSTILE, full=HOSTILE + "!")
    drawing.path([(0, 0), (1, 1)], "red", title=HOSTILE)
    drawing.area([(0, 0), (1, 1), (0, 1)], "red", 0.5, HOSTILE)
    drawing.marker((5, 5), "circle", "red", title=HOSTILE)
    root = ElementTree.fromstring(drawing.render())
    allowed = {f"{NAMESPACE}{name}" for name in ("svg", "title", "desc", "style", "text", "path")}
    assert {element.tag for element in root.iter()} == allowed
    shown = "".join(root.itertext())
    assert shown.count('<script>alert("1")</script>') == 7
    assert not re.search("[\x00\x1b\ud800\u202e]", shown)


def test_escape_leaves_plain_text_alone() -> None:
    assert escape("γ 0.27 ≥ 20 dB – 冰") == "γ 0.27 ≥ 20 dB – 冰"
    assert escape("two\n lines\t") == "two lines"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_coordinate_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        number(value)


def test_numbers_are_short() -> None:
    assert [number(v) for v in (1.0, -0.04, 2.345, 1e3)] == ["1", "0", "2.3", "1000"]


def test_black_follows_the_page_and_every_colour_has_a_paint() -> None:
    assert shade(COLOURS.index("#1f2933")) == "currentColor"
    for index, colour in enumerate(COLOURS):
        assert colour == "#1f2933" or colour in shade(index)
    assert shade(len(COLOURS)) == shade(0)


def test_a_file_of_its_own_has_no_variables() -> None:
    drawing = Drawing(10, "t", "d")
    drawing.path([(0, 0), (1, 1)], shade(0))
    drawing.text((0, 0), "a", halo=True)
    text = standalone(drawing.render())
    ElementTree.fromstring(text)
    assert "var(" not in text
    assert 'stroke="#0072b2"' in text


def test_a_scale_is_straight_between_knots_and_holds_its_ends() -> None:
    scale = stretched(0.0, 100.0, 0.0, 700.0, ((10.0, 1.0), (40.0, 2.0), (100.0, 0.5)))
    assert scale.values == (0.0, 10.0, 40.0, 100.0)
    assert scale.pixels == pytest.approx((0.0, 70.0, 490.0, 700.0))
    assert scale.at(25.0) == pytest.approx(280.0)
    assert (scale.at(-5), scale.at(math.inf)) == (0.0, 700.0)
    assert Scale((0.0, 10.0), (50.0, 150.0)).at(5.0) == 100.0


def test_most_room_is_for_8_to_40_db() -> None:
    scale = psnr_scale(0.0, 100.0)
    assert scale.at(40) - scale.at(8) > 60
    assert scale.at(100) == 100


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (3, 17, [5, 10, 15]), (2, 2, [2]), (-1, 1, [-1, 0, 1])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    found = round_ticks(low, high)
    assert set(expected) <= set(found)
    assert all(low <= tick <= high for tick in found)
    assert len(found) <= 7


@pytest.mark.parametrize("shape", SHAPES)
def test_markers_surround_their_point(shape: str) -> None:
    xs, ys = zip(*marker_outline((10, 20), shape, 5), strict=True)
    assert min(xs) < 10 < max(xs)
    assert min(ys) < 20 < max(ys)
    assert max(math.dist((10, 20), corner) for corner in zip(xs, ys, strict=True)) < 6
