"""Accuracy against leakage: families by colour and shape, points by number, the Pareto front."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mjp_privacy.core.drawing import (
    FONT,
    INK,
    MUTED,
    Chart,
    axes_at,
    chart,
    colour,
    drawn,
    house_style,
    hover,
    new_figure,
    picture,
    stretch,
)
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.clients import Client, circumstances, distinct_clients
from mjp_privacy.report.figures import THRESHOLDS, accuracies, summary
from mjp_privacy.report.flags import missed_attacks
from mjp_privacy.report.lines import DIAGNOSTIC, scalar_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 36
"""Clients of a report's chart; more numbers cannot be told apart."""

FAMILIES = {
    **{"none": (colour(6), "s"), "MJP": (colour(0), "o"), "noise": (colour(1), "^")},
    **{"DP-SGD": (colour(2), "D"), "sparsification": (colour(3), "v")},
    **{"quantisation": (colour(4), "P"), "withheld": (colour(5), "X")},
    **{"pairs with MJP": (colour(7), "o"), "other": (MUTED, "s")},
}
"""Defences of one kind in the order in which they are explained: colour and marker."""

_RECIPE = ("MJP", "dal", "plain_share")  # what belongs to MJP itself
_KINDS = (
    (r"dp_?sgd", "DP-SGD"),
    (r"gaussian_noise|laplace", "noise"),
    (r"top_?k|random_?k|prun|spars", "sparsification"),
    (r"b?float\d+|int\d+|sign|quanti", "quantisation"),
    (r"withhold|positions|lora|train", "withheld"),
)


@dataclass(frozen=True)
class TradeoffPoint:
    """One client: its accuracy in percent and what leaks in dB (capped at 100), with intervals."""

    label: str
    family: str  # one of FAMILIES; any other is drawn as "other"
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    leakage: float
    leakage_low: float
    leakage_high: float
    n: int
    lost: float = 0.0  # share of the images on which no attack has a score

    @property
    def look(self) -> tuple[str, str]:
        """The colour and marker of its family."""
        return FAMILIES.get(self.family, FAMILIES["other"])

    @property
    def drawable(self) -> bool:
        """Whether it has both figures."""
        return math.isfinite(self.accuracy) and math.isfinite(self.leakage)

    @property
    def unattacked(self) -> bool:
        """Whether half of the images or more have no score of an attack: then what leaks is not
        known, and a client whose attacks fail must not look protected."""
        return self.lost >= 0.5

    @property
    def words(self) -> str:
        """Its figures in words."""
        known = ", no attack has a score on half of the images or more" if self.unattacked else ""
        accuracy = f"{self.accuracy:.1f} %{_interval(self.accuracy_low, self.accuracy_high)}"
        leakage = f"{self.leakage:.1f} dB{_interval(self.leakage_low, self.leakage_high)}"
        return f"{self.label}: top-1 {accuracy}, {leakage}, n={self.n}{known}"


def _interval(low: float, high: float) -> str:
    return f" [{low:.1f}, {high:.1f}]" if math.isfinite(low) and math.isfinite(high) else ""


def family_of(defence: str) -> str:
    """The family of a client, from its text in comparison.csv.

    family_of("MJP γ=0.27; dal")  # "MJP"
    family_of("MJP γ=0.27; dal; int8")  # "pairs with MJP"
    """
    parts = [part.strip() for part in defence.split(";") if part.strip()]
    own = [part for part in parts if part.split()[0] not in _RECIPE]
    if parts in ([], ["none"]):
        return "none"
    if len(own) < len(parts):
        return "pairs with MJP" if own else "MJP"
    family = next((name for pattern, name in _KINDS if re.match(pattern, own[0])), "other")
    return family if len(own) == 1 else "other"


