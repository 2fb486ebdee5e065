"""The figures of `mjp analyse` as flat rows: models, tables of noise, and the paper's lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mjp_privacy.analysis.analysed import Analysed, Figures, Noise
from mjp_privacy.analysis.published import GRID, PUBLISHED, WIDTH, PublishedTable
from mjp_privacy.analysis.spectrum import DIMENSIONS, at, dimensions_for

Row = dict[str, str | int | float | None]

MOST_ENERGY = 0.9
NOISE, PAPER = "noise", "paper"
"""What a row is of, in the column `kind`; else it is a `model`."""


def rows(results: Sequence[Analysed], noises: Sequence[Noise]) -> Iterator[Row]:
    """One for each model, each drawn table of noise, and each model of the paper.

    Shares are in percent, errors in patches.
    """
    for result in results:
        yield _of_model(result)
    for noise in noises:
        for seed, figures in enumerate(noise.tables):
            size: Row = {"grid": noise.grid, "width": noise.width, "seed": seed}
            yield {"kind": NOISE, "label": "N(0, 1), not trained", **size, **_of_table(figures)}
    for published in PUBLISHED:
        yield _of_paper(published)


def _of_model(result: Analysed) -> Row:
    row: Row = {
        "kind": "model",
        "label": result.label,
        "architecture": result.architecture,
        "trained_gamma": result.trained_gamma,
    }
    if result.table is not None and result.figures is not None:
        row |= {"grid": result.table.grid, "width": result.table.width}
        row |= _of_table(result.figures)
    if result.start is not None and result.rest is not None:
        start = result.start
        row |= {"start_std": start.std, "start_left": start.left, "start_share": 100 * start.share}
        learned = _of_table(result.rest).items()
        row |= {f"rest_{name}": value for name, value in learned if "constant" not in name}
    looked = result.attention
    row |= {"head_diversity": looked.head_diversity, "image_diversity": looked.image_diversity}
    return row | {"attention_spread": looked.spread, "images": result.images}


def _of_table(figures: Figures) -> Row:
    places = figures.places
    row: Row = {f"variance_{k}": 100 * at(figures.variance, k) for k in DIMENSIONS}
    row |= {f"energy_{k}": 100 * at(figures.energy, k) for k in DIMENSIONS}
    row |= {"dimensions_for_90": dimensions_for(figures.energy, MOST_ENERGY)}
    row |= {"mae_1d": places.mae_1d, "mae_1d_std": places.std_1d}
    row |= {"mae_2d": places.mae_2d, "mae_2d_std": places.std_2d}
    row |= {"constant_1d": places.constant_1d, "constant_2d": places.constant_2d}
    return row | {"neighbour_similarity": figures.neighbours, "other_similarity": figures.others}


def _of_paper(published: PublishedTable) -> Row:
    row: Row = {"kind": PAPER, "label": published.model, "grid": GRID, "width": WIDTH}
    if published.variance is not None:
        shares = zip(DIMENSIONS, published.variance, strict=True)
        row |= {f"variance_{k}": share for k, share in shares}
    row |= {"mae_1d": published.mae_1d, "mae_1d_std": published.std_1d}
    return row | {"mae_2d": published.mae_2d, "mae_2d_std": published.std_2d}
