"""Fills the page from a report's contents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card.chosen_clients import distinct_clients
from mjp_privacy.report.card.circumstances import circumstances
from mjp_privacy.report.card.clients import Client
from mjp_privacy.report.card.flags import Flag, fewer_attacks
from mjp_privacy.report.card.rows import (
    any_uploads_line,
    floor_level,
    one_upload_line,
    published_line,
)
from mjp_privacy.report.charts.distributions import distribution_charts
from mjp_privacy.report.charts.tradeoff import tradeoff_chart
from mjp_privacy.report.charts.tradeoff_points import TradeoffPoint, family_and_strength
from mjp_privacy.report.charts.uploads_curve import uploads_charts
from mjp_privacy.report.contents import Contents
from mjp_privacy.report.export import HEADING
from mjp_privacy.report.loading import Line
from mjp_privacy.report.measures import summary
from mjp_privacy.report.page.content import Chart, PageContent, PageLine
from mjp_privacy.report.page.gallery import STRIP_QUANTILES, Gallery
from mjp_privacy.report.page.glossary import GLOSSARY
from mjp_privacy.report.page.lines import exact_by_line, line_flags, page_line, scores_by_line
from mjp_privacy.report.page.reproduce import commands, provenance
from mjp_privacy.report.published import CITATION
from mjp_privacy.report.tables.agreement import agreement_table
from mjp_privacy.report.tables.identification import evenly_spaced, identification_table
from mjp_privacy.report.tables.paired import tests_table
from mjp_privacy.report.tables.text import TextTable

MOST_CURVES = 12
MOST_COMPARED = 100_000
"""Images times lines whose scores the page holds; they take 6 MB of it."""
IDENTIFIED = 4  # lines whose pictures are looked up among all images


def page_content(
    contents: Contents,
    gallery: Gallery,
    downloads: Sequence[tuple[str, str]],
    charts: Mapping[str, tuple[Chart, ...]] | None = None,
) -> PageContent:
    """All of index.html; `downloads`: the files beside it and what they hold; charts: those of
    `page_charts`, where they were made before."""
    lines = [*contents.lines, *contents.derived]
    every = sorted(set().union(*(line.images.names for line in contents.lines)))
    most = MOST_COMPARED // max(1, len(lines))
    image_ids = compared_images(every, [shown.image_id for shown in gallery.shown], most)
    page_lines, flags = _lines(contents)
    strip = contents.strip
    return PageContent(
        title=HEADING,
        citation=f"The defence asked about: {CITATION}",
        card=contents.card,
        strip_columns=tuple((h, line.number) for h, line in strip.columns) if strip else (),
        lines=page_lines,
        scores=scores_by_line(lines, image_ids),
        image_ids=tuple(image_ids),
        pictures=gallery.pictures,
        shown=tuple(gallery.shown),
        charts=page_charts(contents) if charts is None else charts,
        tables=tuple(_tables(contents)),
        folded_tables=tuple(contents.details),
        notes=contents.notes,
        glossary=GLOSSARY,
        provenance=provenance(contents.runs, contents.lines),
        reproduce=commands(contents.runs, contents.lines),
        downloads=tuple(downloads),
        further=_remarks(gallery, len(every), len(image_ids)),
        table5=contents.table5,
        comparisons=tuple(contents.comparisons),
        flags=flags,
        strip_caption=_strip_caption(contents),
        exact=exact_by_line(lines, image_ids),
    )


def _strip_caption(contents: Contents) -> str:
    """Which client the strip shows, and at which quantiles of which score."""
    if not contents.card.rows or contents.strip is None:
        return ""
    client = contents.card.rows[contents.card.main].client
    quantiles = ", ".join(f"{100 * quantile:.0f}" for quantile in STRIP_QUANTILES)
    return (
        f"{client}: the same pictures in every column, at the {quantiles} % quantiles of the best "
        "attack's PSNR on one upload, never picked."
    )


def _lines(contents: Contents) -> tuple[tuple[PageLine, ...], tuple[Flag, ...]]:
    """The page's lines in the order of their numbers, and every flag that one of them has."""
    made: list[PageLine] = []
    flags: dict[str, Flag] = {}
    for client in (*contents.clients, *contents.controls_only):
        for line in (*client.lines, *client.group.derived):
            of_line = line_flags(line, client)
            flags |= {flag.mark: flag for flag in of_line}
            title = contents.client_names[line.number]
            made.append(page_line(line, client, title, of_line))
    return tuple(sorted(made, key=lambda line: line.number)), tuple(flags.values())


