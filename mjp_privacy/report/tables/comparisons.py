"""Clients beside one another: what each kind of attacker gets, and paired tests image by image."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from mjp_privacy.metrics.statistics import PSNR_CAP, Share
from mjp_privacy.report.card import CardFigure, CardRow, card_figure, card_row, floor_values
from mjp_privacy.report.clients import Client, attacked_ones, circumstances
from mjp_privacy.report.figures import THRESHOLDS, shared_scores, success_share
from mjp_privacy.report.flags import merged
from mjp_privacy.report.lines import DIAGNOSTIC, Line
from mjp_privacy.report.published import TITLES
from mjp_privacy.report.tables.text import (
    DASH,
    Column,
    TextTable,
    below_cap,
    capped,
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


@dataclass(frozen=True)
class ClientRow:
    """A client with its row of the card and what the attacker's choice gets from it."""

    client: Client
    row: CardRow
    chosen: CardFigure | None

    @property
    def n(self) -> int:
        """The number of images in its first column."""
        counted = self.row.one_upload or self.row.any_uploads or self.row.published
        return counted.n if counted else 0


def clients_table(clients: Sequence[Client]) -> TextTable | None:
    """A line for every client; None where there is none."""
    rows = []
    for client in attacked_ones(clients):
        line = client.chosen_by(ATTACKERS_CHOICE, single=True)
        chosen = None if line is None else card_figure(client, line, floor_values(client))
        rows.append(ClientRow(client, card_row(client), chosen))
    first, _ = THRESHOLDS
    columns = [
        Column("Client", lambda r: r.client.title, "l"),
        Column("n", lambda r: r.n),
        Column("APRIL as published", lambda r: _mean(r.row.published, r.n)),
        Column("best, 1 upload", lambda r: _mean(r.row.one_upload, r.n)),
        Column("median", lambda r: _median(r.row.one_upload)),
        Column("exact", lambda r: _exact(r.row.one_upload)),
        *(Column(f"≥ {limit} dB", _share_from(limit)) for limit in THRESHOLDS),
        Column("attacker's choice, 1 upload", lambda r: _mean(r.chosen, r.n)),
        Column("best, any uploads", lambda r: _mean(r.row.any_uploads, r.n)),
        Column("median (any)", lambda r: _median(r.row.any_uploads)),
        Column("exact (any)", lambda r: _exact(r.row.any_uploads)),
        Column(f"≥ {first} dB (any)", lambda r: _share(r.client.any_uploads, first)),
        Column("floor", lambda r: _mean(r.row.floor, r.n)),
        Column("flags", _flags, "l"),
    ]
    return table_of(CLIENTS_TITLE, CLIENTS_CAPTION, columns, rows) if rows else None


def _share_from(limit: float) -> Callable[[ClientRow], str]:
    return lambda row: _share(row.client.one_upload, limit)


def _share(line: Line | None, limit: float) -> str:
    return DASH if line is None else success_share(line, limit).text()


def _flags(row: ClientRow) -> str:
    """In words: the client's own, then those of its figures."""
    figures = (row.row.published, row.row.one_upload, row.row.any_uploads)
    of_figures = [flag for figure in figures if figure for flag in figure.flags]
    return "; ".join(flag.words for flag in merged([*row.row.flags, *of_figures]))


def _mean(figure: CardFigure | None, n: int) -> str:
    """`71.74 [66.91, 76.26]`, with its n where that is not the row's."""
    if figure is None or not figure.n:
        return DASH
    other_n = "" if figure.n == n else f" (n={figure.n})"
    if figure.mean >= PSNR_CAP:
        return f"{capped(figure.mean, 2)}{other_n}"
    interval = DASH if math.isnan(figure.low) else f"{figure.low:.2f}, {figure.high:.2f}"
    return f"{below_cap(figure.mean, 2)} [{interval}]{other_n}"


def _median(figure: CardFigure | None) -> str:
    return DASH if figure is None else capped(figure.median, 2)


def _exact(figure: CardFigure | None) -> str:
    return DASH if figure is None else Share(figure.exact, figure.of, figure.trials).text()


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
    between_clients, apart = _with_shared_images(_between_clients(attacked))
    between_attacks, _ = _with_shared_images(_between_attacks(attacked))
    shown = between_clients[: MOST - min(MOST_ATTACKS, len(between_attacks))]
    shown += between_attacks[: MOST - len(shown)]
    if not shown:
        return None
    caption = CAPTION
    if hidden := len(between_clients) + len(between_attacks) - len(shown):
        caption += f" {hidden} further comparisons are not shown, nor counted by Holm."
    if apart:
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


def _with_shared_images(rows: Iterator[Comparison]) -> tuple[list[Comparison], int]:
    """The comparisons whose lines share an image, each pair of lines once, and the number of the
    others."""
    once: dict[tuple[Line, Line], Comparison] = {}
    for row in rows:
        once.setdefault((row.first, row.second), row)
    kept = [row for row in once.values() if len(shared_scores(row.first, row.second))]
    return kept, len(once) - len(kept)


def _between_clients(clients: Sequence[Client]) -> Iterator[Comparison]:
    """Undefended against defended: worst case over one upload, then over any number."""
    for undefended, defended in client_pairs(clients):
        between = f"{undefended.title} − {defended.title}"
        if undefended.one_upload and defended.one_upload:
            title = f"worst case, one upload: {between}"
            yield Comparison(title, undefended.one_upload, defended.one_upload)
        first, second = best_line(undefended), best_line(defended)
        if first and second:
            yield Comparison(f"worst case, any number of uploads: {between}", first, second)


def _between_attacks(clients: Sequence[Client]) -> Iterator[Comparison]:
    """The best other attack against April as published: with one upload, then with any number."""
    for client in clients:
        if (april := client.published) is None:
            continue
        others = {line: _mean_beside(line, april) for line in client.matching if line is not april}
        others = {line: mean for line, mean in others.items() if not math.isnan(mean)}
        for some in ([line for line in others if line.uploads == 1], list(others)):
            if some:
                best = max(some, key=lambda line: others[line])
                yield Comparison(f"{client.title}: {best.title} − {april.title}", best, april)


def _mean_beside(line: Line, other: Line) -> float:
    """Mean of min(PSNR, 100) over the images that the other line scored too; NaN without any."""
    return float(shared_scores(line, other)["first"].clip(upper=PSNR_CAP).mean())


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
