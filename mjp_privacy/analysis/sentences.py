"""The answer in words: one sentence a model, read off its figures."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.analysis.analysed import Analysed, Figures, Noise
from mjp_privacy.analysis.spectrum import at

MOSTLY = 0.5
"""The share of its own start from which a table counts as mostly that."""
READ = 0.5
"""Of the error of a constant guess: below it the patches' places count as read."""


def sentences(results: Sequence[Analysed], noises: Sequence[Noise]) -> list[str]:
    """One for each model, in their order."""
    by_size = {(noise.grid, noise.width): noise for noise in noises}
    return [_sentence(result, by_size) for result in results]


def _sentence(result: Analysed, noises: dict[tuple[int, int], Noise]) -> str:
    table, figures = result.table, result.figures
    if table is None or figures is None:
        return f"{result.label}: has no position embeddings, so nothing tells a place."
    noise = noises[table.grid, table.width]
    low, high = spread(noise)
    parts = [
        f"{result.label}: {_verdict(result, figures)}. 3 dimensions hold "
        f"{100 * at(figures.variance, 3):.1f} % of the variance (noise {low:.1f} to {high:.1f}), a "
        f"linear map misses a patch by {figures.places.mae_2d:.2f} (a constant by "
        f"{figures.places.constant_2d:.2f})"
    ]
    if result.start is not None and result.rest is not None and result.start.share >= MOSTLY:
        parts.append(
            f"{100 * result.start.share:.1f} % of the variance is still that of its start, N(0, "
            f"{result.start.std:.1g}²); of what was learned beside it 3 dimensions hold "
            f"{100 * at(result.rest.variance, 3):.1f} %"
        )
    return "; ".join(parts) + "."


def _verdict(result: Analysed, figures: Figures) -> str:
    if result.start is not None and result.start.share >= MOSTLY:
        return "mostly the noise it started from"
    if figures.places.mae_2d <= READ * figures.places.constant_2d:
        return "the patches' places can be read from it"
    return "a linear map reads little of the patches' places"


def spread(noise: Noise, dimensions: int = 3) -> tuple[float, float]:
    """The smallest and the largest share of the variance over the seeds, in percent."""
    shares = [100 * at(figures.variance, dimensions) for figures in noise.tables]
    return min(shares), max(shares)
