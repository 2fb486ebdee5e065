"""Clients beside one another: what each kind of attacker gets, and paired tests image by image."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mjp_privacy.metrics.comparisons import (
    CLOSER,
    ENUMERATED,
    EXACT_RANKS,
    FLIPS,
    MOST_FLIPPED,
    PairedTest,
    holm,
    paired_test,
    rank_agreement,
)
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card import CardFigure, CardRow, card_figure, card_row
from mjp_privacy.report.clients import Client, attacked_ones, circumstances
from mjp_privacy.report.figures import THRESHOLDS, exact_share, shared_scores, success_share
from mjp_privacy.report.flags import merged
from mjp_privacy.report.lines import DIAGNOSTIC, Line
from mjp_privacy.report.published import TITLES
from mjp_privacy.report.tables.text import (
    DASH,
    Column,
    TextTable,
    capped,
    interval_text,
    number,
    table_of,
)
from mjp_privacy.report.worst_case import (
    ATTACKERS_CHOICE,
    attackers_choice_by_image,
    has_truth,
    picture_ids,
)

CLIENTS_TITLE = "Every client"

CLIENTS_CAPTION = (
    "PSNR (standard) in dB, capped at 100 in means: mean [95 % interval], with n where it is not "
    "the first column's. Best: for each picture the best attack that meets the model as trained, "
    "chosen by comparing with the private picture: an upper bound for any selector; of a client "
    "that masks patches only if an attack that knows MJP made pictures or any made an exact one. "
    "Attacker's choice: for each picture the attack with the smallest gradient residual, without "
    "the private picture; gradient matching is favoured, for it minimises such a distance. Exact: "
    "equal to the original in every 8-bit value. Shares are of all pictures the attacker was "
    "given: those without a reconstruction count as not recovered, those that could not be scored "
    "are left out. Intervals of shares are Wilson's, crops of one photograph counted as if all or "
    "none leaked. Floor: the best picture made without the gradient."
)


def clients_table(clients: Sequence[Client]) -> TextTable | None:
    """A line for every client; None where there is none."""
    rows = []
    for client in attacked_ones(clients):
        figures, choice = card_row(client), client.chosen_by(ATTACKERS_CHOICE, single=True)
        chosen = None if choice is None else card_figure(client, choice)
        best = (client.one_upload, figures.one_upload), (client.any_uploads, figures.any_uploads)
        rows.append([client.title, *_cells(figures, chosen, *best)])
    titles = [
        *("n", "APRIL as published", "best, 1 upload", "median", "exact"),
        *(f"≥ {limit} dB" for limit in THRESHOLDS),
        *("attacker's choice, 1 upload", "best, any uploads", "median (any)", "exact (any)"),
        *(f"≥ {THRESHOLDS[0]} dB (any)", "floor"),
    ]
    header = ("Client", *titles, "flags")
    align = f"l{'r' * len(titles)}l"
    cells = tuple(map(tuple, rows))
    return TextTable(CLIENTS_TITLE, CLIENTS_CAPTION, header, cells, align) if rows else None


Best = tuple[Line | None, CardFigure | None]
"""The line of a best and its figure on the card."""


def _cells(row: CardRow, chosen: CardFigure | None, one: Best, several: Best) -> list[str]:
    """The cells of a client behind its name; its flags are its own, then those of its figures."""
    counted = row.one_upload or row.any_uploads or row.published
    n = counted.n if counted else 0

    def mean(figure: CardFigure | None) -> str:
        if figure is None or not figure.n:
            return DASH
        text = interval_text(figure.mean, figure.low, figure.high, 2, PSNR_CAP)
        return text if figure.n == n else f"{text} (n={figure.n})"

    def best(line: Line | None, figure: CardFigure | None, *limits: float) -> list[str]:
        if line is None or figure is None:
            return [DASH] * (2 + len(limits))
        shares = [exact_share(line), *(success_share(line, limit) for limit in limits)]
        return [capped(figure.median, 2), *(share.text() for share in shares)]

    figures = (row.published, row.one_upload, row.any_uploads)
    flags = merged([*row.flags, *(flag for figure in figures if figure for flag in figure.flags)])
    return [
        *(str(n), mean(row.published), mean(row.one_upload), *best(*one, *THRESHOLDS)),
        *(mean(chosen), mean(row.any_uploads), *best(*several, THRESHOLDS[0]), mean(row.floor)),
        "; ".join(flag.words for flag in flags),
    ]


# uploads without their private images -------------------------------------------------------------

RESIDUALS = "Uploads without their private images"
RESIDUALS_CAPTION = (
    "No score is possible here. Gradient residual: ‖gradient of the picture − upload‖ / ‖upload‖ "
    "over the patch embedding, median [quartiles] over the pictures; 0 explains the upload wholly, "
    "a picture without any gradient gets 1. Chosen: for how many pictures the attacker, who sees "
    "the residual and not the truth, would take this attack. A small residual is no proof of a "
    "good picture."
)


def without_truth(clients: Sequence[Client]) -> list[Client]:
    """The clients of whom some attack's pictures have nothing to be compared with."""
    return [c for c in attacked_ones(clients) if not all(map(has_truth, c.attacks))]


