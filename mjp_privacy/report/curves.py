"""Curves: how scores are spread over images, and how they go with the number of uploads of a
picture and with the batch that it shares, which are rounds.csv and batches.csv.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mjp_privacy.core.drawing import (
    FONT,
    MARKERS,
    MUTED,
    WIDTH,
    Chart,
    axes_at,
    band,
    chart,
    colour,
    dashes,
    drawn,
    house_style,
    hover,
    new_figure,
    stretch,
)
from mjp_privacy.metrics.statistics import (
    PSNR_CAP,
    Floats,
    median_interval,
    wilson,
)
from mjp_privacy.report.figures import (
    THRESHOLDS,
    capped_median,
    exact_share,
    mean_of,
    share_of_tried,
    success_share,
    summary,
    varying_columns,
)
from mjp_privacy.report.lines import (
    CLIENT_FACTS,
    DIAGNOSTIC,
    Line,
    client_text,
    fact,
    options_of,
    options_text,
    target_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# the share of images that reaches each PSNR, a curve a line ----------------------------------

Named = tuple[str, Line]

MOST = 12
"""More lines, or charts of one kind, than these cannot be told apart; those that follow are in the
tables."""
MOST_STEPS = 240
"""A curve of more images is drawn at this many thresholds, where its shares are true as well."""
LETTERS = 60  # of a name
ROW = 17.0  # pixels of a name under the axes

PSNR_KNOTS, PSNR_PLACES = (0.0, 8.0, 40.0, PSNR_CAP), (0.0, 2.0, 34.0, 43.6)
"""Pictures become readable between 8 and 40 dB: most of the axis is theirs."""
PSNR_TICKS = (0, 8, 12, 16, 20, 25, 30, 40, 60, 80, 100)


def distribution_charts(lines: Sequence[Named]) -> tuple[Chart, ...]:
    """The chart of PSNR for lines of which some image was tried, with its thresholds and the mean
    of a uniform grey; none without such a line."""
    tried = [named for named in lines if share_of_tried(named[1], 0).of]
    shown = tried[:MOST]
    if not shown:
        return ()
    curves = [curve_of(line) for _, line in shown]
    caption = (
        "Share of images whose PSNR (standard) is at least the value below: the higher a curve, "
        "the more leaks. Images that the attack failed on or does not support count as not "
        "recovered; those that could not be scored are left out. Bands: pointwise 95 % intervals "
        "(Wilson, crops of one photograph counted together), drawn where some but not all images "
        f"count. Dashed: {' and '.join(map(str, THRESHOLDS))} dB."
    )
    with house_style():
        figure = new_figure(274 + ROW * len(shown))
        axes = axes_at(figure, 46, 20, WIDTH - 12, 226)
        axes.set_ylim(-1, 101)
        axes.set_yticks(range(0, 101, 25), [f"{share} %" for share in range(0, 101, 25)])
        axes.tick_params(labelsize=FONT - 1)
        stretch(axes, PSNR_KNOTS, PSNR_PLACES)
        axes.set_xlim(0, PSNR_CAP)
        axes.set_xticks(PSNR_TICKS, map(str, PSNR_TICKS))
        axes.set_xlabel("PSNR of at least, dB (8 to 40 dB stretched)", fontsize=FONT)
        for limit in THRESHOLDS:
            axes.axvline(limit, color=MUTED, linewidth=1, linestyle="--")
        of_lines = [line.scored("grey_psnr", DIAGNOSTIC) for _, line in shown]
        levels = pd.concat(of_lines, keys=[line.run for _, line in shown])
        once = levels[~levels.index.duplicated()]  # each image of a run
        if not math.isnan(floor := float(once.clip(upper=PSNR_CAP).mean())):
            caption += f" Dotted: what a uniform grey gets on average, {floor:.1f} dB."
            axes.axvline(floor, color=MUTED, linewidth=1.2, linestyle=":")
            axes.text(floor, 103, "floor", ha="center", fontsize=FONT - 1, color=MUTED)
        _draw_curves(axes, shown, curves)
        more = f" {len(tried) - MOST} more lines are in the tables." if len(tried) > MOST else ""
        return (chart(figure, "success", "Share of pictures by PSNR", caption + more),)


@dataclass(frozen=True)
class SuccessCurve:
    """Percent of images recovered at each threshold, with a 95 % band for each point alone."""

    thresholds: Floats
    share: Floats
    low: Floats
    high: Floats
    of: int  # images that the attacker was given


def curve_of(line: Line) -> SuccessCurve:
    """The share of images whose PSNR is at least each threshold from 0 to its cap.

    Images without a score count as not recovered, except those that could not be scored: they are
    left out. The band is Wilson's, of crops over as many trials as `independent_trials` says.
    """
    values = np.sort(line.scored("psnr", "standard").to_numpy(dtype=float))
    # right behind a value the share is smaller
    steps = np.nextafter(values[np.isfinite(values)], np.inf)
    places = np.unique([0.0, *steps[(steps > 0.0) & (steps < PSNR_CAP)], PSNR_CAP])
    if len(places) > MOST_STEPS:
        places = places[np.linspace(0, len(places) - 1, MOST_STEPS).round().astype(int)]
    tried = share_of_tried(line, 0)
    trials = tried.of if tried.trials is None else tried.trials
    share = (len(values) - np.searchsorted(values, places, "left")) / tried.of
    lows, highs = np.array([wilson(part, trials) for part in share.tolist()]).T
    return SuccessCurve(places, 100 * share, 100 * lows, 100 * highs, tried.of)


def _draw_curves(axes: Axes, lines: Sequence[Named], curves: Sequence[SuccessCurve]) -> None:
    """Steps with their bands, and the names under the axes in the order of the curves."""
    steps = []
    for number, ((name, _), curve) in enumerate(zip(lines, curves, strict=True)):
        places, share = curve.thresholds, curve.share
        some = np.flatnonzero((share > 0) & (share < 100))
        if len(some):
            at = slice(some[0], some[-1] + 2)
            band(axes, places[at], curve.low[at], curve.high[at], colour(number), step="post")
        x, y = np.append(places, axes.get_xlim()[1]), np.append(share, share[-1])
        look = {"color": colour(number), "linestyle": dashes(number), "linewidth": 1.8}
        (step,) = axes.step(x, y, where="post", label=drawn(name, LETTERS), **look)
        hover(step, f"{name}, n={curve.of}")
        steps.append((share[-1], float(np.sum(share * np.diff(x))), name, step))
    steps.sort(key=lambda found: found[:2], reverse=True)
    look = {"loc": "lower left", "fontsize": FONT - 1, "labelspacing": 0.4}
    legend = axes.figure.legend(handles=[step for *_, step in steps], **look)
    for text, (_, _, name, _) in zip(legend.get_texts(), steps, strict=True):
        hover(text, name)


# figures over uploads and batches -----------------------------------------------------------------

OF_PARTNERS = ("partners", "mask")
"""Facts that mean nothing to a picture that is alone in its batch."""


def curve_points(lines: Sequence[Line]) -> pd.DataFrame:
    """One row for each line of every attack that was run with several numbers of uploads.

    Lines share a `panel` number if run, target, attack and options are equal up to γ and the
    number of uploads. Empty where there is no such attack.
    """
    panels: dict[object, list[Line]] = {}
    for line in lines:
        if line.cell.role == "attack" and line.count("psnr", "standard"):
            cell = line.cell
            key = line.run, target_of(cell, {"gamma"}), cell.known_as, cell.victim, _options(line)
            panels.setdefault(key, []).append(line)
    kept = [panel for panel in panels.values() if len({line.uploads for line in panel}) > 1]
    every = varying_columns([line for panel in kept for line in panel])
    facts = [key for key in every if key not in ("uploads", "attack_options")]
    records = []
    for number, panel in enumerate(kept, 1):
        for line in sorted(panel, key=lambda line: (line.cell.gamma, line.uploads)):
            score = summary(line, "psnr", "standard")
            record = {
                **{"line": line.number, "run": line.run, **_model(line)},
                "attack": line.cell.known_as,
                "options": options_text(_options(line)).removeprefix("–"),
                "differs": client_text(line.cell.columns, facts).removeprefix("–"),
                "gamma": float(line.cell.gamma),
                "uploads": fact(line.cell.columns, "uploads"),
                **{"n": score.n, "n_not_scored": score.counts.total - score.n},
                "psnr_mean": score.mean,
                **{"psnr_mean_lo": score.low, "psnr_mean_hi": score.high, **_median(line)},
                "psnr_exact": exact_share(line).count,
                **{f"psnr_from_{x}": success_share(line, x).percent for x in THRESHOLDS},
                "grey_mean": mean_of(line, "grey_psnr"),
                **{"ceiling_mean": mean_of(line, "ceiling_psnr"), "panel": number},
            }
            records.append(record)
    return pd.DataFrame.from_records(records)


def _options(line: Line) -> str:
    """The attack's options except its number of uploads, as JSON with sorted keys."""
    options = options_of(line.cell.attack_options)
    if options is None:
        return str(line.cell.attack_options)
    others = {key: value for key, value in options.items() if key not in ("uploads", "rounds")}
    return json.dumps(others, sort_keys=True)