def compared_images(every: Sequence[str], shown: Sequence[str], most: int) -> list[str]:
    """The images whose scores are in the page, where two lines are compared image by image: all,
    or about `most` that are evenly spaced among them, and those shown."""
    if len(every) <= most:
        return list(every)
    return sorted({*evenly_spaced(every, max(most, 2)), *shown})


def _remarks(gallery: Gallery, images: int, compared: int) -> dict[str, str]:
    """What the page leaves out; `compared`: images whose scores are in it."""
    remarks = {}
    if images > len(gallery.shown):
        here = "All scores are here, and" if compared == images else "The rows hold all scores, and"
        remarks["pictures"] = (
            f"{len(gallery.shown)} of {images} images, at evenly spread quantiles; "
            f"the page has no room for more. {here} `mjp report --pictures all` "
            "writes every picture as a file."
        )
    if compared < images:
        remarks["ladder"] = (
            f"Figures are over all {images} images; two lines are compared image by image on "
            f"{compared} of them, evenly spaced in the order of their ids."
        )
    return remarks


def _tables(contents: Contents) -> list[TextTable]:
    lines = card_lines(contents)
    main = contents.card.rows[contents.card.main].client if contents.card.rows else ""
    shown = sorted(lines, key=lambda named: not named[0].startswith(f"{main}: "))[:IDENTIFIED]
    chooser = contents.strip.chooser if contents.strip else None
    tables = [
        *contents.beside_paper,
        tests_table(contents.groups),
        identification_table([line for _, line in shown], many_runs=contents.loaded.many_runs),
        agreement_table(chooser) if chooser is not None else None,
    ]
    return [table for table in tables if table is not None]


def card_lines(contents: Contents) -> list[tuple[str, Line]]:
    """The lines behind the card's figures, each with its client's name and its own."""
    named: dict[int, tuple[str, Line]] = {}
    clients = {client.lines[0].number: client for client in contents.clients}
    titles = [row.client for row in contents.card.rows]
    shown = [c for c in clients.values() if contents.client_names[c.lines[0].number] in titles]
    for client in shown or contents.clients:
        title = contents.client_names[client.lines[0].number]
        best = (one_upload_line(client), any_uploads_line(client))
        for line in (*best, published_line(client)):
            if line is not None and len(line.images):
                named.setdefault(line.number, (f"{title}: {line.attack}", line))
    return list(named.values())


def page_charts(contents: Contents) -> dict[str, tuple[Chart, ...]]:
    """The charts by section of the page; a section without any is left out."""
    curves = card_lines(contents)[:MOST_CURVES]
    names = {line.number: name for name, line in curves}
    points = contents.points
    charts = {
        "distributions": distribution_charts([line for _, line in curves], names=names),
        "uploads": uploads_charts(points) if len(points) else (),
        "tradeoff": _tradeoff(contents),
    }
    return {name: of_section for name, of_section in charts.items() if of_section}


def _tradeoff(contents: Contents) -> tuple[Chart, ...]:
    """Accuracy against leakage, where clients that are otherwise alike differ in defence.

    Of several groups of like clients the largest is drawn; clients on which fewer attacks were run
    are left out and counted.
    """
    alike: dict[object, list[Client]] = {}
    for client in distinct_clients(contents.groups):
        if one_upload_line(client) is not None:
            around = (circumstances(client), client.lines[0].run)
            alike.setdefault(around, []).append(client)
    group = max(alike.values(), key=len, default=[])
    compared = [client for client in group if not fewer_attacks(client, contents.clients)]
    points: list[TradeoffPoint] = []
    for client in compared:
        point = _point(client, contents.client_names[client.lines[0].number])
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
        n=leakage.counts.total,
        not_reached=leakage.counts.total - leakage.n,
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
