"""Clients beside one another: what each kind of attacker gets, and paired tests image by image."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import pandas as pd

from mjp_privacy.metrics.comparisons import (
    CLOSER,
    ENUMERATED,
    EXACT_RANKS,
    FLIPS,
    MOST_FLIPPED,
    PairedTest,
    RankAgreement,
    holm,
    paired_test,
    rank_agreement,
)
from mjp_privacy.metrics.statistics import PSNR_CAP, Share
from mjp_privacy.report.card import (
    CardFigure,
    any_uploads_line,
    card_figure,
    card_row,
    floor_values,
    one_upload_line,
)
from mjp_privacy.report.clients import Client, circumstances, client_titles, clients_of
from mjp_privacy.report.figures import THRESHOLDS, shared_scores, success_share
from mjp_privacy.report.lines import Line
from mjp_privacy.report.published import TITLES
from mjp_privacy.report.tables.text import DASH, TextTable, below_cap, capped, number
from mjp_privacy.report.worst_case import (
    ATTACKERS_CHOICE,
    Group,
    attackers_choice_by_image,
    has_truth,
    picture_ids,
)

CLIENTS_TITLE = "Every client"

CLIENTS_CAPTION = (
    "PSNR (standard) in dB, capped at 100 in means: mean [95 % interval], with n where it is not "
    "the first column's. Best: for each picture the best attack that meets the model as trained, "
    "chosen by comparing with the private picture; an upper bound for any selector. For a client "
    "that masks patches only if an attack that knows MJP made pictures or any made an exact one. "
    "Attacker's choice: for each picture the attack whose reconstruction explains the upload best "
    "(smallest gradient residual); the private picture is not used, and gradient matching is "
    "favoured, because it minimises such a distance itself. Exact: equal to the original in every "
    "8-bit value. Shares are of all pictures the attacker was given: those without a "
    "reconstruction count as not recovered, those that could not be scored are left out. "
    "Intervals of shares are Wilson's, in which crops of one photograph count as if all or none of "
    "them leaked. Floor: the best picture made without the gradient."
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
    body = tuple(_client_row(c, title, clients) for c, title in zip(clients, titles, strict=True))
    return TextTable(
        CLIENTS_TITLE, CLIENTS_CAPTION, header, body, "lr" + "r" * (len(header) - 3) + "l"
    )


def _client_row(client: Client, title: str, every: Sequence[Client]) -> tuple[str, ...]:
    row = card_row(client, title, every)
    one, several = one_upload_line(client), any_uploads_line(client)
    counted = row.one_upload or row.any_uploads or row.published
    n = counted.n if counted else 0
    figures = (row.published, row.one_upload, row.any_uploads)
    flags = {flag.key: flag for figure in figures if figure for flag in figure.flags}
    names = [flag.name for flag in (*row.flags, *flags.values())]
    return (
        *(title, str(n), _figure_mean(row.published, n), _figure_mean(row.one_upload, n)),
        *(_median(row.one_upload), _exact(row.one_upload)),
        *(DASH if one is None else success_share(one, limit).text() for limit in THRESHOLDS),
        _figure_mean(_attackers_choice(client), n),
        *(_figure_mean(row.any_uploads, n), _median(row.any_uploads), _exact(row.any_uploads)),
        DASH if several is None else success_share(several, THRESHOLDS[0]).text(),
        *(_figure_mean(row.floor, n), "; ".join(names)),
    )


def _attackers_choice(client: Client) -> CardFigure | None:
    """The line chosen by residual among attacks on one upload."""
    lines: list[Line] = [
        line
        for line in client.group.derived
        if line.role == ATTACKERS_CHOICE.name and line.uploads == 1
    ]
    return card_figure(client, lines[0], floor_values(client)) if lines else None


def _figure_mean(figure: CardFigure | None, n: int) -> str:
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


# paired tests -------------------------------------------------------------------------------------

MOST = 30  # rows
MOST_ATTACKS = 10  # of them, kept free for attacks if there are so many

TITLE = "Paired tests, image by image"

CAPTION = (
    "PSNR (standard), dB, as min(PSNR, 100), so that two exact images are equal; against the "
    "target of each line's setting, which in (b) is the shuffled picture. Differences are the "
    "first named − the second, over the images that both lines scored; left out: images of either "
    "line that only one or none of them scored, among them those that an attack failed on. Two "
    "clients are compared where everything but the defence and the model is equal. n: images, or "
    "photographs where several images are crops of one; their differences are then averaged "
    "first, and median, mean and tests are over photographs. [95 %]: percentile bootstrap of the "
    "mean over these n. Effect: matched-pairs rank-biserial correlation, signed ranks over all "
    "ranks, 1 where the first is higher on every image, 0 where all are equal. p Wilcoxon: "
    "signed-rank test, two-sided; equal pairs are ranked and then count for neither side (Pratt), "
    f"ties share mean ranks; exact up to {EXACT_RANKS} differing pairs, normal beyond. Holm: the "
    "same p adjusted for all tests of this table. p sign flips: permutation test of the mean, "
    f"two-sided, not adjusted: every choice of signs up to {ENUMERATED} differing pairs, else "
    f"{FLIPS:,} random ones, and beyond {MOST_FLIPPED:,} pairs their sum taken as normal; (min) "
    "marks the smallest p that it can give, 2 / 2^m for m differing pairs and "
    f"1 / {FLIPS + 1:,} with random signs; Wilcoxon's exact p is not below 2 / 2^m "
    "either, so few pairs prove little however large the difference. Worst case: for each image "
    "the best attack, "
    "chosen with the private image at hand; a client that more attacks were tried on had more "
    "chances, which no test corrects for. Beside April as published stands the other attack of "
    "the highest mean PSNR on the same images; it was chosen after the fact, so its p is "
    "somewhat too small."
)


@dataclass(frozen=True)
class Comparison:
    """Two lines whose images are compared in pairs."""

    title: str
    first: Line
    second: Line


def tests_table(groups: Sequence[Group]) -> TextTable | None:
    """Each defended client beside the undefended one, and the best attack beside April's.

    At most 30 rows; the caption says what was left out. None where nothing can be compared.
    """
    clients = clients_of(groups)
    names = dict(zip(map(id, clients), client_titles(clients), strict=True))
    between_clients, apart = _with_shared_images(_between_clients(clients, names))
    between_attacks, _ = _with_shared_images(_between_attacks(clients, names))
    shown = between_clients[: MOST - min(MOST_ATTACKS, len(between_attacks))]
    shown += between_attacks[: MOST - len(shown)]
    if not shown:
        return None
    tests = [line_test(row.first, row.second) for row in shown]
    adjusted = holm([test.p for test in tests])
    rows = tuple(starmap(_cells, zip(shown, tests, adjusted, strict=True)))
    header = (
        *("lines", "compared", "n", "left out", "median", "mean [95 %]", "effect"),
        *("p Wilcoxon", "Holm", "p sign flips"),
    )
    hidden = len(between_clients) + len(between_attacks) - len(shown)
    return TextTable(TITLE, CAPTION + _omitted(hidden, apart), header, rows, "ll" + "r" * 8)


def _omitted(hidden: int, apart: int) -> str:
    further = f" {hidden} further comparisons are not shown, nor counted by Holm." if hidden else ""
    return further + (f" {apart} pairs of clients share no image." if apart else "")


def _with_shared_images(rows: Sequence[Comparison]) -> tuple[list[Comparison], int]:
    """The comparisons whose lines share an image, and the number of the others."""
    kept = [row for row in rows if len(shared_scores(row.first, row.second))]
    return kept, len(rows) - len(kept)


def _between_clients(clients: Sequence[Client], names: Mapping[int, str]) -> list[Comparison]:
    """Undefended against defended: worst case over one upload, then over any number."""
    rows: dict[tuple[int, int], Comparison] = {}
    for undefended, defended in client_pairs(clients):
        for one_upload, scope in ((True, "one upload"), (False, "any number of uploads")):
            first, second = (best_line(x, one_upload=one_upload) for x in (undefended, defended))
            if first is not None and second is not None:
                title = f"worst case, {scope}: {names[id(undefended)]} − {names[id(defended)]}"
                row = Comparison(title, first, second)
                rows.setdefault((first.number, second.number), row)
    return list(rows.values())


def _between_attacks(clients: Sequence[Client], names: Mapping[int, str]) -> list[Comparison]:
    """The best other attack against April as published: with one upload, then with any number."""
    rows: dict[tuple[int, int], Comparison] = {}
    for client in clients:
        april = next((line for line in client.group.attacks if _is_april(line)), None)
        if april is None:
            continue
        others = [
            x for x in client.matching if x is not april and _mean_beside(x, april) > -math.inf
        ]
        for some in ([line for line in others if line.uploads == 1], others):
            if some:
                best = max(some, key=lambda line: _mean_beside(line, april))
                title = f"{names[id(client)]}: {best.title} − {april.title}"
                rows.setdefault((best.number, april.number), Comparison(title, best, april))
    return list(rows.values())


def _is_april(line: Line) -> bool:
    return line.cell.attack.known_as == "april" and line.count("psnr", "standard") > 0


def _mean_beside(line: Line, other: Line) -> float:
    """Mean of min(PSNR, 100) over the images that the other line scored too; -inf without any."""
    scores = shared_scores(line, other)["first"].to_numpy()
    return float(np.minimum(scores, PSNR_CAP).mean()) if len(scores) else -math.inf


def line_test(line: Line, other: Line) -> PairedTest:
    """Two lines' PSNR on the images that both have a score for, photograph by photograph."""
    shared = shared_scores(line, other)
    photographs = {**(line.groups or {}), **(other.groups or {})}
    groups = [photographs.get(image, image) for image in shared.index] if photographs else None
    first, second = shared.to_numpy().T
    return paired_test(first, second, groups=groups, cap=PSNR_CAP)