def clients_tradeoff(clients: Sequence[Client]) -> tuple[Chart, ...]:
    """The chart of the largest group of clients that are alike but for their defence; none for few.
    Clients on which fewer attacks were run are left out and counted."""
    alike: dict[object, list[Client]] = {}
    for client in distinct_clients(clients):
        if client.one_upload is not None:
            around = (circumstances(client), client.lines[0].run)
            alike.setdefault(around, []).append(client)
    group = max(alike.values(), key=len, default=[])
    compared = [client for client in group if not missed_attacks(client, group)]
    points: list[TradeoffPoint] = []
    for client in compared:
        assert client.one_upload is not None
        leakage = summary(client.one_upload, "psnr", "standard")
        accuracy, _ = accuracies(client.one_upload)  # a share, with Wilson's interval
        point = TradeoffPoint(
            *(client.title, family_of(_defence(client))),
            *(100 * accuracy.mean, 100 * accuracy.low, 100 * accuracy.high),
            *(leakage.mean, leakage.low, leakage.high),
            n=leakage.n,
            lost=1 - leakage.n / leakage.counts.total,
        )
        points.append(point)
    drawable = [point for point in points if point.drawable]
    if len(drawable) < 3 or len({point.family for point in drawable}) < 2:
        return ()
    greys = [client.of_images("grey_psnr", DIAGNOSTIC) for client in compared]
    made = tradeoff_chart(points[:MOST], floor=float(pd.concat(greys).clip(upper=PSNR_CAP).mean()))
    more = ""
    if left := len(group) - len(compared):
        more += f" {left} further clients had fewer attacks run on them and are left out."
    if left := len(points[MOST:]):
        more += f" {left} more are in the tables."
    return (replace(made, caption=made.caption + more),)


def _defence(client: Client) -> str:
    """The client's defences in the words of comparison.csv: `MJP γ=0.27; int8`."""
    cell = client.cell
    parts = [f"{'MJP' if client.masks else 'shuffled'} γ={cell.gamma:g}"] if cell.gamma else []
    parts += ["dal"] if cell.dal and cell.gamma else []
    for name in ("plain_share", "withhold", "positions", "lora", "train", "position_noise"):
        value = getattr(cell, name)
        parts += [f"{name} {scalar_text(value)}"] if value != getattr(CellFacts, name) else []
    parts += cell.defenses.split(" + ") if cell.defenses else []
    return "; ".join(parts) or "none"


def points_from_comparison(table: pd.DataFrame, scope: str) -> list[TradeoffPoint]:
    """The points of the table of `mjp compare`, of "1 upload" or "any number of uploads"."""
    return [
        TradeoffPoint(
            *(str(row["label"]), family_of(str(row["defence"]))),
            *(float(row["top1"]), float(row["top1_low"]), float(row["top1_high"])),
            *(float(row["psnr"]), float(row["low"]), float(row["high"])),
            n=int(row["n"]),
            lost=0.0 if pd.isna(row["unreached"]) else int(row["unreached"]) / int(row["n"]),
        )
        for _, row in comparable(table, scope).iterrows()
    ]


def comparable(table: pd.DataFrame, scope: str) -> pd.DataFrame:
    """The rows of a scope that differ in their defences only: of the federations with the
    smallest batch, those with the fewest local steps."""
    for name in ("batch", "steps"):
        table = table[table[name] == table[name].min()]
    return table[table["scope"] == scope]


