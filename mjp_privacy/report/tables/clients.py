"""Every client of a report beside the others: what each kind of attacker gets from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mjp_privacy.metrics.statistics import PSNR_CAP, Share
from mjp_privacy.report.card import (
    CardFigure,
    any_uploads_line,
    card_figure,
    card_row,
    floor_values,
    one_upload_line,
)
from mjp_privacy.report.clients import Client, client_titles, clients_of
from mjp_privacy.report.lines import THRESHOLDS, Line, success_share
from mjp_privacy.report.tables.text import DASH, TextTable, below_cap, capped, number
from mjp_privacy.report.worst_case import (
    ATTACKERS_CHOICE,
    Group,
    attackers_choice_by_image,
    has_truth,
    picture_ids,
)

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
    "which crops of one photograph count as if all or none of them leaked. Floor: the "
    "best picture made without the gradient."
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
    flags = {flag.key: flag for figure in figures if figure for flag in figure.flags}
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
        return f"{capped(figure.mean, 2)}{other_n}"
    interval = DASH if figure.low != figure.low else f"{figure.low:.2f}, {figure.high:.2f}"
    return f"{below_cap(figure.mean, 2)} [{interval}]{other_n}"


def _median(figure: CardFigure | None) -> str:
    return DASH if figure is None else capped(figure.median, 2)


def _exact(figure: CardFigure | None) -> str:
    return DASH if figure is None else Share(figure.exact, figure.of, figure.trials).text()


# uploads without their private images -----------------------------------------------------------

RESIDUALS = "Uploads without their private images"
RESIDUALS_CAPTION = (
    "No score is possible here. Gradient residual: ‖gradient of the picture − upload‖ / ‖upload‖ "
    "over the patch embedding, median [quartiles] over the pictures; 0 explains the upload wholly, "
    "a picture without any gradient gets 1. Chosen: for how many pictures the attacker, who sees "
    "the residual and not the truth, would take this attack. A small residual is no proof of a "
    "good picture."
)
RESIDUALS_HEADER = ("client", "attack", "pictures", "gradient residual", "chosen")


def groups_without_truth(groups: Sequence[Group]) -> list[Group]:
    """The groups in which some attack's pictures have nothing to be compared with."""
    return [g for g in groups if not all(has_truth(line) for line in g.attacks)]


def residual_table(
    groups: Sequence[Group], client_of: Callable[[Group], str] | None = None
) -> TextTable | None:
    """What stands in place of scores for groups without truth; None if every group has it.

    client_of: what the report calls a group's client; None: its model and setting
    """
    rows = [
        (client_of(group) if client_of else _client_of(group), *cells)
        for group in groups_without_truth(groups)
        for cells in _residual_rows(group)
    ]
    return (
        TextTable(RESIDUALS, RESIDUALS_CAPTION, RESIDUALS_HEADER, tuple(rows), "llrrr")
        if rows
        else None
    )


def _client_of(group: Group) -> str:
    cell = group.attacks[0].cell
    return f"{cell.model.label} ({cell.setting})"


def _residual_rows(group: Group) -> list[tuple[str, ...]]:
    """Attack, number of pictures, residual and number of choices, for attacks with pictures."""
    choices = Counter(line.number for line in attackers_choice_by_image(group.attacks).values())
    with_pictures = [(line, len(picture_ids(line))) for line in group.attacks]
    return [
        (line.title, str(count), _residual(line), f"{choices[line.number]}")
        for line, count in with_pictures
        if count
    ]


def _residual(line: Line) -> str:
    """`median [first quartile, third quartile]`, with its n where that is not the pictures'."""
    values = line.scored("gradient_residual", "diagnostic")
    if values.empty:
        return "unknown: no labels or no gradient"
    low, median, high = (number(float(values.quantile(q)), 4) for q in (0.25, 0.5, 0.75))
    return f"{median} [{low}, {high}]"