def residual_table(clients: Sequence[Client]) -> TextTable | None:
    """What stands in place of scores for clients without truth; None if all have it."""
    rows = []
    for client in without_truth(clients):
        choices = Counter(attackers_choice_by_image(client.attacks).values())
        for line in client.attacks:
            if pictures := len(picture_ids(line)):
                rows.append((client.title, line, pictures, choices[line]))
    columns = [
        Column("client", lambda row: row[0], "l"),
        Column("attack", lambda row: row[1].title, "l"),
        Column("pictures", lambda row: row[2]),
        Column("gradient residual", lambda row: _residual(row[1])),
        Column("chosen", lambda row: row[3]),
    ]
    return table_of(RESIDUALS, RESIDUALS_CAPTION, columns, rows) if rows else None


def _residual(line: Line) -> str:
    """`median [first quartile, third quartile]`, with its n where that is not the pictures'."""
    values = line.scored("gradient_residual", DIAGNOSTIC)
    if values.empty:
        return "unknown: no labels or no gradient"
    low, median, high = (number(float(values.quantile(q)), 4) for q in (0.25, 0.5, 0.75))
    return f"{median} [{low}, {high}]"


# paired tests -------------------------------------------------------------------------------------

MOST = 30  # rows
MOST_ATTACKS = 10  # of them, kept free for attacks if there are so many

TITLE = "Paired tests, image by image"

CAPTION = (
    "min(PSNR, 100) (standard) in dB against the target of each line's setting, which in (b) is "
    "the shuffled picture; the first named − the second, over the images that both lines scored. "
    "Left out: images of either that only one or none scored, such as those that an attack failed "
    "on. Clients are compared where all but the defence and the model is equal. n: images, or "
    "photographs where images are crops of one; differences are then averaged first. [95 %]: "
    "percentile bootstrap of the mean over these n. Effect: matched-pairs rank-biserial "
    "correlation, 1 where the first is higher on every image. p Wilcoxon: signed-rank test, "
    "two-sided; equal pairs are ranked and count for neither side (Pratt), ties share mean ranks; "
    f"exact up to {EXACT_RANKS} differing pairs, normal beyond. Holm: the same p adjusted for all "
    "tests of this table. p sign flips: permutation test of the mean, two-sided, not adjusted: "
    f"every choice of signs up to {ENUMERATED} differing pairs, else {FLIPS:,} random ones, beyond "
    f"{MOST_FLIPPED:,} pairs their sum taken as normal; (min) marks the smallest p that it can "
    f"give, 2 / 2^m for m differing pairs and 1 / {FLIPS + 1:,} with random signs. Few pairs prove "
    "little however large the difference. Worst case: the best attack on each image, chosen with "
    "the private image at hand; a client on which more attacks were tried had more chances, which "
    "no test corrects for. Beside April as published stands the other attack of the highest mean "
    "PSNR on the same images; it was chosen after the fact, so its p is somewhat too small."
)


@dataclass(frozen=True)
class Comparison:
    """Two lines whose images are compared in pairs."""

    title: str
    first: Line
    second: Line

    @property
    def test(self) -> PairedTest:
        """Their PSNR on the images that both have a score for, photograph by photograph."""
        shared = shared_scores(self.first, self.second)
        known = [line.groups for line in (self.second, self.first) if line.groups is not None]
        groups = None
        if known:
            photographs = {image: name for names in known for image, name in names.items()}
            groups = [photographs.get(image, image) for image in shared.index]
        first, second = shared.to_numpy().T
        return paired_test(first, second, groups=groups, cap=PSNR_CAP)


