"""Rows and pictures that changed after they were written: in no figure, and said once."""

from __future__ import annotations

from collections.abc import Sequence

from mjp_privacy.core.text import first_of, shown
from mjp_privacy.report.lines import Line

NAMED = 3
"""Files that are called by their names."""


def damaged_units(lines: Sequence[Line]) -> tuple[int, int]:
    """How many images of lines with damaged files have no rows that count, and how many images all
    lines have: an image counts once for each of its lines."""
    counts = [(_planned(line), len(line.images) + len(line.unreadable)) for line in lines]
    lost = (
        max(1, planned - there)
        for line, (planned, there) in zip(lines, counts, strict=True)
        if line.left_out
    )
    return sum(lost), sum(max(planned, there) for planned, there in counts)


def _planned(line: Line) -> int:
    return line.cell.outcome.planned_images + len(line.unreadable)


def damaged_notes(lines: Sequence[Line]) -> list[str]:
    """One sentence of how many units are damaged, and in which files."""
    files = [path.relative_to(line.store.root) for line in lines for path in line.left_out]
    if not files:
        return []
    lost, of = damaged_units(lines)
    named = first_of([shown(file) for file in files], NAMED)
    return [
        f"DAMAGED: {lost} units of {of} are damaged and in no figure: run the attack again "
        f"({named})"
    ]
