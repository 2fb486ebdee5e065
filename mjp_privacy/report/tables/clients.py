"""Every client of a report beside the others: what each kind of attacker gets from it."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.metrics.shares import Share
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card.clients import Client, client_titles, clients_of
from mjp_privacy.report.card.content import CardFigure
from mjp_privacy.report.card.rows import (
    any_uploads_line,
    card_figure,
    card_row,
    floor_values,
    one_upload_line,
)
from mjp_privacy.report.loading import Line
from mjp_privacy.report.measures import THRESHOLDS, success_share
from mjp_privacy.report.tables.text import DASH, TextTable, below_cap, capped
from mjp_privacy.report.worst_case import ATTACKERS_CHOICE, Group

TITLE = "Every client"

CAPTION = (
    "PSNR (standard) in dB, capped at 100 in means: mean [95 % interval], with n where it is not "
    "the first column's. Best: for each picture the best attack that meets the model as trained, "
    "chosen by comparing with the private picture; an upper bound for any selector. For a client "
    "that masks patches only if an attack that knows MJP made pictures. Attacker's choice: for "
    "each picture the attack whose reconstruction explains the upload best (smallest gradient "
    "residual); the private picture is not used, and gradient matching is favoured, because it "
    "minimises such a distance itself. Exact: equal to the original in every 8-bit value. Shares "
    "are of all pictures the attacker was given: those without a reconstruction count as not "
    "recovered, those that could not be scored are left out. Intervals of shares are Wilson's, in "
    "which crops of one photograph count as separate pictures. Floor: the best picture made "
    "without the gradient."
)


def clients_table(groups: Sequence[Group]) -> TextTable | None:
    """A line for every client; None where there is none."""
    clients = clients_of(groups)
    if not clients:
        return None
    limits = [f"≥ {limit} dB" for limit in THRESHOLDS]
    header = (
        *("Client", "n", "APRIL as published"),
        *("best, 1 upload", "median", "exact", *limits, "attacker's choice, 1 upload"),
        *("best, any uploads", "median (any)", "exact (any)", f"{limits[0]} (any)"),
        *("floor", "flags"),
    )
    titles = client_titles(clients)
    body = tuple(_row(c, title, clients) for c, title in zip(clients, titles, strict=True))
    return TextTable(TITLE, CAPTION, header, body, "lr" + "r" * (len(header) - 3) + "l")


def _row(client: Client, title: str, every: Sequence[Client]) -> tuple[str, ...]:
    row = card_row(client, title, every)
    one, several = one_upload_line(client), any_uploads_line(client)
    counted = row.one_upload or row.any_uploads or row.published
    n = counted.n if counted else 0
    figures = (row.published, row.one_upload, row.any_uploads)
    flags = {flag.mark: flag for figure in figures if figure for flag in figure.flags}
    names = [flag.name for flag in (*row.flags, *flags.values())]
    return (
        *(title, str(n), _mean(row.published, n), _mean(row.one_upload, n)),
        *(_median(row.one_upload), _exact(row.one_upload)),
        *(DASH if one is None else success_share(one, limit).text() for limit in THRESHOLDS),
        _mean(_attackers_choice(client), n),
        *(_mean(row.any_uploads, n), _median(row.any_uploads), _exact(row.any_uploads)),
        DASH if several is None else success_share(several, THRESHOLDS[0]).text(),
        *(_mean(row.floor, n), "; ".join(names)),
    )


def _attackers_choice(client: Client) -> CardFigure | None:
    """The line chosen by residual among attacks on one upload."""
    lines: list[Line] = [
        line
        for line in client.group.derived
        if line.role == ATTACKERS_CHOICE.name and line.uploads == 1
    ]
    return card_figure(client, lines[0], floor_values(client)) if lines else None


def _mean(figure: CardFigure | None, n: int) -> str:
    if figure is None or not figure.n:
        return DASH
    other_n = "" if figure.n == n else f" (n={figure.n})"
    if figure.mean >= PSNR_CAP:
        return f"100 (cap){other_n}"
    interval = DASH if figure.low != figure.low else f"{figure.low:.2f}, {figure.high:.2f}"
    return f"{below_cap(figure.mean, 2)} [{interval}]{other_n}"


def _median(figure: CardFigure | None) -> str:
    return DASH if figure is None else capped(figure.median, 2)


def _exact(figure: CardFigure | None) -> str:
    return DASH if figure is None else Share(figure.exact, figure.of, figure.trials).text()