def batch_points(lines: Sequence[Line]) -> pd.DataFrame:
    """One row for each client, batch and number of uploads: the attack that recovers most there.

    Clients that are equal up to their batch share a `panel` number. A client of single pictures has
    no partners, so it opens the panels of fixed and of fresh ones. Empty where no client was met
    with several batches.
    """
    single: dict[object, list[Line]] = {}
    panels: dict[object, list[Line]] = {}
    for line in lines:
        tried = line.cell.role == "attack" and line.cell.victim != "april_block"
        if tried and line.count("psnr", "standard"):
            alone = _batch(line) == 1
            differ = {"batch", *(OF_PARTNERS if alone else ())}
            client = line.run, target_of(line.cell, differ)
            (single if alone else panels).setdefault(client, []).append(line)
    several = []
    for members in panels.values():
        client = members[0].run, target_of(members[0].cell, {"batch", *OF_PARTNERS})
        several.append([*single.get(client, []), *members])
    kept = [members for members in several if len(set(map(_batch, members))) > 1]
    every = varying_columns([line for members in kept for line in members])
    facts = [key for key in every if key in CLIENT_FACTS and key != "batch"]
    records = []
    for number, members in enumerate(kept, 1):
        differs = client_text(members[-1].cell.columns, facts).removeprefix("–")
        places: dict[tuple[int, int], list[Line]] = {}
        for line in members:
            places.setdefault((_batch(line), line.uploads), []).append(line)
        for _, met in sorted(places.items(), key=lambda item: item[0]):
            best = max(met, key=lambda x: (exact_share(x).percent, capped_median(x)))
            share = exact_share(best)
            record = {
                **{"panel": number, **_model(best)},
                **{"gamma": float(best.cell.gamma), "differs": differs, "batch": _batch(best)},
                "uploads": fact(best.cell.columns, "uploads"),
                **{"attack": best.cell.known_as, "line": best.number},
                **{"n": share.of, "exact": share.count},
                **{"exact_lo": share.interval[0], "exact_hi": share.interval[1]},
                **_median(best),
                "grey_mean": mean_of(best, "grey_psnr"),
            }
            records.append(record)
    return pd.DataFrame.from_records(records)


