"""Labels do not overlap, and stand as near as they can to what they name."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from mjp_privacy.report.charts.labels import Anchor, Box, fit, place, spread, text_width

AREA = Box(0, 0, 700, 400)


def anchors_at(places: list[tuple[float, float]], width: float = 80.0) -> list[Anchor]:
    return [Anchor(x, y, width, 15.0) for x, y in places]


def overlaps(boxes: list[Box | None]) -> int:
    placed = [box for box in boxes if box is not None]
    return sum(a.meets(b) for a, b in combinations(placed, 2))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_no_two_labels_overlap_in_a_cluster(seed: int) -> None:
    generator = np.random.default_rng(seed)
    anchors = anchors_at([tuple(p) for p in generator.normal((200, 200), (40, 25), (21, 2))])
    boxes = place(anchors, AREA)
    assert all(box is not None and AREA.holds(box) for box in boxes)
    assert overlaps(boxes) == 0
    markers = [anchor.marker for anchor in anchors]
    assert not any(box.meets(marker) for box in boxes if box for marker in markers)


def test_a_lone_label_stands_right_beside_its_point() -> None:
    (box,) = place(anchors_at([(100, 100)]), AREA)
    assert box is not None
    assert (box.left, (box.top + box.bottom) / 2) == pytest.approx((107, 100))


def test_labels_keep_away_from_obstacles_and_lines() -> None:
    right = Box(101, 0, 700, 400)
    (box,) = place(anchors_at([(100, 100)]), AREA, [right])
    assert box is not None
    assert not box.meets(right)
    line = ((0.0, 100.0), (700.0, 100.0))
    (box,) = place(anchors_at([(100, 100)]), AREA, lines=[line])
    assert box is not None
    assert not box.crossed(*line)


def test_a_label_is_not_read_as_that_of_a_nearer_point() -> None:
    """Two points 12 pixels apart at the right edge, as A and F of the ablations' chart."""
    anchors = [Anchor(690, 100, 14, 15), Anchor(678, 108, 14, 15)]
    boxes = place(anchors, AREA, lines=[((690, 100), (690, 0)), ((690, 100), (690, 300))])
    for i, box in enumerate(boxes):
        assert box is not None
        own, other = anchors[i].distance(box), anchors[1 - i].distance(box)
        assert anchors[i].needs_leader(box) or own < other


def test_without_room_there_is_no_label_rather_than_an_overlap() -> None:
    small = Box(0, 0, 100, 20)
    boxes = place(anchors_at([(50, 10)] * 5), small)
    assert overlaps(boxes) == 0
    assert None in boxes
    assert place([], AREA) == []


def test_a_line_crosses_a_box_only_where_it_passes_inside() -> None:
    box = Box(10, 10, 20, 20)
    assert box.crossed((0, 0), (30, 30))
    assert not box.crossed((0, 0), (9, 9))
    assert not box.crossed((0, 15), (0, 30))
    assert not box.crossed((0, 9), (30, 9))
    assert box.crossed((15, 0), (15, 30))


def test_stacked_labels_are_apart_and_least_moved() -> None:
    assert spread([10, 10, 50], 12, 0, 100) == pytest.approx([4, 16, 50])
    assert spread([0, 0], 10, 0, 100) == pytest.approx([0, 10])
    assert spread([100, 100], 10, 0, 100) == pytest.approx([90, 100])
    assert spread([5, 5, 5], 100, 0, 20) == pytest.approx([0, 10, 20])  # no room: evenly
    assert spread([], 10, 0, 100) == []


def test_stacked_labels_against_a_quadratic_program() -> None:
    """The same problem solved by SciPy: least squares under the constraints."""
    from scipy.optimize import minimize

    wanted = np.array([3.0, 4.0, 40.0, 41.0, 45.0])
    found = spread(wanted.tolist(), 8.0, 0.0, 60.0)
    apart = {"type": "ineq", "fun": lambda y: np.diff(y) - 8.0}
    start = np.linspace(0, 60, 5)
    solved = minimize(lambda y: ((y - wanted) ** 2).sum(), start, constraints=[apart])
    clipped = [(0.0, 60.0)] * 5
    bounded = minimize(
        lambda y: ((y - wanted) ** 2).sum(), start, bounds=clipped, constraints=[apart]
    )
    expected = bounded.x if bounded.success else solved.x
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("text", ["MJP + top 10 %", "γ 0.27 best, any uploads", "WWW mmm @ ≥ 20"])
def test_widths_are_not_below_those_of_a_wide_font(text: str) -> None:
    font = FontProperties(family="DejaVu Sans")
    drawn = TextPath((0, 0), text, size=12, prop=font).get_extents().width
    assert drawn <= text_width(text, 12) <= 1.25 * drawn


def test_long_text_is_cut_in_its_middle() -> None:
    text = "a" * 50 + "b" * 50
    short = fit(text, 100, 12)
    assert text_width(short, 12) <= 100
    assert short.startswith("a")
    assert short.endswith("b")
    assert "…" in short
    assert fit("short", 100, 12) == "short"
