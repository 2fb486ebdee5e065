"""Fills the page from a report's contents."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.report.contents import Contents
from mjp_privacy.report.export import HEADING
from mjp_privacy.report.notes import Flag
from mjp_privacy.report.page.content import PageContent, PageLine
from mjp_privacy.report.page.gallery import STRIP_QUANTILES, Gallery
from mjp_privacy.report.page.glossary import GLOSSARY
from mjp_privacy.report.page.lines import exact_by_line, line_flags, page_line, scores_by_line
from mjp_privacy.report.page.reproduce import commands, provenance
from mjp_privacy.report.published import CITATION
from mjp_privacy.report.tables.comparisons import agreement_table, tests_table
from mjp_privacy.report.tables.identification import evenly_spaced, identification_table
from mjp_privacy.report.tables.text import TextTable

MOST_CURVES = 12
MOST_COMPARED = 100_000
"""Images times lines whose scores the page holds; they take 6 MB of it."""
IDENTIFIED = 4  # lines whose pictures are looked up among all images


def page_content(
    contents: Contents,
    gallery: Gallery,
    downloads: Sequence[tuple[str, str]],
) -> PageContent:
    """All of index.html; `downloads`: the files beside it and what they hold."""
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
        charts=contents.charts,
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
            flags |= {flag.key: flag for flag in of_line}
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
    lines = contents.card_lines
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
