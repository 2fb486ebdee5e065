"""The card's generated sentence: what the best attack gets from the client the report is about."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card.circumstances import circumstances
from mjp_privacy.report.card.clients import Client
from mjp_privacy.report.card.content import CardFigure, CardRow
from mjp_privacy.report.card.flags import (
    ALTERED_BLOCK,
    ASSUMES_8_BIT,
    BELOW_FLOOR,
    RESIDUAL_CONVERGED,
    UNFINISHED,
)
from mjp_privacy.report.card.rows import any_uploads_line
from mjp_privacy.report.tables.text import number
from mjp_privacy.report.worst_case import has_truth

DEFENDED_NAMED = 2
"""Defended clients that are named after an undefended one."""

HALF = 0.5
"""Share of the pictures at 20 dB or more from which a defence does not protect them."""

LADDER = "ladder_vit"
"""The config that runs every attack that knows MJP on one's own weights."""

MATCHES = 1e-2
"""Residual below which a picture has the uploaded gradient for all purposes."""


def main_row(clients: Sequence[Client], rows: Sequence[CardRow]) -> int:
    """The row the sentence is about: a client with MJP on which a matching attack was run, else the
    undefended one, else the first."""

    def rank(place: int) -> tuple[bool, bool, bool, int]:
        client = clients[place]
        return not client.matching, not client.masks, client.defended, place

    return min(range(len(rows)), key=rank)


def verdict(clients: Sequence[Client], rows: Sequence[CardRow]) -> str:
    """Whether the main client's pictures are protected, as far as the attacks that were run show
    it: `MJP γ .27 does not protect these pictures: one upload gives 116 of 200 exactly.`"""
    place = main_row(clients, rows)
    client, row = clients[place], rows[place]
    if not client.matching:
        return (
            f"Not shown: no attack that knows the {client.name} client gave a picture here; "
            f"`mjp attack {LADDER} --weights FILE` runs those that do."
        )
    known = [figure for figure in (row.one_upload, row.any_uploads) if figure and figure.of]
    if not known:
        return "Not scored: the private pictures are not known here."
    best = max(known, key=lambda figure: figure.above_20 / figure.of)
    best = known[0] if known[0].above_20 >= HALF * known[0].of else best
    uploads = "one upload gives" if best is row.one_upload else "several uploads give"
    given = f"{uploads} {best.above_20} of {best.of} at 20 dB or more"
    if best.exact:
        given = f"{uploads} {best.exact} of {best.of} exactly"
    protector = client.name if client.cell.gamma else f"The defence of this client ({client.name})"
    if UNFINISHED in best.flags:
        given += "; rows are missing, so more may leak"
    if best.above_20 >= HALF * best.of:
        fails = f"{protector} does not protect these pictures"
        return f"{fails if row.defended else 'These pictures leak'}: {given}."
    if best.above_20:
        fails = f"{protector} does not protect all of these pictures"
        return f"{fails if row.defended else 'Some of these pictures leak'}: {given}."
    said = f"{protector} protects these pictures" if row.defended else "these pictures leak"
    return f"That {said} is not shown: no attack of this report reaches 20 dB, and others may."


def sentence(clients: Sequence[Client], rows: Sequence[CardRow]) -> str:
    """The answer: what the best attack gets from the main client, and what the published one."""
    place = main_row(clients, rows)
    client, row = clients[place], rows[place]
    model = client.cell.model.label if _several_models(clients) else ""
    answer = _answer(client, row, row.one_upload or row.any_uploads, model)
    published = _published(row)
    return f"{answer}; {published}." if published else f"{answer}."


def beside(clients: Sequence[Client], rows: Sequence[CardRow]) -> str:
    """What more uploads give, and what the undefended client gives; beside that one, what defended
    ones give."""
    row = rows[place := main_row(clients, rows)]
    parts = [_more_uploads(clients[place], row)]
    if not row.defended:
        defended = [(other, other.one_upload) for other in rows if other.defended]
        given = [(other, figure) for other, figure in defended if figure is not None]
        parts += [_defended(other, figure) for other, figure in given[:DEFENDED_NAMED]]
    for client, other in zip(clients, rows, strict=True):
        if not other.defended and other.one_upload and other is not row:
            alike = circumstances(client) == circumstances(clients[place])
            which = f" ({other.client})" if _several_models(clients) else ""
            name = (
                f"The undefended client{which}"
                if alike
                else f"Undefended, but not alike ({other.client})"
            )
            parts.append(f"{name}: {_recovered(other.one_upload)}.")
            break
    return " ".join(part for part in parts if part)


def _several_models(clients: Sequence[Client]) -> bool:
    return len({client.cell.model.label for client in clients}) > 1


def _answer(client: Client, row: CardRow, best: CardFigure | None, model: str = "") -> str:
    """model: named where the report has several"""
    facts = ", ".join(
        [
            *([f"batch {client.cell.client.batch}"] if client.cell.client.batch else []),
            client.cell.dtype,
        ]
    )
    of_model = f" of {model}" if model else ""
    who = f"the {client.name} client{of_model} ({facts})"
    if not client.matching:
        return f"What {who} leaks is not known: no attack that knows it was run with success"
    if best is None:
        return without_truth(client, who)
    who = f"{who}, whose pixels are taken to be 8-bit," if ASSUMES_8_BIT in best.flags else who
    uploads = "one upload" if row.one_upload else "several uploads"
    failed = _failed(best, defended=row.defended)
    return f"From {uploads} of {who} the best attack recovers {_recovered(best)}{failed}"


def _failed(figure: CardFigure, *, defended: bool) -> str:
    """What is said of an attack that a picture made without any gradient beats; else nothing."""
    if BELOW_FLOOR not in figure.flags:
        return ""
    meaning = ": the attack failed there, which is no measure of protection" if defended else ""
    return f", and stays below the floor in the mean{meaning}"


def _defended(row: CardRow, figure: CardFigure) -> str:
    """What the best attack gets from one upload of a further, defended client."""
    return f"Defended ({row.client}): {_recovered(figure)}{_failed(figure, defended=True)}."


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
    ids = set().union(*(line.images.names for line in client.matching))
    residuals = [
        line.scored("gradient_residual", "diagnostic").median() for line in client.matching
    ]
    known = [value for value in residuals if not math.isnan(value)]
    one = len(ids) == 1
    meaning = f"; {_explained(min(known), one=one, masks=client.masks)}" if known else ""
    return (
        f"{len(ids)} {'picture was' if one else 'pictures were'} reconstructed from uploads of "
        f"{who}{meaning}. The private images are not known here, so nothing was scored"
    )


def _explained(residual: float, *, one: bool, masks: bool) -> str:
    """What the smallest gradient residual of an attack says of its pictures.

    one: there is a single picture, and no median of several
    """
    pictures = "picture" if one else "pictures"
    if residual < MATCHES:
        match = "the best attack's picture has" if one else "in the median the best attack's have"
        meaning = (
            "where patches are masked that is no proof of a good picture"
            if masks
            else f"almost certainly the client's {pictures}"
        )
        return f"{match} the uploaded gradient to {residual:.2g}: {meaning}"
    median = "" if one else " in the median"
    gap = (
        f"the gradient of the best attack's {pictures} differs from the uploaded one by "
        f"{residual:.2g} of its size{median}"
    )
    if residual < RESIDUAL_CONVERGED:
        return gap
    return (
        f"{gap}, which is no evidence of safety: the attacks do not reach it, or the client's loss "
        "(dropout, label smoothing, mixup), labels, mean and std or batch differ from what the "
        "header says"
    )
