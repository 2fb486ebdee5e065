"""Where labels go, so that no two of them overlap: widths of text, stacks beside a chart, and the
labels of points in a plane. All lengths are in the pixels of one drawing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTHS = {
    0.30: "'IJijl",
    0.35: " ,./:;\\|·",
    0.40: "()-[]ft",
    0.45: "!r",
    0.50: '"*_`–°',
    0.55: "?csz",
    0.60: "FLkvxyγ",
    0.65: "$0123456789EPSTYabdeghnopqu{}",
    0.70: "ABCKRVXZ",
    0.75: "NU",
    0.80: "&DGHOQ",
    0.85: "#+<=>^w~≥≤×",
    0.90: "M",
    0.95: "%",
}
"""Advance widths of DejaVu Sans, in ems: hardly any other font of a browser is as wide."""

_ADVANCE = {letter: width for width, letters in WIDTHS.items() for letter in letters}

LINE_HEIGHT = 1.25  # of one line of text, in its font size
DIRECTIONS = 24
DISTANCES = (7.0, 12.0, 18.0, 26.0, 36.0, 48.0, 62.0, 80.0, 100.0, 125.0, 155.0, 190.0)
LINE_COST = 30.0  # of a label on a line, in pixels of distance
OTHER_COST = 10.0  # of a label without a leader that stands as near to another point
PASSES = 6  # of looking again for a better place, with all other labels where they are


def text_width(text: str, size: float) -> float:
    """How wide the text is at most, in the sans-serif fonts of browsers."""
    return size * sum(_ADVANCE.get(letter, 1.0) for letter in text)


def fit(text: str, width: float, size: float) -> str:
    """The text cut in its middle until it is at most `width` wide; names differ at their ends."""
    if text_width(text, size) <= width:
        return text
    low, high = 0, len(text)
    while low < high:  # the largest number of letters that fits
        kept = (low + high + 1) // 2
        if text_width(_cut(text, kept), size) <= width:
            low = kept
        else:
            high = kept - 1
    return _cut(text, low)


def _cut(text: str, kept: int) -> str:
    tail = kept // 2
    return f"{text[: kept - tail]}…{text[len(text) - tail :]}"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near to the wanted ones as can be, `gap` apart or more, in [low, high].

    Equal wishes keep their order. Where there is no room for `gap` they stand evenly.

        spread([10.0, 10.0, 50.0], 12.0, 0.0, 100.0)  # [4.0, 16.0, 50.0]
    """
    count = len(wanted)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    order = sorted(range(count), key=lambda i: (wanted[i], i))
    blocks: list[list[float]] = []  # [sum of wanted - offset in the block, members]
    for rank, i in enumerate(order):  # isotonic regression by pooling neighbours
        blocks.append([wanted[i] - rank * gap, 1.0])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, members = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += members
    starts = [total / members for total, members in blocks for _ in range(int(members))]
    highest = high - (count - 1) * gap
    places = [0.0] * count
    for rank, i in enumerate(order):
        places[i] = min(max(starts[rank], low), highest) + rank * gap
    return places


