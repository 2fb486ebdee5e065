"""Paired tests between clients and between attacks, image by image, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card import any_uploads_line, one_upload_line
from mjp_privacy.report.clients import Client, circumstances, client_titles, clients_of
from mjp_privacy.report.lines import Line, shared_scores
from mjp_privacy.report.published import TITLES
from mjp_privacy.report.tables.text import DASH, TextTable, number
from mjp_privacy.report.worst_case import Group

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
