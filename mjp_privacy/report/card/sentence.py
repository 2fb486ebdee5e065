"""The card's generated sentence: what the best attack gets from the client the report is about."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card.circumstances import circumstances
from mjp_privacy.report.card.clients import Client
from mjp_privacy.report.card.content import CardFigure, CardRow
from mjp_privacy.report.card.flags import ALTERED_BLOCK, ASSUMES_8_BIT, BELOW_FLOOR
from mjp_privacy.report.card.rows import any_uploads_line
from mjp_privacy.report.tables.text import number
from mjp_privacy.report.tables.without_truth import has_truth


def main_row(clients: Sequence[Client], rows: Sequence[CardRow]) -> int:
    """The row the sentence is about: a client with MJP on which a matching attack was run, else a
    defended one, else the first."""

    def rank(place: int) -> tuple[bool, bool, bool, int]:
        client = clients[place]
        return not client.matching, not client.masks, not client.defended, place

    return min(range(len(rows)), key=rank)


def sentence(clients: Sequence[Client], rows: Sequence[CardRow]) -> str:
    """The answer: what the best attack gets from the main client, and what the published one."""
    place = main_row(clients, rows)
    client, row = clients[place], rows[place]
    answer = _answer(client, row, row.one_upload or row.any_uploads)
    published = _published(row)
    return f"{answer}; {published}." if published else f"{answer}."


def beside(clients: Sequence[Client], rows: Sequence[CardRow]) -> str:
    """What more uploads give, and what the undefended client gives."""
    row = rows[place := main_row(clients, rows)]
    parts = [_more_uploads(clients[place], row)]
    for client, other in zip(clients, rows, strict=True):
        if not other.defended and other.one_upload and other is not row:
            alike = circumstances(client) == circumstances(clients[place])
            name = (
                "The undefended client" if alike else f"Undefended, but not alike ({other.client})"
            )
            parts.append(f"{name}: {_recovered(other.one_upload)}.")
            break
    return " ".join(part for part in parts if part)


def _answer(client: Client, row: CardRow, best: CardFigure | None) -> str:
    facts = ", ".join(
        [
            *([f"batch {client.cell.client.batch}"] if client.cell.client.batch else []),
            client.cell.dtype,
        ]
    )
    who = f"the {client.name} client ({facts})"
    if not client.matching:
        return f"What {who} leaks is not known: no attack that knows it was run with success"
    if best is None:
        return without_truth(client, who)
    who = f"{who}, whose pixels are taken to be 8-bit," if ASSUMES_8_BIT in best.flags else who
    uploads = "one upload" if row.one_upload else "several uploads"
    failed = ", and stays below the floor in the mean" if BELOW_FLOOR in best.flags else ""
    return f"From {uploads} of {who} the best attack recovers {_recovered(best)}{failed}"


def _recovered(figure: CardFigure) -> str:
    """`116 of 200 pictures exactly and 188 above 20 dB`."""
    if figure.exact == figure.of:
        return f"all {figure.of} pictures exactly" if figure.of > 1 else "the one picture exactly"
    reached = "all" if figure.above_20 == figure.of else str(figure.above_20)
    exactly = str(figure.exact) if figure.exact else "none"
    pictures = "pictures" if figure.of > 1 else "picture"
    median = "" if figure.median >= PSNR_CAP else f" (median {number(figure.median, 1)} dB)"
    return f"{exactly} of {figure.of} {pictures} exactly and {reached} at 20 dB or more{median}"


def _published(row: CardRow) -> str:
    published, floor = row.published, row.floor
    if published is None or math.isnan(published.mean):
        return ""
    beside = ""
    below = BELOW_FLOOR in published.flags  # on the same images, of which the floor may have more
    if floor is not None and below == (published.mean < floor.mean):
        side = "below" if below else "above"
        beside = f", {side} the floor of {number(floor.mean, 1)} ({floor.attack.replace('_', ' ')})"
    altered = "on an altered client " if ALTERED_BLOCK in published.flags else ""
    return f"the published attack {altered}gets {number(published.mean, 1)} dB in the mean{beside}"


def _more_uploads(client: Client, row: CardRow) -> str:
    line = any_uploads_line(client)
    if row.any_uploads is None or row.one_upload is None or line is None:
        return ""
    return f"With up to {line.uploads} uploads of the same picture: {_recovered(row.any_uploads)}."


def without_truth(client: Client, who: str) -> str:
    """What can be said of recorded uploads whose private images are not known."""
    if all(has_truth(line) for line in client.group.attacks):
        return f"Nothing that {who} leaks could be scored, although the private images are known"
    ids = {str(i) for line in client.matching for i in line.rows["image_id"]}
    residuals = [
        line.scored("gradient_residual", "diagnostic").median() for line in client.matching
    ]
    known = [value for value in residuals if not math.isnan(value)]
    smallest = (
        f"; the best attack's pictures leave {min(known):.2g} of the gradient unexplained (median)"
        if known
        else ""
    )
    return (
        f"{len(ids)} picture{'' if len(ids) == 1 else 's'} were reconstructed from uploads of {who}"
        f"{smallest}. The private images are not known here, so nothing was scored"
    )
