"""The table of what attacks say of masks, regions and themselves; it has the columns it needs."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.report.loading import Line
from mjp_privacy.report.measures import Measure, measured, present
from mjp_privacy.report.views import DASH, TextTable, gamma, number

CAPTION = (
    "Mask precision and recall: of the patches that the attacker takes for shuffled, how many are, "
    "and of the shuffled ones, how many it names. PSNR, unmasked and masked: over the pixels of "
    "the patches that were not shuffled and of those that were; the mean image on the unmasked "
    "ones is their floor. Oracle permutation: the attack's patches, put back with the truth: no "
    "result. Jigsaw, direct and neighbour: the share of shuffled patches put back into their "
    "place, and of neighbouring pairs restored. Gradient residual: the relative distance of the "
    "gradient that the reconstruction gives from the uploaded one; no truth enters it. Means, PSNR "
    "at most 100 dB, and medians where it is said; n where it is not the line's own."
)


def regions_table(lines: Sequence[Line]) -> TextTable | None:
    """Lines with any such diagnostic, columns that any of these has; None where there is none."""
    measures = present(lines)
    shown = [line for line in lines if present([line])]
    if not shown:
        return None
    header = ("#", "Model", "Set.", "γ", "Attack", "dtype", *(m.title for m in measures))
    body = tuple(_row(line, measures) for line in shown)
    align = "rlllll" + "r" * len(measures)
    return TextTable("Masks, regions and residuals", CAPTION, header, body, align)


def _row(line: Line, measures: Sequence[Measure]) -> tuple[str, ...]:
    cell = line.cell
    return (
        *(str(line.number), cell.model.label, cell.setting, gamma(cell.gamma)),
        *(line.title, cell.dtype),
        *(_figure(line, measure) for measure in measures),
    )


def _figure(line: Line, measure: Measure) -> str:
    value, n = measured(line, measure)
    own = n == len(line.scored("psnr", "standard"))
    return DASH if not n else number(value, measure.decimals) + ("" if own else f" (n={n})")
