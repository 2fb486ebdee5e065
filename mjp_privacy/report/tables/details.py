"""What bounds the scores, whether pictures point to their own image, whether metrics agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.metrics.matching import (
    SIDE,
    Pointing,
    distances,
    matched_distances,
    matched_psnr,
    pointing,
    shrink,
)
from mjp_privacy.report.figures import PSNR, REGIONS, TITLES, Table
from mjp_privacy.report.lines import Line
from mjp_privacy.report.tables.text import (
    DASH,
    Column,
    Record,
    TextTable,
    attack,
    capped,
    condition,
    correlation,
    gamma,
    number,
    records,
    table_of,
)

MEASURED_CAPTION = (
    "Ceiling: PSNR of the true patch embeddings inverted by minimum norm, against the image that "
    "the client fed: the limit that the embedding's rank sets to attacks without a prior. Oracle "
    "in place: the same with the patches in the order they were fed. Below grey: percent of the "
    "images for which a uniform grey scores better, so that the attack failed. Medians: cond(A), "
    "the numerical rank of A at the gradient's precision, its nonzero rows, shuffled patches. "
    "Empty masks: images in which nothing was shuffled. Mask precision: the share of the patches "
    "taken for shuffled that are; recall: the share of the shuffled that are found. PSNR, unmasked "
    "and masked: over patches that were not shuffled and that were; the mean image is the floor of "
    "the former. Oracle permutation: the attack's patches put back with the true permutation, "
    "which no attacker has. Jigsaw, direct and neighbour: the share of shuffled patches put back "
    "into their place, and of neighbouring pairs restored. Gradient residual: the relative "
    "distance of the reconstruction's gradient from the uploaded one. Means, PSNR at most 100 dB, "
    "or medians where said; n where it differs from the line's."
)

BOUNDS: tuple[tuple[str, str, int | None, str | None], ...] = (
    ("ceiling", "ceiling_mean", 2, "ceiling_n"),
    ("ceiling − PSNR", "ceiling_distance", 2, None),
    ("oracle in place", "in_place_mean", 2, None),
    ("below grey, %", "below_grey", 0, "below_grey_n"),
    ("cond(A)", "cond_a_median", None, None),
    ("rank(A)", "rank_a_median", 0, None),
    ("nonzero rows", "nonzero_rows_median", 0, None),
    ("shuffled patches", "shuffled_patches_median", 0, None),
    ("empty masks", "empty_masks", 0, None),
)
"""Columns of table.csv: title, name, decimals, and the column of their n."""


def measured_table(standard: Table) -> TextTable:
    """Ceilings, the linear system, masks and residuals: a column for what some line has."""
    rows = records(standard)
    measures = ((m.title, m.column, m.decimals, m.column_of_n) for m in REGIONS)
    figures = [of for of in (*BOUNDS, *measures) if any(pd.notna(row.get(of[1])) for row in rows)]
    columns = [
        Column("#", itemgetter("line")),
        Column("Model", itemgetter("model"), "l"),
        Column("Set.", itemgetter("setting"), "l"),
        Column("γ", lambda r: gamma(r["gamma"]), "l"),
        Column("Attack", attack, "l"),
        Column("dtype", itemgetter("dtype"), "l"),
        *(Column(title, partial(_figure, name, digits, n)) for title, name, digits, n in figures),
    ]
    title = "Ceilings, the linear system, masks and residuals"
    return table_of(title, MEASURED_CAPTION, columns, rows)


def _figure(name: str, decimals: int | None, column_of_n: str | None, record: Record) -> str:
    value = record[name]
    if value is None or value != value:
        return DASH
    text = condition(value) if decimals is None else number(float(value), decimals)
    n = record[column_of_n] if column_of_n else record["psnr_n"]
    return text if n == record["psnr_n"] else f"{text} (n={n})"


# does a picture point to its own image? -----------------------------------------------------------

MOST = 200  # images of a line that are compared with one another
MOST_MATCHED = 30  # of them, after patches were matched: each pair is an assignment problem
MOST_PATCHES = 1024  # patches of an image up to which they are matched

IDENTIFICATION_CAPTION = (
    f"Each reconstruction is compared with the originals (plain, in (b) too) of at most {MOST} of "
    "the line's images that have one, evenly spaced by id. First: its own is the nearest, as "
    "count, share and Wilson 95 % interval; then the mean of 1 / rank. Equally near ones rank "
    "before it; other crops of its photograph are others. Chance: the same for an order drawn by "
    "lot, so rows of other numbers of images do not compare. Pictures are shrunk by area to at "
    f"most {SIDE} pixels a side. Pixels: mean squared error. LPIPS: with AlexNet. Features: cosine "
    "of AlexNet's last convolutions, averaged over space; it was trained on ImageNet's labels and "
    "is not the attacked network. Patches matched, where the client shuffles: squared error after "
    "patches, each shrunk by itself, were assigned one to one (Hungarian method), on at most "
    f"{MOST_MATCHED} of the images, if they have at most {MOST_PATCHES} patches. PSNR matched: "
    "their median at full size, in the order found with the original: an upper bound."
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
    chosen = _evenly_spaced(sorted({*line.scored(*PSNR).index} & {*line.picture_ids}), MOST)
    matched = {*_evenly_spaced(chosen, MOST_MATCHED)}
    small, full, patches = dict[str, Tensor](), dict[str, Tensor](), 0
    for image in chosen:
        stored = line.reconstruction(image) or {}
        if {"images", "plain"} <= stored.keys():
            pair = torch.stack([stored["images"].float(), stored["plain"].float()]).clamp(0, 1)
            small[image] = shrink(pair)
            if image in matched and "mask" in stored:
                full[image], patches = pair, stored["mask"].numel()
    if len({pair.shape for pair in small.values()}) != 1 or len(small) < 2:
        return {}
    compared = distances(*torch.stack([*small.values()], dim=1))
    found = {name: pointing(of, _photographs(line, small)) for name, of in compared.items()}
    psnr, chance = None, DASH
    if len(full) > 1 and patches <= MOST_PATCHES:
        images, originals = torch.stack([*full.values()], dim=1)
        size = math.isqrt(images[0, 0].numel() // patches)
        apart = matched_distances(images, originals, size)
        found["patches matched"] = pointing(apart, _photographs(line, full))
        psnr = float(np.median(matched_psnr(images, originals, size)))
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


def _first(found: Pointing | None) -> str:
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
