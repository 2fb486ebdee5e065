"""Tables beside the main one: uploads without their private images, paired tests image by image,
whether pictures point to their own image, whether metrics agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.metrics import matching
from mjp_privacy.metrics.statistics import (
    EXACT_RANKS,
    PSNR_CAP,
    PairedTest,
    holm,
    paired_test,
)
from mjp_privacy.report.clients import Client, attacked_ones, circumstances
from mjp_privacy.report.figures import PSNR, TITLES, attackers_choice_by_image, shared_scores
from mjp_privacy.report.lines import DIAGNOSTIC, Line
from mjp_privacy.report.text import (
    DASH,
    Column,
    TextTable,
    capped,
    correlation,
    number,
    table_of,
)

RESIDUALS_CAPTION = (
    "Gradient residual: ‖gradient of the picture, times the best factor, − upload‖ / ‖upload‖ over "
    "the patch embedding, median [quartiles]; 0 explains the upload wholly, a picture without any "
    "gradient gets 1. Chosen: for how many pictures an attacker, who sees the residual and not the "
    "truth, would take this attack. A small residual is no proof of a good picture, a large one no "
    "evidence of safety: loss, labels, mean and std or batch may differ from what was declared."
)


def residual_table(clients: Sequence[Client]) -> TextTable | None:
    """What stands in place of scores for clients of whom some attack's pictures have nothing to be
    compared with; None if all have it."""
    rows = []
    for client in attacked_ones(clients):
        if not all(line.has_truth for line in client.attacks):
            choices = Counter(attackers_choice_by_image(client.attacks).values())
            pictures = {line: len(line.picture_ids) for line in client.attacks}
            rows += [(client, line, n, choices[line]) for line, n in pictures.items() if n]
    columns = [
        Column("client", lambda row: row[0].title, "l"),
        Column("attack", lambda row: row[1].title, "l"),
        Column("pictures", lambda row: row[2]),
        Column("gradient residual", lambda row: _residual(row[1])),
        Column("chosen", lambda row: row[3]),
    ]
    title = "Uploads without their private images"
    return table_of(title, RESIDUALS_CAPTION, columns, rows) if rows else None


def _residual(line: Line) -> str:
    """`median [first quartile, third quartile]`."""
    values = line.scored("gradient_residual", DIAGNOSTIC)
    if values.empty:
        return "unknown: no labels or no gradient"
    low, median, high = (number(float(values.quantile(q)), 4) for q in (0.25, 0.5, 0.75))
    return f"{median} [{low}, {high}]"


# paired tests -------------------------------------------------------------------------------------

MOST = 30  # rows

TESTS_CAPTION = (
    "min(PSNR, 100) (standard) in dB against the target of each line's setting, which in (b) is "
    "the shuffled picture: the first named − the second, over the images that both lines scored; "
    "left out: those that only one or none scored. Worst case: each image's best attack, chosen "
    "with the private image. Clients are compared where all but the defence and the model is "
    "equal. n: images, or photographs whose crops are averaged first; [95 %]: of the mean over "
    "them. Effect: matched-pairs rank-biserial correlation, 1 where the first is "
    "always higher. p Wilcoxon: signed-rank test, two-sided, equal pairs by Pratt, ties by mean "
    f"ranks; exact up to {EXACT_RANKS} differing pairs, normal beyond. Holm: this p adjusted for "
    "all tests of the table. Few pairs prove little however large the "
    "difference. A client on which more attacks were tried had more chances in the worst case, and "
    "the attack beside April was chosen after the fact by its mean: no test corrects for either."
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
        photographs = {image: name for names in known for image, name in names.items()}
        groups = [photographs.get(image, image) for image in shared.index] if known else None
        first, second = shared.to_numpy().T
        return paired_test(first, second, groups=groups, cap=PSNR_CAP)


def tests_table(clients: Sequence[Client]) -> TextTable | None:
    """Each defended client beside the undefended one, and the best attack beside April's; None
    where nothing can be compared."""
    attacked, caption = attacked_ones(clients), TESTS_CAPTION
    every = [*_between_clients(attacked), *_between_attacks(attacked)]
    pairs = [pair for pair in every if len(shared_scores(pair.first, pair.second))]
    shown = pairs[:MOST]
    if hidden := len(pairs) - len(shown):
        caption += f" {hidden} further comparisons are not shown, nor counted by Holm."
    tests, crops = [row.test for row in shown], "{0.n} photographs ({0.images} images)"
    columns = [
        Column("lines", lambda r: f"{r[0].first.number} − {r[0].second.number}", "l"),
        Column("compared", lambda r: r[0].title, "l"),
        Column("n", lambda r: str(r[1].n) if r[1].n == r[1].images else crops.format(r[1])),
        Column(
            "left out", lambda r: len(r[0].first.images.union(r[0].second.images)) - r[1].images
        ),
        Column("median", lambda r: number(r[1].median, 2, sign=True)),
        Column("mean [95 %]", lambda r: f"{number(r[1].mean, 2, sign=True)} [{_interval(r[1])}]"),
        Column("effect", lambda r: correlation(r[1].effect)),
        Column("p Wilcoxon", lambda r: _p_text(r[1].p)),
        Column("Holm", lambda r: _p_text(r[2])),
    ]
    rows = zip(shown, tests, holm([test.p for test in tests]), strict=True)
    return table_of("Paired tests, image by image", caption, columns, rows) if shown else None


def _between_clients(clients: Sequence[Client]) -> Iterator[Comparison]:
    """Undefended against defended: worst case over one upload, then over any number if those are
    other lines.

    The two agree in every circumstance: data, image size, batch, local steps, precision and so on.
    Among several undefended clients one whose model was not trained with shuffled patches is taken,
    then one of the same model, then the likest.
    """
    known = [client for client in clients if client.any_uploads or client.one_upload]
    for defended in (client for client in known if client.defended):
        alike = [x for x in known if not x.defended and circumstances(x) == circumstances(defended)]
        if not alike:
            continue
        plain = min(alike, key=lambda other: _distance(other, defended))
        of_one = plain.one_upload, defended.one_upload
        of_any = plain.any_uploads or plain.one_upload, defended.any_uploads or defended.one_upload
        pairs = {of_any: "any number of uploads"} | {of_one: "one upload"}
        for (first, second), uploads in reversed(pairs.items()):
            if first and second:
                title = f"worst case, {uploads}: {plain.title} − {defended.title}"
                yield Comparison(title, first, second)


def _distance(undefended: Client, defended: Client) -> tuple[bool, ...]:
    one, other = undefended.cell, defended.cell
    return (
        bool(one.trained_gamma),
        one.model != other.model,
        one.position_embedding != other.position_embedding,
        one.first_block != other.first_block,
    )


def _between_attacks(clients: Sequence[Client]) -> Iterator[Comparison]:
    """The best other attack against April as published: with one upload, then with any number if
    that is another; by the mean of min(PSNR, 100) over the images that April scored too."""
    for client in clients:
        if (april := client.published) is None:
            continue
        both = {x: shared_scores(x, april)["first"] for x in client.matching if x is not april}
        means = {x: psnr.clip(upper=PSNR_CAP).mean() for x, psnr in both.items() if len(psnr)}
        single = [line for line in means if line.uploads == 1]
        best = [max(some, key=lambda line: means[line]) for some in (single, means) if some]
        for line in dict.fromkeys(best):
            yield Comparison(f"{client.title}: {line.title} − {april.title}", line, april)


def _interval(test: PairedTest) -> str:
    return DASH if math.isnan(test.low) else f"{number(test.low, 2)}, {number(test.high, 2)}"


def _p_text(p: float) -> str:
    """A p-value with two digits, `< 1e-4` below that."""
    if math.isnan(p):
        return DASH
    return "< 1e-4" if p < 1e-4 else f"{p:.2g}"


# does a picture point to its own image? -----------------------------------------------------------

COMPARED = 200  # images of a line that are compared with one another
MATCHED = 30  # of them, after patches were matched: each pair is an assignment problem
MOST_PATCHES = 1024  # patches of an image up to which they are matched

IDENTIFICATION_CAPTION = (
    "Each reconstruction is compared with the originals (plain, in (b) too) of at most "
    f"{COMPARED} of the line's images that have one, evenly spaced by id. First: its own is the "
    "nearest, as count, share and Wilson 95 % interval; then the mean of 1 / rank. Equally near "
    "ones rank before it; other crops of its photograph are others. Chance: the same for an "
    "order drawn by lot, so rows of other numbers of images do not compare. Pictures are shrunk "
    f"by area to at most {matching.SIDE} pixels a side. Pixels: mean squared error. LPIPS: with "
    "AlexNet. Features: cosine of AlexNet's last convolutions, averaged over space; it was "
    "trained on ImageNet's labels and is not the attacked network. Patches matched, where the "
    "client shuffles: squared error after patches, each shrunk by itself, were assigned one to "
    f"one (Hungarian method), on at most {MATCHED} of the images, if they have at most "
    f"{MOST_PATCHES} patches. PSNR matched: their median at full size, in the order found with "
    "the original: an upper bound."
)


def identification_table(named: Sequence[tuple[str, Line]]) -> TextTable | None:
    """A row for each line, under its name, of which two reconstructions and originals of one size
    are stored; None where there is no such line."""
    rows = [
        {"#": str(line.number), "Line": name, **row}
        for name, line in named
        if (row := _identified(line))
    ]
    columns = [
        Column(title, itemgetter(title), "l" if title == "Line" else "r")
        for title in dict.fromkeys(title for row in rows for title in row)
    ]
    title = "Does a reconstruction point to its own image?"
    return table_of(title, IDENTIFICATION_CAPTION, columns, rows) if rows else None


def _identified(line: Line) -> dict[str, str]:
    """How often a line's pictures point to their own image, by column; nothing without pictures.

    All of them are compared shrunk; some of those that were shuffled at full size, after their
    patches were matched.
    """
    chosen = _evenly_spaced(sorted({*line.scored(*PSNR).index} & {*line.picture_ids}), COMPARED)
    matched = {*_evenly_spaced(chosen, MATCHED)}
    small, full, patches = dict[str, Tensor](), dict[str, Tensor](), 0
    for image in chosen:
        stored = line.reconstruction(image) or {}
        if {"images", "plain"} <= stored.keys():
            pair = torch.stack([stored["images"].float(), stored["plain"].float()]).clamp(0, 1)
            small[image] = matching.shrink(pair)
            if image in matched and "mask" in stored:
                full[image], patches = pair, stored["mask"].numel()
    if len({pair.shape for pair in small.values()}) != 1 or len(small) < 2:
        return {}
    compared = matching.distances(*torch.stack([*small.values()], dim=1))
    found = {
        name: matching.pointing(of, _photographs(line, small)) for name, of in compared.items()
    }
    psnr, chance = None, DASH
    if len(full) > 1 and patches <= MOST_PATCHES:
        images, originals = torch.stack([*full.values()], dim=1)
        size = math.isqrt(images[0, 0].numel() // patches)
        apart = matching.matched_distances(images, originals, size)
        found["patches matched"] = matching.pointing(apart, _photographs(line, full))
        psnr = float(np.median(matching.matched_psnr(images, originals, size)))
        chance = _chance(len(full))
    names = ("pixels", "LPIPS", "features", "patches matched")
    return {
        **{"images": f"{len(small)} of {len(line.images)}", "chance": _chance(len(small))},
        **{f"{name} first": _first(found.get(name)) for name in names},
        **{"chance, matched": chance, "PSNR matched": capped(psnr, 2)},
    }


def _evenly_spaced(names: Sequence[str], most: int) -> list[str]:
    """At most `most` of the names, first and last among them, equally far apart."""
    places = np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int)
    return [names[at] for at in places]


def _photographs(line: Line, images: Iterable[str]) -> list[str]:
    """The photograph that each image was cut from."""
    return [image if line.groups is None else str(line.groups[image]) for image in images]


def _first(found: matching.Pointing | None) -> str:
    """`21 of 24 (88 %, 69–96); 0.916`: own images that are the nearest, and the mean 1 / rank."""
    if found is None:
        return DASH
    mean = math.floor(1000 * found.reciprocal_rank + 1e-9) / 1000  # 1 stands for all firsts
    return f"{found.first.text()}; {mean:.3f}"


def _chance(n: int) -> str:
    """Share of firsts and mean 1 / rank of an order drawn by lot: 1 / n, and Σ (1 / r) / n."""
    return f"{100 / n:.1f} %; {sum(1 / rank for rank in range(1, n + 1)) / n:.3f}"


# do the metrics agree? ----------------------------------------------------------------------------

CLOSER = {"psnr": 1, "ssim": 1, "lpips": -1, "mse": -1, "fft2d": -1}
"""The sign with which a higher value of each metric means a better reconstruction."""

FEWEST = 3  # images; two are always in perfect order

AGREEMENT_CAPTION = (
    "Rank correlations between metrics (standard) over {n} images of line {line} that have all of "
    "them, crops counted singly: Spearman's ρ above the diagonal, Kendall's τ-b below. Metrics are "
    "turned so that higher is a better reconstruction: 1 orders the images alike, −1 in reverse; "
    "MSE and PSNR do so by definition. A dash: one metric is the same for every image."
)


def agreement_table(line: Line) -> TextTable | None:
    """Whether metrics order a line's images alike; None with fewer than two metrics or three
    images. An infinite PSNR is a value: the highest."""
    scores = {name: line.scored(name, "standard") for name in CLOSER}
    known = {TITLES[name]: CLOSER[name] * of for name, of in scores.items() if len(of)}
    if len(known) < 2 or len(common := pd.concat(known, axis=1, join="inner")) < FEWEST:
        return None
    ranks = common.rank()
    spearman, kendall = ranks.corr(), ranks.corr("kendall")

    def cell(row: int, column: int) -> str:
        correlations = spearman if column > row else kendall
        return "" if column == row else correlation(correlations.to_numpy()[row, column])

    columns = [
        Column("", list(known).__getitem__, "l"),
        *(Column(name, partial(cell, column=at)) for at, name in enumerate(known)),
    ]
    caption = AGREEMENT_CAPTION.format(n=len(common), line=line.number)
    return table_of(f"Do the metrics agree? {line.label}", caption, columns, range(len(known)))
