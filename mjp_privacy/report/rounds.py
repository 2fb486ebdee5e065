"""PSNR against the number of uploads, a curve for each γ: rounds.csv and figures/rounds.png."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import plain
from mjp_privacy.metrics.statistics import PSNR_CAP, median_interval
from mjp_privacy.report.cell_columns import client_text, fact, options_text, target_of
from mjp_privacy.report.loading import Line
from mjp_privacy.report.measures import THRESHOLDS, capped_median, success, summary
from mjp_privacy.report.pictures.pixels import shorten
from mjp_privacy.report.spreadsheets import with_formula_free
from mjp_privacy.report.tables.figures import varying_columns
from mjp_privacy.training.drawing import COLOURS, colour, drawn, plain_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
INK, MUTED, ACCENT, GRID = "#1f2933", "#6b7780", "#b4451f", "#dfe4e8"

MARKERS = "osD^vPX"
STATISTICS = {"psnr_median": "median", "psnr_mean": "mean"}
ROUND_OPTIONS = frozenset(("uploads", "rounds"))


def curve_points(lines: Sequence[Line]) -> pd.DataFrame:
    """One row for each line of every attack that was run with several numbers of uploads.

    Lines share a `panel` number if run, target, attack and options are equal up to γ and the
    number of uploads. Empty where there is no such attack.
    """
    panels: dict[object, list[Line]] = {}
    for line in lines:
        if line.role == "attack" and line.count("psnr", "standard"):
            panels.setdefault(_panel(line), []).append(line)
    kept = [panel for panel in panels.values() if len({line.uploads for line in panel}) > 1]
    shown = [line for panel in kept for line in panel]
    facts = [key for key in varying_columns(shown) if key not in ("uploads", "attack_options")]
    records = [
        _point(line, facts) | {"panel": number}
        for number, panel in enumerate(kept, 1)
        for line in sorted(panel, key=lambda line: (line.cell.gamma, line.uploads))
    ]
    return pd.DataFrame.from_records(records)


def _panel(line: Line) -> object:
    target = tuple((key, value) for key, value in target_of(line.cell) if key != "gamma")
    name = line.cell.attack.known_as
    return line.run, target, name, line.cell.attack.victim, _other_options(line)


def _other_options(line: Line) -> str:
    """The attack's options except its number of uploads, as JSON with sorted keys."""
    try:
        options = json.loads(line.cell.attack.options or "{}")
    except (TypeError, ValueError):
        return str(line.cell.attack.options)
    if not isinstance(options, dict):
        return str(options)
    others = {key: value for key, value in options.items() if key not in ROUND_OPTIONS}
    return json.dumps(others, sort_keys=True)


def _point(line: Line, facts: Sequence[str]) -> dict[str, Any]:
    score = summary(line, "psnr", "standard", cap=PSNR_CAP)
    values = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    groups = None if line.groups is None else [line.groups[image] for image in values.index]
    low, high = median_interval(values.to_numpy(), groups)
    options = options_text(_other_options(line))
    return {
        "line": line.number,
        "run": line.run,
        "model": line.cell.model.label,
        "setting": line.cell.setting,
        "dtype": line.cell.dtype,
        "attack": line.cell.attack.known_as,
        "options": "" if options == "–" else options,
        "differs": "" if (text := client_text(line.cell.columns, facts)) == "–" else text,
        "gamma": float(line.cell.gamma),
        "uploads": fact(line.cell.columns, "uploads"),
        "n": score.n,
        "n_not_scored": score.counts.total - score.n,
        **{"psnr_mean": score.mean, "psnr_mean_lo": score.low, "psnr_mean_hi": score.high},
        "psnr_median": capped_median(line, "psnr", "standard"),
        **{
            "psnr_median_lo": low,
            "psnr_median_hi": high,
            "psnr_exact": summary(line, "psnr", "paper", interval=False).exact,
        },
        **{f"psnr_from_{limit}": success(line, limit, "standard") for limit in THRESHOLDS},
        "grey_mean": _mean(line, "grey_psnr"),
        "ceiling_mean": _mean(line, "ceiling_psnr"),
    }


def _mean(line: Line, diagnostic: str) -> float:
    return summary(line, diagnostic, "diagnostic", cap=PSNR_CAP, interval=False).mean


def write_points(points: pd.DataFrame, path: Path) -> None:
    """Write rounds.csv from what `curve_points` returns."""
    table = with_formula_free(points)
    table.to_csv(path, errors="backslashreplace", index=False, lineterminator="\n")


# picture ------------------------------------------------------------------------------------------


@plain_texts()
def write_rounds(points: pd.DataFrame, path: Path) -> bool:
    """Draw rounds.png from what `curve_points` returns; False where that is empty."""
    if points.empty:
        return False
    figure = _figure(points)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return True


def _figure(points: pd.DataFrame) -> Figure:
    """One row for each panel: the median on the left, the mean on the right."""
    from matplotlib.figure import Figure

    panels = _drawn([panel for _, panel in points.groupby("panel", sort=True)])
    figure = Figure(figsize=(9.6, 0.35 + 3.4 * len(panels)), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(panels), len(STATISTICS), squeeze=False, sharey="row")
    for row, panel in zip(grid, panels, strict=True):
        for axes, (column, name) in zip(row, STATISTICS.items(), strict=True):
            _curves(axes, panel, column)
            axes.set_title(f"{name}: {_title(panel)}", fontsize=8, color=INK)
        row[0].set_ylabel("PSNR (standard), dB", fontsize=9)
        row[-1].legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in grid[-1]:
        axes.set_xlabel("uploads of the same image", fontsize=9)
    return figure


def _drawn(panels: Sequence[pd.DataFrame]) -> Sequence[pd.DataFrame]:
    """The panels with three or more numbers of uploads; if there are none of these, all panels."""
    curves = [panel for panel in panels if panel["uploads"].nunique() > 2]
    return curves or panels


def _title(panel: pd.DataFrame) -> str:
    first = panel.iloc[0]
    details = [str(first[key]) for key in ("differs", "options") if first[key]]
    return "\n".join(
        [
            f"{shorten(drawn(first['model']), 30)} ({first['setting']}), {first['dtype']}",
            shorten(plain(", ".join([str(first["attack"]), *details])), 60),
        ]
    )


def _curves(axes: Axes, panel: pd.DataFrame, column: str) -> None:
    for number, (ratio, curve) in enumerate(panel.groupby("gamma", sort=True)):
        shade = colour(number)
        style = "-" if number < len(COLOURS) else "--"
        label = f"γ = {ratio:g} (n={_count(curve)})"
        low, high = curve[f"{column}_lo"], curve[f"{column}_hi"]
        axes.fill_between(curve["uploads"], low, high, color=shade, alpha=0.15, linewidth=0)
        axes.plot(
            curve["uploads"],
            curve[column],
            style + MARKERS[number % len(MARKERS)],
            color=shade,
            markersize=3.5,
            linewidth=1.4,
            label=label,
        )
    for name, shade, style in (("grey", MUTED, ":"), ("ceiling", ACCENT, "--")):
        level = panel[f"{name}_mean"].mean()
        if not math.isnan(level):
            label = "floor: grey" if name == "grey" else "ceiling"
            axes.axhline(level, color=shade, linestyle=style, linewidth=1.2, label=label)
    axes.set_xticks(sorted(panel["uploads"].unique()))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _count(curve: pd.DataFrame) -> str:
    low, high = curve["n"].min(), curve["n"].max()
    return str(low) if low == high else f"{low}–{high}"