def _batch(line: Line) -> int:
    return int(line.cell.batch or 1)


def _model(line: Line) -> dict[str, Any]:
    cell = line.cell
    return {"model": cell.model, "setting": cell.setting, "dtype": cell.dtype}


def _median(line: Line) -> dict[str, float]:
    values = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    groups = None if line.groups is None else pd.Categorical(line.groups[values.index])
    low, high = median_interval(values.to_numpy(), groups)
    ends = {"psnr_median_lo": low, "psnr_median_hi": high}
    return {"psnr_median": capped_median(line), **ends}


# drawn --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Over:
    """What a panel shows: two columns over a third, a curve for each value of a fourth."""

    column: str
    label: str
    curve: str
    curve_label: str
    shown: dict[str, str]  # the two columns with the words of their axes
    name: str  # of the files
    title: str
    caption: str


UPLOADS = Over(
    *("uploads", "uploads of the same picture", "gamma", "γ {:g}"),
    {"psnr_median": "median PSNR, dB", "psnr_mean": "mean PSNR, dB"},
    *("uploads", "More uploads of the same picture"),
    "PSNR (standard, capped at 100 dB) against the number of uploads of the same image, a curve "
    "for each γ: median on the left, mean on the right. Bands: 95 %, of medians from six.",
)
BATCH = Over(
    *("batch", "pictures in a batch", "uploads", "uploads: {:g}"),
    {"exact_share": "exact pictures, %", "psnr_median": "median PSNR, dB"},
    *("batches", "Larger batches"),
    "Exact pictures and the median PSNR (standard, capped at 100 dB) against the batch, of the "
    "attack that recovers most there, a curve for each number of uploads. Bands: 95 % intervals.",
)
LEVELS = {"grey_mean": ("floor: a uniform grey", ":"), "ceiling_mean": ("rank ceiling", "--")}