Segment = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Box:
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether the two share an area; touching edges do not count."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: Box) -> bool:
        """Whether the other lies inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the rectangle that is nearest to (x, y)."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def crossed(self, start: tuple[float, float], end: tuple[float, float]) -> bool:
        """Whether the straight line between two points passes through its inside."""
        (x, y), (dx, dy) = start, (end[0] - start[0], end[1] - start[1])
        first, last = 0.0, 1.0
        for origin, step, low, high in (
            (x, dx, self.left, self.right),
            (y, dy, self.top, self.bottom),
        ):
            if abs(step) < 1e-9:
                if not low < origin < high:
                    return False
                continue
            enters, leaves = sorted(((low - origin) / step, (high - origin) / step))
            first, last = max(first, enters), min(last, leaves)
        return first < last


@dataclass(frozen=True)
class Anchor:
    """A point with a marker of `radius` whose label is `width` × `height`."""

    x: float
    y: float
    width: float
    height: float
    radius: float = 5.0

    @property
    def marker(self) -> Box:
        """The square around its marker."""
        return Box(self.x - self.radius, self.y - self.radius, *self._far())

    def _far(self) -> tuple[float, float]:
        return self.x + self.radius, self.y + self.radius

    def leader(self, box: Box) -> Segment:
        """The line from the point to its label."""
        return (self.x, self.y), box.nearest(self.x, self.y)

    def distance(self, box: Box) -> float:
        """From the point to its label."""
        return math.dist(*self.leader(box))

    def needs_leader(self, box: Box) -> bool:
        """Whether the label stands so far away that a line to it is drawn."""
        return self.distance(box) > self.radius + 8


def place(
    anchors: Sequence[Anchor],
    area: Box,
    obstacles: Sequence[Box] = (),
    lines: Sequence[Segment] = (),
) -> list[Box | None]:
    """A box for the label of each anchor, inside `area`: it meets no other label, no marker and
    no obstacle, and `lines` only where it must. None where there is no room for it.

    The most crowded points choose first; then each in turn looks for a better place.
    """
    markers = [anchor.marker for anchor in anchors]
    options = [
        [
            (
                cost
                + LINE_COST * sum(box.crossed(*line) for line in lines)
                + OTHER_COST * _reads_as_anothers(anchors, i, box),
                box,
            )
            for cost, box in _candidates(anchor, area)
            if _free(box, markers, obstacles)
        ]
        for i, anchor in enumerate(anchors)
    ]
    chosen: list[Box | None] = [None] * len(anchors)
    crowded = sorted(range(len(anchors)), key=lambda i: (-_neighbours(anchors, i), i))
    for _ in range(PASSES):
        before = list(chosen)
        for i in crowded:
            others = [(j, box) for j, box in enumerate(chosen) if box is not None and j != i]
            chosen[i] = _best(anchors, i, options[i], others, markers)
        if chosen == before:
            break
    return chosen


def _neighbours(anchors: Sequence[Anchor], i: int) -> int:
    here = anchors[i]
    return sum(math.dist((here.x, here.y), (a.x, a.y)) < 60 for a in anchors)


def _reads_as_anothers(anchors: Sequence[Anchor], i: int, box: Box) -> bool:
    """Whether point i's label is about as near to another point, and no leader says whose it is."""
    own = anchors[i].distance(box)
    return not anchors[i].needs_leader(box) and any(
        other.distance(box) < own + 2 for j, other in enumerate(anchors) if j != i
    )


def _free(box: Box, markers: Sequence[Box], obstacles: Sequence[Box]) -> bool:
    return not any(box.meets(other) for other in (*markers, *obstacles))


def _candidates(anchor: Anchor, area: Box) -> Iterator[tuple[float, Box]]:
    """Places around the point with their cost: near ones first, right of it rather than above."""
    for distance in DISTANCES:
        for turn in range(DIRECTIONS):
            angle = 2 * math.pi * turn / DIRECTIONS
            across, down = math.cos(angle), math.sin(angle)
            x = anchor.x + across * distance + (across - 1) / 2 * anchor.width
            y = anchor.y + down * distance + (down - 1) / 2 * anchor.height
            box = Box(x, y, x + anchor.width, y + anchor.height)
            if area.holds(box):
                yield distance + 3.0 * (1 - across) + 2.0 * abs(down), box


def _best(
    anchors: Sequence[Anchor],
    i: int,
    options: Sequence[tuple[float, Box]],
    others: Sequence[tuple[int, Box]],
    markers: Sequence[Box],
) -> Box | None:
    """The cheapest place that meets no other label; crossed markers and leaders cost."""
    leaders = [(box, anchors[j].leader(box)) for j, box in others]
    best: tuple[float, Box | None] = (math.inf, None)
    for cost, box in options:
        if cost >= best[0] or any(box.meets(other) for _, other in others):
            continue
        start, end = anchors[i].leader(box)
        cost += sum(60 for j, m in enumerate(markers) if j != i and m.crossed(start, end))
        cost += sum(60 for other, _ in leaders if other.crossed(start, end))
        cost += sum(60 for _, leader in leaders if box.crossed(*leader))
        cost += sum(60 for _, leader in leaders if _cross((start, end), leader))
        best = min(best, (cost, box), key=lambda pair: pair[0])
    return best[1]


def _cross(first: Segment, second: Segment) -> bool:
    """Whether two straight lines cross each other."""
    (a, b), (c, d) = first, second
    return _side(a, b, c) * _side(a, b, d) < 0 and _side(c, d, a) * _side(c, d, b) < 0


def _side(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
