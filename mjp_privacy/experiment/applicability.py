"""Attacks that do not apply: said before a run where the config tells, and counted after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.work import BlockResult, Result


@dataclass
class Refusals:
    """Counts the images that attacks refused, by reason.

    refusals.add(result); refusals.lines()  # ("40 images in 2 cells: a batch of 2",)
    """

    images: dict[str, int] = field(default_factory=dict)
    cells: dict[str, set[str]] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """Count what a block's result refused; every image once for each reason."""
        if not isinstance(result, BlockResult):
            return
        rows = result.rows[result.rows["status"] == "unsupported"]
        pairs = rows[["image_id", "reason"]].drop_duplicates()
        for reason, count in pairs["reason"].astype(str).value_counts().items():
            self.images[str(reason)] = self.images.get(str(reason), 0) + int(count)
            self.cells.setdefault(str(reason), set()).add(result.facts.run_id)

    def lines(self) -> tuple[str, ...]:
        """A line for each reason, the commonest first."""
        ranked = sorted(self.images, key=lambda reason: (-self.images[reason], reason))
        return tuple(
            f"{_count(self.images[reason], 'image')} in {_count(len(self.cells[reason]), 'cell')}: "
            f"{reason}"
            for reason in ranked
        )


def refused_by_config(plan: Plan) -> tuple[str, ...]:
    """Attacks of the grid that cannot apply, whatever the images and weights are."""
    several = dict.fromkeys(
        cell.attack.title
        for cell in plan.cells
        if cell.setting == "b" and getattr(plan.attacks[cell], "uploads", 1) > 1
    )
    return tuple(
        f"{label} in setting b: it reads several uploads, each shuffled differently, so there is "
        "no one shuffled image to reconstruct"
        for label in several
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