def tests_table(clients: Sequence[Client]) -> TextTable | None:
    """Each defended client beside the undefended one, and the best attack beside April's.

    At most 30 rows; the caption says what was left out. None where nothing can be compared.
    """
    attacked = attacked_ones(clients)
    pairs, of_clients = _between_clients(attacked), []
    for pair in pairs:
        if len(shared_scores(pair.first, pair.second)):
            of_clients.append(pair)
    of_attacks = _between_attacks(attacked)
    shown = of_clients[: MOST - min(MOST_ATTACKS, len(of_attacks))]
    shown += of_attacks[: MOST - len(shown)]
    if not shown:
        return None
    caption = CAPTION
    if hidden := len(of_clients) + len(of_attacks) - len(shown):
        caption += f" {hidden} further comparisons are not shown, nor counted by Holm."
    if apart := len(pairs) - len(of_clients):
        caption += f" {apart} pairs of clients share no image."
    tests = [row.test for row in shown]
    columns = [
        Column("lines", lambda r: f"{r[0].first.number} − {r[0].second.number}", "l"),
        Column("compared", lambda r: r[0].title, "l"),
        Column("n", lambda r: _units(r[1])),
        Column(
            "left out", lambda r: len(r[0].first.images.union(r[0].second.images)) - r[1].images
        ),
        Column("median", lambda r: number(r[1].median, 2, sign=True)),
        Column("mean [95 %]", lambda r: f"{number(r[1].mean, 2, sign=True)} [{_interval(r[1])}]"),
        Column("effect", lambda r: correlation(r[1].effect)),
        Column("p Wilcoxon", lambda r: p_text(r[1].p)),
        Column("Holm", lambda r: p_text(r[2])),
        Column("p sign flips", lambda r: p_text(r[1].p_flips, r[1].smallest_p_flips)),
    ]
    rows = zip(shown, tests, holm([test.p for test in tests]), strict=True)
    return table_of(TITLE, caption, columns, rows)


def _units(test: PairedTest) -> str:
    if test.n == test.images:
        return str(test.n)
    return f"{test.n} photographs ({test.images} images)"


def _interval(test: PairedTest) -> str:
    low, high = number(test.low, 2), number(test.high, 2)
    return f"{low}, {high}" if low != DASH else DASH


def _between_clients(clients: Sequence[Client]) -> list[Comparison]:
    """Undefended against defended: worst case over one upload, then over any number if those are
    other lines."""
    found: dict[tuple[Line, Line], Comparison] = {}
    for undefended, defended in client_pairs(clients):
        for uploads, first, second in (
            ("one upload", undefended.one_upload, defended.one_upload),
            ("any number of uploads", best_line(undefended), best_line(defended)),
        ):
            if first and second:
                title = f"worst case, {uploads}: {undefended.title} − {defended.title}"
                found.setdefault((first, second), Comparison(title, first, second))
    return list(found.values())


def _between_attacks(clients: Sequence[Client]) -> list[Comparison]:
    """The best other attack against April as published: with one upload, then with any number if
    that is another; by the mean of min(PSNR, 100) over the images that April scored too."""
    found: dict[tuple[Line, Line], Comparison] = {}
    for client in clients:
        if (april := client.published) is None:
            continue
        both = {x: shared_scores(x, april)["first"] for x in client.matching if x is not april}
        means = {
            x: float(psnr.clip(upper=PSNR_CAP).mean()) for x, psnr in both.items() if len(psnr)
        }
        for some in ([line for line in means if line.uploads == 1], list(means)):
            if some:
                best = max(some, key=lambda line: means[line])
                title = f"{client.title}: {best.title} − {april.title}"
                found.setdefault((best, april), Comparison(title, best, april))
    return list(found.values())


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
    attacked = [client for client in clients if best_line(client)]
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


def best_line(client: Client) -> Line | None:
    """The worst case of a client over any number of uploads, as on the card."""
    return client.any_uploads or client.one_upload


# do the metrics agree? ----------------------------------------------------------------------------

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

    def cell(row: int, column: int) -> str:
        values = agreement.spearman if column > row else agreement.kendall
        return "" if column == row else correlation(float(values[row, column]))

    places = range(len(names))
    rows = tuple((names[row], *(cell(row, column) for column in places)) for row in places)
    caption = AGREEMENT_CAPTION.format(n=agreement.n, line=line.number)
    title = f"Do the metrics agree? {line.label}"
    return TextTable(title, caption, ("", *names), rows, "l" + "r" * len(names))


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
