"""Figures over the number of uploads of a picture, and over the batch that it shares: rounds.csv
and batches.csv, and their charts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mjp_privacy.core.drawing import MARKERS, MUTED, band, colour, dashes, house_style
from mjp_privacy.metrics.statistics import PSNR_CAP, median_interval
from mjp_privacy.report.charts.chart import FONT, WIDTH, Chart, axes_at, chart, hover, new_figure
from mjp_privacy.report.figures import (
    THRESHOLDS,
    capped_median,
    exact_share,
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

OF_PARTNERS = ("partners", "mask")
"""Facts that mean nothing to a picture that is alone in its batch."""


# points -------------------------------------------------------------------------------------------


def curve_points(lines: Sequence[Line]) -> pd.DataFrame:
    """One row for each line of every attack that was run with several numbers of uploads.

    Lines share a `panel` number if run, target, attack and options are equal up to γ and the
    number of uploads. Empty where there is no such attack.
    """
    panels: dict[object, list[Line]] = {}
    for line in lines:
        if line.role == "attack" and line.count("psnr", "standard"):
            cell = line.cell
            panel = _client(line, "gamma"), cell.known_as, cell.victim, _options(line)
            panels.setdefault(panel, []).append(line)
    kept = [panel for panel in panels.values() if len({line.uploads for line in panel}) > 1]
    every = varying_columns([line for panel in kept for line in panel])
    facts = [key for key in every if key not in ("uploads", "attack_options")]
    return pd.DataFrame.from_records(
        [
            _upload_point(line, number, facts)
            for number, panel in enumerate(kept, 1)
            for line in sorted(panel, key=lambda line: (line.cell.gamma, line.uploads))
        ]
    )


def _client(line: Line, *without: str) -> object:
    """What is attacked, but for some facts."""
    return line.run, tuple(pair for pair in target_of(line.cell) if pair[0] not in without)


def _options(line: Line) -> str:
    """The attack's options except its number of uploads, as JSON with sorted keys."""
    options = options_of(line.cell.attack_options)
    if options is None:
        return str(line.cell.attack_options)
    others = {key: value for key, value in options.items() if key not in ("uploads", "rounds")}
    return json.dumps(others, sort_keys=True)


def _upload_point(line: Line, panel: int, facts: Sequence[str]) -> dict[str, Any]:
    score = summary(line, "psnr", "standard")
    return {
        **{"line": line.number, "run": line.run, **_model(line)},
        "attack": line.cell.known_as,
        "options": options_text(_options(line)).removeprefix("–"),
        "differs": client_text(line.cell.columns, facts).removeprefix("–"),
        "gamma": float(line.cell.gamma),
        "uploads": fact(line.cell.columns, "uploads"),
        **{"n": score.n, "n_not_scored": score.counts.total - score.n},
        **{"psnr_mean": score.mean, "psnr_mean_lo": score.low, "psnr_mean_hi": score.high},
        **_median(line),
        "psnr_exact": exact_share(line).count,
        **{f"psnr_from_{limit}": success_share(line, limit).percent for limit in THRESHOLDS},
        **{"grey_mean": _level(line, "grey_psnr"), "ceiling_mean": _level(line, "ceiling_psnr")},
        "panel": panel,
    }


def batch_points(lines: Sequence[Line]) -> pd.DataFrame:
    """One row for each client, batch and number of uploads: the attack that recovers most there.

    Clients that are equal up to their batch share a `panel` number. A client of single pictures has
    no partners, so it opens the panels of fixed and of fresh ones. Empty where no client was met
    with several batches.
    """
    single: dict[object, list[Line]] = {}
    panels: dict[object, list[Line]] = {}
    for line in lines:
        tried = line.role == "attack" and line.cell.victim != "april_block"
        if tried and line.count("psnr", "standard"):
            alone = _batch(line) == 1
            client = _client(line, "batch", *(OF_PARTNERS if alone else ()))
            (single if alone else panels).setdefault(client, []).append(line)
    several = [
        [*single.get(_client(members[0], "batch", *OF_PARTNERS), []), *members]
        for members in panels.values()
    ]
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
            records.append(_batch_point(best, number, differs))
    return pd.DataFrame.from_records(records)


def _batch(line: Line) -> int:
    return int(line.cell.batch or 1)


