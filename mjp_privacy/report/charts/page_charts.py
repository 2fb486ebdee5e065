"""Which charts a report has, and what stands on each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card import floor_level, one_upload_line
from mjp_privacy.report.charts.chart import Chart
from mjp_privacy.report.charts.curves import uploads_charts
from mjp_privacy.report.charts.distributions import distribution_charts
from mjp_privacy.report.charts.tradeoff import tradeoff_chart
from mjp_privacy.report.charts.tradeoff_points import TradeoffPoint, family_and_strength
from mjp_privacy.report.clients import Client, circumstances, distinct_clients
from mjp_privacy.report.lines import Line, summary
from mjp_privacy.report.notes import missed_attacks
from mjp_privacy.report.worst_case import Group


def page_charts(
    groups: Sequence[Group],
    names: Mapping[int, str],
    curves: Sequence[tuple[str, Line]],
    points: pd.DataFrame,
) -> dict[str, tuple[Chart, ...]]:
    """The charts by section of the page; a section without any is left out.

    names   what the report calls the client of each line, by the line's number
    curves  lines that are drawn as distributions, with their titles
    points  PSNR against the number of uploads
    """
    charts = {
        "distributions": distribution_charts(curves),
        "uploads": uploads_charts(points),
        "tradeoff": _tradeoff(groups, names),
    }
    return {name: of_section for name, of_section in charts.items() if of_section}


def _tradeoff(groups: Sequence[Group], names: Mapping[int, str]) -> tuple[Chart, ...]:
    """Accuracy against leakage, where clients that are otherwise alike differ in defence.

    Of several groups of like clients the largest is drawn; clients on which fewer attacks were run
    are left out and counted.
    """
    alike: dict[object, list[Client]] = {}
    for client in distinct_clients(groups):
        if one_upload_line(client) is not None:
            around = (circumstances(client), client.lines[0].run)
            alike.setdefault(around, []).append(client)
    group = max(alike.values(), key=len, default=[])
    compared = [client for client in group if not missed_attacks(client, group)]
    points: list[TradeoffPoint] = []
    for client in compared:
        point = _point(client, names[client.lines[0].number])
        ordered = any(p.family == point.family and p.strength == point.strength for p in points)
        points.append(replace(point, strength=math.nan) if ordered else point)
    drawable = [point for point in points if point.drawable]
    if len(drawable) < 3 or len({point.family for point in drawable}) < 2:
        return ()
    known = [level for c in compared if not math.isnan(level := floor_level(c))]
    chart = tradeoff_chart(points, floor=sum(known) / len(known) if known else math.nan)
    left = len(group) - len(compared)
    more = (
        f" {left} further clients had fewer attacks run on them and are left out." if left else ""
    )
    return (replace(chart, caption=chart.caption + more),)


def _point(client: Client, title: str) -> TradeoffPoint:
    line = one_upload_line(client)
    assert line is not None
    leakage = summary(line, "psnr", "standard", cap=PSNR_CAP)
    accuracy = summary(line, "top1", "intact")
    family, strength = family_and_strength(_defence(client))
    return TradeoffPoint(
        label=title,
        family=family,
        strength=strength,
        accuracy=100 * accuracy.mean,
        accuracy_low=100 * accuracy.low,
        accuracy_high=100 * accuracy.high,
        leakage=leakage.mean,
        leakage_low=leakage.low,
        leakage_high=leakage.high,
        n=leakage.n,
        not_scored=leakage.counts.total - leakage.n,
    )


def _defence(client: Client) -> str:
    """The client's defences in the words of comparison.csv: `MJP γ=0.27; int8`."""
    cell = client.cell
    rule = "MJP" if client.masks else "shuffled"
    parts = [f"{rule} γ={cell.gamma:g}"] if cell.gamma else []
    parts += ["dal"] if cell.client.dal and cell.gamma else []
    parts += [f"plain_share {cell.client.plain_share:g}"] if cell.client.plain_share else []
    parts += [f"withhold {cell.client.withhold}"] if cell.client.withhold else []
    parts += ["positions sinusoidal"] if cell.client.positions != "own" else []
    parts += [f"lora {cell.client.lora}"] if cell.client.lora else []
    noise = cell.client.position_noise
    parts += [f"position_noise {noise:g}"] if noise else []
    defences = cell.client.defenses
    parts += defences.split(" + ") if defences else []
    return "; ".join(parts) or "none"
