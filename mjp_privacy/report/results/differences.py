"""Each line of a published table beside one of its lines, image by image.

A table of claims.yaml with `every` names that line's attack as `against`:

    every: {rows: gradvit/rows.parquet, setting: a}
    against: gradvit                      # a column: mean of (PSNR − gradvit's PSNR) [95 %]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mjp_privacy.core.errors import UserError
from mjp_privacy.report.results.figures import Figures, LineFigures, entry
from mjp_privacy.report.tables.comparisons import line_test
from mjp_privacy.report.tables.text import DASH

COMPARED = ("model", "setting", "gamma", "client", "dtype")
"""What a line and the one it is compared with have in common; of several, its own run's counts."""


def difference_title(attack: str) -> str:
    """The head of the column: `− gradvit, paired [95 %]`."""
    return f"− {attack}, paired [95 %]"


def difference_from(line: Figures, attack: str, lines: Sequence[Figures]) -> str:
    """The mean difference of min(PSNR, 100) on the images that both lines scored.

    `lines` are all of the table. The n stands behind where an image lacks one of the two scores.
    A dash where the line is that attack's own, or no image has both.
    """
    if not isinstance(line, LineFigures):
        raise UserError("A table with `against` is made of per-image rows, not of a CSV.")
    base = _line_of(attack, line, lines)
    if base is line:
        return DASH
    test = line_test(line.line, base.line)
    if not test.n:
        return DASH
    over = "" if test.images == line.of else f" (over {test.images})"
    interval = DASH if math.isnan(test.low) else f"{test.low:.2f}, {test.high:.2f}"
    return f"{test.mean:+.2f} [{interval}]{over}"


def _line_of(attack: str, line: LineFigures, lines: Sequence[Figures]) -> LineFigures:
    """The line of this attack on the same client; the table has to have one."""
    of_client = [
        other
        for other in lines
        if isinstance(other, LineFigures)
        and entry(other.line, "attack") == attack
        and all(entry(other.line, key) == entry(line.line, key) for key in COMPARED)
    ]
    of_run = [other for other in of_client if entry(other.line, "run") == entry(line.line, "run")]
    fitting = of_run or of_client
    if len(fitting) != 1:
        raise UserError(
            f"Expected one line of {attack} beside {line.fact('attack')}, got {len(fitting)}."
        )
    return fitting[0]
