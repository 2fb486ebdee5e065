"""The table of diagnostics on masks, on masked and unmasked regions, and on the attacks."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.report.loading import Line
from mjp_privacy.report.measures import Measure, measured, present
from mjp_privacy.report.tables.text import DASH, TextTable, gamma, number

CAPTION = (
    "Mask precision: the share of the patches the attacker takes for shuffled that are shuffled; "
    "mask recall: the share of the shuffled patches it finds. PSNR, unmasked and masked: over the "
    "pixels of the patches that were not shuffled and of those that were; the mean image on the "
    "unmasked patches is the floor of the former. PSNR, oracle permutation: the attack's patches "
    "put back with the true permutation, which is not an attack's result. Jigsaw, direct and "
    "neighbour: the share of shuffled patches put back into their place, and of neighbouring pairs "
    "restored. Gradient residual: the relative distance of the gradient that the reconstruction "
    "gives from the uploaded one; the private image is not used. Figures are means, with PSNR "
    "capped at 100 dB, or medians where the column says so; n is given where it differs from the "
    "line's."
)


def regions_table(lines: Sequence[Line]) -> TextTable | None:
    """The lines that have such diagnostics, with a column for each; None where no line has any."""
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
    same_n = n == line.count("psnr", "standard")
    return DASH if not n else number(value, measure.decimals) + ("" if same_n else f" (n={n})")