def _cells(comparison: Comparison, test: PairedTest, adjusted: float) -> tuple[str, ...]:
    sides = (comparison.first, comparison.second)
    planned = sides[0].images.names | sides[1].images.names
    averaged = f"{test.n} photographs ({test.images} images)"
    low, high = number(test.low, 2), number(test.high, 2)
    interval = f"{low}, {high}" if low != DASH else DASH
    return (
        f"{comparison.first.number} − {comparison.second.number}",
        comparison.title,
        str(test.n) if test.n == test.images else averaged,
        str(len(planned) - test.images),
        number(test.median, 2, sign=True),
        f"{number(test.mean, 2, sign=True)} [{interval}]",
        correlation(test.effect),
        p_text(test.p),
        p_text(adjusted),
        p_text(test.p_flips, test.smallest_p_flips),
    )


def p_text(p: float, smallest: float | None = None) -> str:
    """A p-value with two digits, `< 1e-4` below that; `(min)` where no test could give less.

    p_text(0.0004883, 2 / 2**12)  # "0.00049 (min)"
    """
    if math.isnan(p):
        return DASH
    if smallest is not None and p <= smallest < 1:
        return f"{p:.2g} (min)"
    return "< 1e-4" if p < 1e-4 else f"{p:.2g}"


def client_pairs(clients: Sequence[Client]) -> list[tuple[Client, Client]]:
    """(undefended, defended) for every defended client that has an undefended one beside it.

    The two agree in every circumstance: data, image size, batch, local steps, precision and so on,
    and both have a best attack. Among several undefended clients one whose model was not trained
    with shuffled patches is taken, then one of the same model, then the likest.
    """
    attacked = [client for client in clients if best_line(client, one_upload=False)]
    undefended = [client for client in attacked if not client.defended]
    pairs = []
    for client in attacked:
        if client.defended:
            around = circumstances(client)
            alike = [other for other in undefended if circumstances(other) == around]
            pairs += [(min(alike, key=lambda x: _distance(x, client)), client)] if alike else []
    return pairs