def panel_charts(points: pd.DataFrame, over: Over) -> tuple[Chart, ...]:
    """A chart for each of the first panels of what `curve_points` or `batch_points` returns; none
    for no points."""
    if "exact_lo" in points:
        ends = {"exact_share_lo": points["exact_lo"], "exact_share_hi": points["exact_hi"]}
        points = points.assign(exact_share=100 * points["exact"] / points["n"], **ends)
    panels = points.groupby("panel") if len(points) else ()
    return tuple(_panel_chart(panel, over, number) for number, panel in islice(panels, MOST))


def _panel_chart(panel: pd.DataFrame, over: Over, number: object) -> Chart:
    """Two axes beside each other, and what is special about the panel in the title."""
    floor = float(panel["grey_mean"].clip(upper=PSNR_CAP).mean())
    caption = f"{over.caption} Images: {_range(panel['n'])}."
    if not math.isnan(floor):
        caption += f" Dotted: mean of a uniform grey, {floor:.1f} dB."
    with house_style():
        rows = math.ceil((panel[over.curve].nunique() + len(LEVELS)) / 3)
        figure = new_figure(270 + 17 * rows)
        for left, column in zip((34, WIDTH - 186), over.shown, strict=True):
            axes = axes_at(figure, left, 26, left + 174, 216)
            _draw(axes, panel, over, column)
        handles, labels = figure.axes[-1].get_legend_handles_labels()
        look: dict[str, Any] = {"loc": "lower left", "ncols": 3, "fontsize": FONT - 1}
        figure.legend(handles, labels, **look)
        title = f"{over.title}: {_facts(panel)}"
        return chart(figure, f"{over.name}_{number}", title, caption)


def _facts(panel: pd.DataFrame) -> str:
    """The client of a panel, and what is special about it and its attack."""
    first = panel.iloc[0]
    several = panel["gamma"].nunique() > 1 or not first["gamma"]
    gamma = "" if several else f", γ {first['gamma']:g}"
    client = f"{first['model']} ({first['setting']}), {first['dtype']}{gamma}"
    attack = first["attack"] if panel["attack"].nunique() == 1 else ""
    details = [str(word) for word in (attack, first["differs"], first.get("options")) if word]
    return ", ".join([client, *details])


def _draw(axes: Axes, panel: pd.DataFrame, over: Over, column: str) -> None:
    """One column of a panel: curves with their bands, each doubling as wide as any other."""
    for number, (value, curve) in enumerate(panel.groupby(over.curve, sort=True)):
        curve = curve.sort_values(over.column).dropna(subset=[column])
        x, y = curve[over.column], curve[column].clip(upper=PSNR_CAP)
        name = over.curve_label.format(value)
        band(axes, x, curve[f"{column}_lo"], curve[f"{column}_hi"], colour(number))
        look: dict[str, Any] = {"color": colour(number), "linestyle": dashes(number)}
        look |= {"marker": MARKERS[number % len(MARKERS)], "markersize": 5, "linewidth": 1.6}
        axes.plot(x, y, label=f"{name} (n={_range(curve['n'])})", **look)
        for at, score, n in zip(x, y, curve["n"], strict=True):
            (over_it,) = axes.plot(at, score, "o", markersize=12, alpha=0)
            hover(over_it, f"{name}, {over.column} {at:g}: {score:.1f}, n={n}")
    for level, (label, style) in LEVELS.items() if column.startswith("psnr") else ():
        known = panel[level].clip(upper=PSNR_CAP).mean() if level in panel else math.nan
        if not math.isnan(known):
            axes.axhline(known, color=MUTED, linestyle=style, linewidth=1.2, label=label)
    axes.set_xscale("log", base=2)
    ticks = sorted(panel[over.column].unique())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(-2, PSNR_CAP + 3)
    axes.set_xlabel(over.label, fontsize=FONT)
    axes.set_title(over.shown[column], fontsize=FONT, loc="left")
    axes.tick_params(labelsize=FONT - 1)


def _range(numbers: pd.Series[int]) -> str:
    low, high = numbers.min(), numbers.max()
    return f"{low}" if low == high else f"{low}–{high}"