def _batch_point(line: Line, panel: int, differs: str) -> dict[str, Any]:
    share = exact_share(line)
    return {
        **{"panel": panel, **_model(line)},
        **{"gamma": float(line.cell.gamma), "differs": differs, "batch": _batch(line)},
        "uploads": fact(line.cell.columns, "uploads"),
        **{"attack": line.cell.known_as, "line": line.number},
        **{"n": share.of, "exact": share.count},
        **{"exact_lo": share.interval[0], "exact_hi": share.interval[1]},
        **_median(line),
        "grey_mean": _level(line, "grey_psnr"),
    }


def _model(line: Line) -> dict[str, Any]:
    cell = line.cell
    return {"model": cell.model, "setting": cell.setting, "dtype": cell.dtype}


def _level(line: Line, diagnostic: str) -> float:
    return summary(line, diagnostic, DIAGNOSTIC, interval=False).mean


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
    "for each γ: median on the left, mean on the right. Bands: 95 % bootstrap intervals.",
)
BATCH = Over(
    *("batch", "pictures in a batch", "uploads", "uploads: {:g}"),
    {"exact_share": "exact pictures, %", "psnr_median": "median PSNR, dB"},
    *("batches", "Larger batches"),
    "Exact pictures and the median PSNR (standard, capped at 100 dB) against the batch, of the "
    "attack that recovers most there, a curve for each number of uploads. Bands: 95 % intervals.",
)
LEVELS = {"grey_mean": ("floor: a uniform grey", ":"), "ceiling_mean": ("ceiling", "--")}


def uploads_charts(points: pd.DataFrame) -> tuple[Chart, ...]:
    """A chart for each panel of what `curve_points` returns; none for no points.

    Panels with two numbers of uploads are counted where there are some with more.
    """
    panels = [panel for _, panel in points.groupby("panel")] if len(points) else []
    shown = [panel for panel in panels if panel["uploads"].nunique() > 2] or panels
    charts = [_chart(panel, UPLOADS, number) for number, panel in enumerate(shown, 1)]
    if left_out := len(panels) - len(shown):
        told = f" {left_out} more, with two numbers of uploads each: see rounds.csv."
        charts[-1] = replace(charts[-1], caption=charts[-1].caption + told)
    return tuple(charts)


def batches_charts(points: pd.DataFrame) -> tuple[Chart, ...]:
    """A chart for each panel of what `batch_points` returns; none for no points."""
    if points.empty:
        return ()
    shares = {"exact_share": 100 * points["exact"] / points["n"]}
    ends = {"exact_share_lo": points["exact_lo"], "exact_share_hi": points["exact_hi"]}
    panels = points.assign(**shares, **ends).groupby("panel")
    return tuple(_chart(panel, BATCH, number) for number, (_, panel) in enumerate(panels, 1))


def _chart(panel: pd.DataFrame, over: Over, number: int) -> Chart:
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
        title = f"{over.title}: {', '.join(_facts(panel))}"
        return chart(figure, f"{over.name}_{number}", title, caption)


def _facts(panel: pd.DataFrame) -> list[str]:
    """The client of a panel, and what is special about it and its attack."""
    first = panel.iloc[0]
    several = panel["gamma"].nunique() > 1 or not first["gamma"]
    gamma = "" if several else f", γ {first['gamma']:g}"
    client = f"{first['model']} ({first['setting']}), {first['dtype']}{gamma}"
    attack = first["attack"] if panel["attack"].nunique() == 1 else ""
    details = [str(word) for word in (attack, first["differs"], first.get("options")) if word]
    return [client, *([", ".join(details)] if details else [])]


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
    ticks = _apart(sorted(panel[over.column].unique()))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(-2, PSNR_CAP + 3)
    axes.set_xlabel(over.label, fontsize=FONT)
    axes.set_title(over.shown[column], fontsize=FONT, loc="left")
    axes.tick_params(labelsize=FONT - 1)


def _range(numbers: pd.Series[int]) -> str:
    low, high = numbers.min(), numbers.max()
    return f"{low}" if low == high else f"{low}–{high}"


def _apart(values: Sequence[float]) -> list[float]:
    """Those with room for their text: the last, and any that is an eighth of the axis from it."""
    room = max(np.log2(values[-1] / max(values[0], 1)) / 8, 0.01)
    shown = [values[-1]]
    for value in values[-2::-1]:
        if np.log2(shown[-1] / max(value, 1)) > room:
            shown.append(value)
    return shown[::-1]