def _distance(undefended: Client, defended: Client) -> tuple[bool, ...]:
    one, other = undefended.cell.model, defended.cell.model
    return (
        bool(one.trained_gamma),
        one.label != other.label,
        one.position_embedding != other.position_embedding,
        one.first_block != other.first_block,
    )


def best_line(client: Client, *, one_upload: bool) -> Line | None:
    """The worst case of a client, as on the card; None where no matching attack scored.

    With `one_upload` over attacks on a single upload, else over all.
    """
    single = one_upload_line(client)
    return single if one_upload else any_uploads_line(client) or single


FEWEST = 3  # images; two are always in perfect order

AGREEMENT_CAPTION = (
    "Rank correlations between metrics (standard) over {n} images of line {line} that have all of "
    "them: Spearman's ρ above the diagonal, Kendall's τ-b below. Every metric is turned so that "
    "higher is a better reconstruction: 1 means that two metrics order the images alike, −1 in "
    "reverse; MSE and PSNR do so by definition. Images count equally, also where several are crops "
    "of one photograph. A dash: one of the metrics is the same for every image."
)


def agreement_table(line: Line) -> TextTable | None:
    """The table of one line; None with fewer than two metrics or three images."""
    scores = {metric: values for metric in CLOSER if len(values := line.scored(metric, "standard"))}
    if len(scores) < 2:
        return None
    common = pd.concat(scores, axis=1, join="inner")
    if len(common) < FEWEST:
        return None
    agreement = rank_agreement(
        {metric: common[metric].to_numpy(dtype=np.float64) for metric in scores}
    )
    names = [TITLES[metric] for metric in agreement.metrics]
    rows = tuple((name, *_agreement_cells(agreement, at)) for at, name in enumerate(names))
    caption = AGREEMENT_CAPTION.format(n=agreement.n, line=line.number)
    title = f"Do the metrics agree? {line.label}"
    return TextTable(title, caption, ("", *names), rows, "l" + "r" * len(names))


def _agreement_cells(agreement: RankAgreement, row: int) -> list[str]:
    def cell(column: int) -> str:
        if column == row:
            return ""
        values = agreement.spearman if column > row else agreement.kendall
        return correlation(float(values[row, column]))

    return [cell(column) for column in range(len(agreement.metrics))]


def correlation(value: float) -> str:
    """A number in [-1, 1] with two decimals, or as many as keep it apart from 1 and -1.

    correlation(0.9996)  # "0.9996"
    """
    if math.isnan(value):
        return DASH
    if abs(value) > 1 - 1e-12:
        return f"{round(value):d}"
    decimals = 2
    while abs(float(f"{value:.{decimals}f}")) == 1:
        decimals += 1
    return f"{value:.{decimals}f}"
