"""What is left of pictures that share a batch: batches.csv and figures/batches.png.

A panel is one client but for its batch; the curves count uploads. Every point is the attack that
recovers most pictures there, which the CSV names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import plain
from mjp_privacy.metrics.statistics import PSNR_CAP, median_interval
from mjp_privacy.report.cell_columns import CLIENT_FACTS, client_text, fact, target_of
from mjp_privacy.report.line import Line
from mjp_privacy.report.measures import capped_median, exact_share, summary
from mjp_privacy.report.pictures.pixels import shorten
from mjp_privacy.report.tables.figures import varying_columns
from mjp_privacy.training.drawing import COLOURS, colour, drawn, plain_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
INK, MUTED, GRID = "#1f2933", "#6b7780", "#dfe4e8"
MARKERS = "osD^vPX"

Target = tuple[tuple[str, Any], ...]


def batch_points(lines: Sequence[Line]) -> pd.DataFrame:
    """One row for each client, batch and number of uploads: the attack that recovers most there.

    Clients that are equal up to their batch share a `panel` number. A client of single pictures has
    no partners, so it opens the panels of fixed and of fresh ones. Empty where no client was met
    with several batches.
    """
    panels: dict[Target, list[Line]] = {}
    attacks = [line for line in lines if _counts(line)]
    for line in attacks:
        panels.setdefault(_client(line), []).append(line)
    kept = []
    for key, members in panels.items():
        if len({_batch(line) for line in members} - {1}) and ("batch", 1) not in key:
            kept.append([*_of_single_pictures(attacks, key), *members])
    kept = [members for members in kept if len({_batch(line) for line in members}) > 1]
    shown = [line for members in kept for line in members]
    facts = [key for key in varying_columns(shown) if key in CLIENT_FACTS and key != "batch"]
    records = [
        {"panel": number, **_point(line, facts, members)}
        for number, members in enumerate(kept, 1)
        for line in _best(members)
    ]
    return pd.DataFrame.from_records(records)


def _counts(line: Line) -> bool:
    """Whether it is an attack on a client as it is, with scores."""
    attacked = line.role == "attack" and line.cell.attack.victim != "april_block"
    return attacked and bool(line.count("psnr", "standard"))


def _batch(line: Line) -> int:
    return int(line.cell.client.batch or 1)


def _client(line: Line, *without: str) -> Target:
    left_out = {"batch", *without}
    facts = [(key, value) for key, value in target_of(line.cell) if key not in left_out]
    facts.append(("run", line.run))
    return (("batch", 1), *facts) if _batch(line) == 1 else tuple(facts)


def _of_single_pictures(lines: Sequence[Line], panel: Target) -> list[Line]:
    """The lines of the panel's client where its batches hold one picture."""
    shared = ("partners", "mask")  # which mean nothing to a picture that is alone
    wanted = tuple((key, value) for key, value in panel if key not in shared)
    return [
        line
        for line in lines
        if _batch(line) == 1 and _client(line, *shared) == (("batch", 1), *wanted)
    ]


def _best(members: Sequence[Line]) -> Iterator[Line]:
    """For each batch and number of uploads the line that recovers most."""
    places: dict[tuple[int, int], list[Line]] = {}
    for line in members:
        places.setdefault((_batch(line), int(line.uploads)), []).append(line)
    for place in sorted(places):
        yield max(places[place], key=lambda line: (exact_share(line).percent, _median(line)))


def _median(line: Line) -> float:
    return capped_median(line, "psnr", "standard")


def _point(line: Line, facts: Sequence[str], members: Sequence[Line]) -> dict[str, Any]:
    values = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    groups = None if line.groups is None else [line.groups[image] for image in values.index]
    low, high = median_interval(values.to_numpy(), groups)
    share = exact_share(line)
    several = next(member for member in members if _batch(member) > 1)
    text = client_text(several.cell.columns, facts)
    return {
        "model": line.cell.model.label,
        "setting": line.cell.setting,
        "dtype": line.cell.dtype,
        "gamma": float(line.cell.gamma),
        "differs": "" if text == "–" else text,
        "batch": _batch(line),
        "uploads": fact(line.cell.columns, "uploads"),
        "attack": line.cell.attack.known_as,
        "line": line.number,
        "n": share.of,
        "exact": share.count,
        "exact_lo": share.interval[0],
        "exact_hi": share.interval[1],
        "psnr_median": _median(line),
        "psnr_median_lo": low,
        "psnr_median_hi": high,
        "grey_mean": summary(line, "grey_psnr", "diagnostic", interval=False).mean,
    }


# picture ------------------------------------------------------------------------------------------


@plain_texts()
def write_batches(points: pd.DataFrame, path: Path) -> bool:
    """Draw batches.png from what `batch_points` returns; False where that is empty."""
    if points.empty:
        return False
    figure = _figure(points)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return True


def _figure(points: pd.DataFrame) -> Figure:
    """A row for each panel: the share of exact pictures on the left, the median on the right."""
    from matplotlib.figure import Figure

    panels = [panel for _, panel in points.groupby("panel", sort=True)]
    figure = Figure(figsize=(9.6, 0.35 + 2.9 * len(panels)), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for row, panel in zip(grid, panels, strict=True):
        share = panel.assign(
            shown=100 * panel["exact"] / panel["n"],
            low=panel["exact_lo"],
            high=panel["exact_hi"],
        )
        _curves(row[0], share)
        row[0].set_ylim(-3, 103)
        row[0].set_ylabel("exact pictures, %", fontsize=9)
        _curves(
            row[1],
            panel.rename(
                columns={
                    "psnr_median": "shown",
                    "psnr_median_lo": "low",
                    "psnr_median_hi": "high",
                }
            ),
        )
        _floor(row[1], panel)
        row[1].set_ylim(0, PSNR_CAP + 3)
        row[1].set_ylabel("median PSNR, dB", fontsize=9)
        row[0].set_title(_title(panel), fontsize=8, color=INK, loc="left")
        row[1].legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in grid[-1]:
        axes.set_xlabel("pictures in a batch", fontsize=9)
    return figure


def _title(panel: pd.DataFrame) -> str:
    first = panel.iloc[0]
    ratio = f", γ {first['gamma']:g}" if first["gamma"] else ""
    facts = f"{drawn(first['model'])} ({first['setting']}), {first['dtype']}{ratio}"
    return "\n".join([shorten(facts, 60), shorten(plain(first["differs"] or "as it is"), 60)])


def _curves(axes: Axes, panel: pd.DataFrame) -> None:
    """`shown` with the interval from `low` to `high` over the batch, a curve for each number of
    uploads."""
    for number, (uploads, curve) in enumerate(panel.groupby("uploads", sort=True)):
        shade, style = colour(number), "-" if number < len(COLOURS) else "--"
        axes.fill_between(
            curve["batch"], curve["low"], curve["high"], color=shade, alpha=0.12, linewidth=0
        )
        axes.plot(
            curve["batch"],
            curve["shown"],
            style + MARKERS[number % len(MARKERS)],
            color=shade,
            markersize=3.5,
            linewidth=1.4,
            label=f"{uploads} upload{'' if uploads == 1 else 's'} (n={curve['n'].max()})",
        )
    axes.set_xscale("log", base=2)
    ticks = sorted(panel["batch"].unique())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _floor(axes: Axes, panel: pd.DataFrame) -> None:
    level = panel["grey_mean"].mean()
    if not math.isnan(level):
        axes.axhline(level, color=MUTED, linestyle=":", linewidth=1.2, label="floor: grey")