def pareto_front(points: Iterable[TradeoffPoint]) -> list[TradeoffPoint]:
    """The clients that no other beats in both figures, in the order of their leakage; without those
    of whose images half or more have no score."""
    front: list[TradeoffPoint] = []
    known = [point for point in points if point.drawable and not point.unattacked]
    for point in sorted(known, key=lambda point: (point.leakage, -point.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


# drawn --------------------------------------------------------------------------------------------

Look = dict[str, Any]

WIDE, TALL = 720.0, 430.0  # pixels: of the chart, and of its axes
OVER, UNDER = 46.0, 46.0  # of the families, and of the axis across with its label
ROW, NAMES = 15.0, 3  # of a row of names, and how many stand in it
KNOTS, PLACES = (0.0, 8.0, 20.0, 40.0, PSNR_CAP), (0.0, 3.2, 15.2, 20.8, 25.0)
"""Most of the axis is for 8 to 20 dB, where defences part."""
TICKS = (0, 4, 8, 10, 12, 14, 16, 18, 20, 25, 30, 40, 60, 100)
MARGIN = 3.0  # dB of room on the private side
LETTERS = 34  # of a name
NEAR = (26.0, 9.0)  # pixels between points whose numbers would meet
PNG_WIDTH = 1080  # pixels

CAPTION = (
    "Accuracy against the PSNR (standard, capped at 100 dB) of the best attack on each image: the "
    "upper left is best. Light bars: 95 % intervals. Steps: the Pareto front, clients that no "
    "other beats in both figures; "
    "it does not take the intervals into account. Dashed: "
    f"{THRESHOLDS[0]} dB, from which the content of a picture is usually recognisable."
)
FOOTNOTE = (
    "Steps: Pareto front. Light bars: 95 % intervals. Hollow: half unscored or more. Dotted: "
    "uniform grey."
)


def tradeoff_chart(points: Sequence[TradeoffPoint], *, floor: float = math.nan) -> Chart:
    """The chart of some clients; `floor`: PSNR of a uniform grey in dB."""
    shown = [point for point in points if point.drawable]
    caption = CAPTION
    if math.isfinite(floor):
        caption += f" Dotted: what a uniform grey gets, {floor:.1f} dB."
    if hollow := [point.label for point in points if point.unattacked]:
        caption += (
            f" Hollow, and no part of the front: no attack has a score on half of the pictures or "
            f"more, so that what leaks is not known ({', '.join(hollow)})."
        )
    if lacking := len(points) - len(shown):
        caption += f" {lacking} without accuracy or leakage are left out."
    with house_style():
        figure = new_figure(_height(shown), WIDE)
        _draw(figure, 0.0, shown, floor)
        return chart(figure, "tradeoff", "Accuracy against leakage", caption)


def draw_tradeoff(
    panels: Mapping[str, Sequence[TradeoffPoint]], path: Path, *, floors: Mapping[str, float]
) -> None:
    """Draw panels one under another, each with its heading, and write them as PNG.

        points = points_from_comparison(table, "1 upload")
        draw_tradeoff({"1 upload": points}, Path("tradeoff.png"), floors={"1 upload": 12.0})

    floors: PSNR of a uniform grey by heading
    """
    shown = {name: [p for p in points if p.drawable] for name, points in panels.items()}
    tall = sum(30 + _height(points) for points in shown.values()) + 24
    look: Look = {"dpi": 72 * PNG_WIDTH / WIDE, "layout": None}
    with picture(path, WIDE / 72, tall / 72, **look) as figure:
        top = 0.0
        for name, points in shown.items():
            figure.text(8 / WIDE, 1 - (top + 20) / tall, drawn(name), fontsize=14)
            _draw(figure, top + 30, points, floors[name])
            top += 30 + _height(points)
        figure.text(8 / WIDE, 10 / tall, FOOTNOTE, fontsize=FONT - 1, color=MUTED)


def _height(points: Sequence[TradeoffPoint]) -> float:
    """Pixels of the axes with what stands over and under them."""
    return OVER + TALL + UNDER + ROW * math.ceil(len(points) / NAMES)


def _draw(figure: Figure, top: float, points: Sequence[TradeoffPoint], floor: float) -> None:
    """Draw points that have both figures, numbered, with their names below."""
    bottom = top + OVER + TALL
    axes = axes_at(figure, 50, top + OVER, WIDE - 36, bottom)
    _scales(axes, points, floor)
    for level, style, word in ((floor, ":", "floor"), (THRESHOLDS[0], "--", f"{THRESHOLDS[0]} dB")):
        low, high = axes.get_xlim()
        if math.isfinite(level) and low < level < high:
            axes.axvline(level, color=MUTED, linewidth=1, linestyle=style)
            at: Look = {"transform": axes.get_xaxis_transform(), "ha": "center"}
            axes.text(level, 1.01, word, fontsize=FONT - 1, color=MUTED, **at)
    if front := pareto_front(points):
        across = [front[0].leakage, *(point.leakage for point in front), axes.get_xlim()[1]]
        up = [axes.get_ylim()[0], *(point.accuracy for point in front), front[-1].accuracy]
        (steps,) = axes.step(across, up, where="post", color=INK, linewidth=1.3, alpha=0.6)
        hover(steps, "Pareto front")
    for number, point in reversed([*enumerate(points, 1)]):  # the first, often undefended, on top
        shade, marker = point.look
        bar: Look = {"color": shade, "linewidth": 1, "alpha": 0.35}
        bar["clip_on"] = False  # also at 100 dB, the end of the axis
        axes.plot([point.leakage_low, point.leakage_high], [point.accuracy] * 2, **bar)
        axes.plot([point.leakage] * 2, [point.accuracy_low, point.accuracy_high], **bar)
        look: Look = {"color": shade, "markersize": 8, "clip_on": False}
        look |= {"markerfacecolor": "none"} if point.unattacked else {}
        (dot,) = axes.plot(point.leakage, point.accuracy, marker, **look)
        hover(dot, point.words)
        left, down = 14 + (number - 1) % NAMES * (WIDE - 14) / NAMES, (number - 1) // NAMES + 0.5
        place = left / WIDE, 1 - (bottom + UNDER + ROW * down) / (72 * figure.get_figheight())
        name = f"{number}  {drawn(point.label, LETTERS).strip()}"
        hover(figure.text(*place, name, fontsize=FONT - 1), point.label)
    _draw_numbers(axes, points)
    for kind, (shade, marker) in FAMILIES.items():
        if (shade, marker) in {point.look for point in points}:
            axes.plot([], [], marker, color=shade, markersize=8, label=kind)
    legend: Look = {"loc": "lower left", "bbox_to_anchor": (0, 1.05), "ncols": len(FAMILIES)}
    legend |= {"handlelength": 1, "handletextpad": 0.4, "columnspacing": 1.2, "borderpad": 0}
    if points:
        axes.legend(fontsize=FONT - 1, **legend)


def _draw_numbers(axes: Axes, points: Sequence[TradeoffPoint]) -> None:
    """The numbers of the points beside them, those of points that nearly meet beside the first;
    below the point where numbers of a higher one would reach into them."""
    beside: dict[tuple[float, float], list[str]] = {}
    for number, point in enumerate(points, 1):
        place = (point.leakage, point.accuracy)
        x, y = axes.transData.transform(place)
        for known in beside:
            left, down = axes.transData.transform(known)
            meet = abs(left - x) < NEAR[0] and abs(down - y) < NEAR[1]
            place = known if meet else place
        beside.setdefault(place, []).append(f"{number}")
    written: list[tuple[float, float, float]] = []  # from where to where, and how high
    for place, numbers in sorted(beside.items(), key=lambda item: -item[0][1]):
        (x, y), text = axes.transData.transform(place), ", ".join(numbers)
        wide = 0.65 * FONT * len(text)  # about, in the figure's units
        at_end = x > axes.bbox.x1 - 40
        begin = x - wide if at_end else x
        above = not any(
            begin < end and start < begin + wide and abs(y + FONT - at) < FONT
            for start, end, at in written
        )
        written.append((begin, begin + wide, y + FONT if above else y - FONT))
        look: Look = {"textcoords": "offset points", "fontsize": FONT - 2}
        look |= {"ha": "right" if at_end else "left", "va": "bottom" if above else "top"}
        axes.annotate(text, place, (-5 if at_end else 5, 4 if above else -4), **look)


def _scales(axes: Axes, points: Sequence[TradeoffPoint], floor: float) -> None:
    """Leakage to the right, accuracy upwards, from a little below to a little above the points."""
    across = [v for p in points for v in (p.leakage, p.leakage_low, p.leakage_high)] + [floor]
    across = [value for value in across if math.isfinite(value)] or [10.0]
    low = max(0.0, math.floor(min(across) - MARGIN))
    highest = min(max(*across, low + 10.0), PSNR_CAP)
    high = next(float(tick) for tick in TICKS if tick >= highest)
    low = min(low, high - 10.0)
    stretch(axes, KNOTS, PLACES)
    axes.set_xlim(low, high)
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axes.set_xticklabels([str(tick) for tick in TICKS if low <= tick <= high])
    up = [v for p in points for v in (p.accuracy, p.accuracy_low, p.accuracy_high)]
    up = [value for value in up if math.isfinite(value)] or [0.0, 100.0]
    room = max(1.0, 0.06 * (max(up) - min(up)))
    axes.set_ylim(min(up) - room, max(up) + room)
    axes.tick_params(labelsize=FONT - 1)
    axes.set_ylabel("top-1, %", fontsize=FONT)
    label = "PSNR of the best attack, dB; left is private (the scale changes at 8, 20 and 40)"
    axes.set_xlabel(label, fontsize=FONT)
