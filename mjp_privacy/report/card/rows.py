"""The rows of the privacy card: which clients stand in it, and what attackers get from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from mjp_privacy.metrics.coded import Coded
from mjp_privacy.metrics.statistics import PSNR_CAP, summarise
from mjp_privacy.report.card.clients import Client, client_titles, clients_of
from mjp_privacy.report.card.content import CardFigure, CardRow
from mjp_privacy.report.card.flags import client_flags, figure_flags
from mjp_privacy.report.lines import Line, capped_mean, capped_median, success_share, summary
from mjp_privacy.report.worst_case import WORST_CASE, DerivedLine, Group

NAMED = 2
"""Attacks of a worst case that the card names."""

ABSENT = {
    "ok": "no attack that knows this client",
    "unscored": "not scored",
    "failed": "failed",
    "unsupported": "does not apply",
}
"""What stands in place of a figure, by the statuses of the attacks' rows; the first that occurs."""

PUBLISHED = "april"
PLAIN_TO_SEE = 20
"""PSNR in dB from which the content of a picture is plain to see."""


def card_row(client: Client, title: str, others: Sequence[Client] = ()) -> CardRow:
    """What each attacker gets from this client; `others`: all clients, to see what was not run."""
    floor, lowest = floor_line(client), floor_values(client)
    published = published_line(client)
    shown = [published, one_upload_line(client), any_uploads_line(client)]
    figures = [None if line is None else card_figure(client, line, lowest) for line in shown]
    return CardRow(
        client=title,
        details=client.details,
        defended=client.defended,
        accuracy=_accuracy(client)[0],
        accuracy_n=_accuracy(client)[1],
        published=figures[0],
        one_upload=figures[1],
        any_uploads=figures[2],
        floor=_floor_figure(client, floor),
        flags=client_flags(client, others),
        absent=_absences(client),
    )


def _absences(client: Client) -> tuple[str, ...]:
    """In a few words why the card has no figure, for each of its columns."""
    attacks = client.group.attacks
    published = [line for line in attacks if line.cell.attack.known_as == PUBLISHED]
    single = [line for line in attacks if line.uploads == 1]
    several = [line for line in attacks if line.uploads > 1]
    return (*map(_absence, (published, single, several)), "not run")


def _absence(lines: Sequence[Line]) -> str:
    """Why none of these attacks has a figure."""
    columns = [line.column("psnr", "standard") for line in lines]
    statuses = {status for column in columns for status in column.statuses.counts()}
    for status, words in ABSENT.items():
        if status in statuses:
            return words
    return "not run"


def card_rows(clients: Sequence[Client], groups: Sequence[Group]) -> tuple[CardRow, ...]:
    """The rows of these clients, under the names that all of a report's clients have."""
    every = clients_of(groups)
    titles = {id(c.group): title for c, title in zip(every, client_titles(every), strict=True)}
    return tuple(card_row(client, titles[id(client.group)], every) for client in clients)


def published_line(client: Client) -> Line | None:
    """The line of the published attack; None where it was not run or not scored."""
    lines = (x for x in client.group.attacks if x.cell.attack.known_as == PUBLISHED)
    return next((line for line in lines if line.count("psnr", "standard")), None)


def one_upload_line(client: Client) -> Line | None:
    """The best per image of the attacks on one upload; None where none matches the client."""
    return _best(client, [line for line in client.matching if line.uploads == 1], single=True)


def any_uploads_line(client: Client) -> Line | None:
    """The best per image over all attacks; None where none uses several uploads."""
    several = any(line.uploads > 1 for line in client.matching)
    return _best(client, client.matching, single=False) if several else None


def _best(client: Client, lines: Sequence[Line], *, single: bool) -> Line | None:
    """The worst case over these lines, or the line itself where there is only one."""
    worst: list[DerivedLine] = [
        line
        for line in client.group.derived
        if line.role == WORST_CASE.name and (line.uploads == 1) == single
    ]
    scored = [line for line in lines if line.count("psnr", "standard")]
    return worst[0] if worst and scored else next(iter(scored), None)


def card_figure(client: Client, line: Line, floor: pd.Series[float]) -> CardFigure:
    """The figure of one attack, or of a worst case, with its flags; `floor`: PSNR by image."""
    score = summary(line, "psnr", "standard", cap=PSNR_CAP)
    given = success_share(line, PLAIN_TO_SEE)
    return CardFigure(
        attack=main_attack(line),
        line=line.number,
        mean=score.mean,
        low=score.low,
        high=score.high,
        median=capped_median(line, "psnr", "standard"),
        n=score.n,
        exact=exact_pictures(line),
        above_20=given.count,
        of=given.of,
        flags=figure_flags(client, line, floor),
        trials=given.trials,
    )


def exact_pictures(line: Line) -> int:
    """How many pictures are equal to the original in every 8-bit value."""
    return summary(line, "psnr", "paper", interval=False).exact


def main_attack(line: Line) -> str:
    """The attack's label; of a worst case the attacks that were best on most images, with the
    number of images: `multi_round 84, pixel_lattice 116`."""
    if not isinstance(line, DerivedLine):
        return line.attack
    ranked = sorted(line.counts.items(), key=lambda item: -item[1])
    shown = [(attack, count) for attack, count in ranked if count][:NAMED]
    if len(shown) == 1:
        return shown[0][0]
    return ", ".join(f"{attack} {count}" for attack, count in shown) or line.attack


def floor_line(client: Client) -> Line | None:
    """The control that scores best without any gradient; None where no floor was run."""
    return max(client.floors, key=capped_mean, default=None)


def floor_values(client: Client) -> pd.Series[float]:
    """PSNR by image of the best control; where none was run that of a uniform grey, which every run
    stores; empty where there is no truth."""
    floor = floor_line(client)
    if floor is not None:
        return floor.scored("psnr", "standard")
    return _united(client, "grey_psnr", "diagnostic")


def floor_level(client: Client) -> float:
    """Mean of `floor_values`; NaN where there is none."""
    values = floor_values(client).clip(upper=PSNR_CAP)
    return float(values.mean()) if len(values) else math.nan


def _united(client: Client, metric: str, variant: str) -> pd.Series[float]:
    """What is the same for every attack on an image: its value from the first line that has one."""
    values: pd.Series[float] = pd.Series(dtype=float)
    for line in client.lines:
        more = line.scored(metric, variant)
        new = more.index.difference(values.index) if len(values) else more.index
        if len(new):
            values = pd.concat([values, more[new]]) if len(values) else more
    return values


def _floor_figure(client: Client, floor: Line | None) -> CardFigure | None:
    if floor is not None:
        return card_figure(client, floor, pd.Series(dtype=float))
    grey = _united(client, "grey_psnr", "diagnostic")
    if grey.empty:
        return None
    grey = grey.sort_index()
    groups = next((line.groups for line in client.lines if line.groups is not None), None)
    score = summarise(
        grey.to_numpy(),
        Coded.equal_words("ok", len(grey)),
        groups=None if groups is None else [groups.get(image, image) for image in grey.index],
        cap=PSNR_CAP,
    )
    above = int((grey >= PLAIN_TO_SEE).sum())
    number = client.lines[0].number
    return CardFigure(
        *("uniform grey", number, score.mean, score.low, score.high, score.median),
        *(score.n, 0, above, score.n),
        trials=score.trials,
    )


def _accuracy(client: Client) -> tuple[float | None, int]:
    """Top-1 in percent over the images of all the client's lines, and their number."""
    hits = _united(client, "top1", "intact")
    return (100 * float(hits.sum()) / len(hits), len(hits)) if len(hits) else (None, 0)
