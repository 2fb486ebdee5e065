"""How a run ended: what failed, what did not apply, and which results other code made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mjp_privacy.core.text import counted, first_of
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.store import NOT_DONE, RunStore

NAMED = 3  # images of a line that are called by their names
NOT_LOADED = "not loaded, for the reason above; all of its rows failed"


@dataclass(frozen=True)
class RunSummary:
    """How a run ended: its folder, its size, and what failed or did not apply."""

    out: Path
    cells: int
    images: int
    failures: tuple[str, ...]  # one for each model, image, or image in a model and setting
    inapplicable: tuple[str, ...] = ()  # why attacks were refused, with the number of images
    failed_because: tuple[str, ...] = ()  # the failures by reason, each reason once
    of_other_code: int = 0  # number of cells with kept results that other code made
    unrecorded: int = 0  # and of those with results of code that was not recorded
    not_done: tuple[str, ...] = ()  # blocks that no worker of an engine finished, and why

    @property
    def exit_code(self) -> int:
        """0 if everything was done, 3 if some image, cell or block failed."""
        return 3 if self.failures or self.not_done else 0


@dataclass(frozen=True)
class Failure:
    """One thing that failed: a model, an image that cannot be read, or an image in a cell."""

    reason: str
    model: str = ""
    setting: str = ""
    image: str = ""
    cell: str = ""  # its run_id

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    @property
    def where(self) -> str:
        """Model, setting and image, as far as they matter."""
        return ", ".join(part for part in (self.model, self.setting, self.image) if part)


def failures_and_refusals(
    store: RunStore, plan: Plan, facts: Mapping[Cell, CellFacts]
) -> tuple[list[Failure], tuple[str, ...]]:
    """What the rows of a plan's cells say: everything that failed, and a line for each reason why
    attacks did not apply, the commonest first."""
    failures: dict[Failure, None] = {}  # an ordered set
    rows_of: dict[str, int] = {}
    cells_of: dict[str, int] = {}
    planned = {
        name: {record.image_id for block in blocks for record in block.records}
        for name, blocks in plan.blocks.items()
    }
    for cell, of_cell in facts.items():
        model, lost = of_cell.model.label, of_cell.outcome
        if lost.status == "failed":
            failures[Failure(lost.reason, model)] = None
        rows = store.read(of_cell.run_id, ["image_id", "status", "reason"])
        rows = rows[rows["image_id"].isin(planned[cell.model])]
        for image, status, reason in rows[rows["status"].isin(NOT_DONE)].itertuples(index=False):
            if reason == lost.reason:
                continue
            where = (model, of_cell.setting, image, of_cell.run_id)
            failures[Failure(reason, *(where if status != "unreadable" else ("", "", image)))] = (
                None
            )
        refused = rows.loc[rows["status"] == "unsupported", "reason"].value_counts(sort=False)
        for reason, count in refused.items():
            rows_of[str(reason)] = rows_of.get(str(reason), 0) + int(count)
            cells_of[str(reason)] = cells_of.get(str(reason), 0) + 1
    ranked = sorted(rows_of, key=lambda reason: (-rows_of[reason], reason))
    lines = (
        f"{counted(rows_of[reason], 'row')} in {counted(cells_of[reason], 'cell')}: {reason}"
        for reason in ranked
    )
    return list(failures), tuple(lines)


def failure_lines(failures: Iterable[Failure]) -> tuple[str, ...]:
    """A line for each reason, in the order in which the reasons occurred.

    "1.png: the file is empty" or "ViT, a, 2.png: not finite" where it occurred once, "40 images in
    2 cells (0.png, 1.png, 2.png, …): not finite" where it did often. Why a model could not be
    loaded was said when that happened, so that its line names the model alone.
    """
    by_reason: dict[str, list[Failure]] = {}
    for failure in failures:
        by_reason.setdefault(failure.reason if failure.image else NOT_LOADED, []).append(failure)
    return tuple(f"{_named(members)}: {reason}" for reason, members in by_reason.items())


def _named(failures: Sequence[Failure]) -> str:
    """What failed for one reason, in a few words."""
    images = list(dict.fromkeys(failure.image for failure in failures if failure.image))
    cells = {failure.cell for failure in failures if failure.cell}
    if not images:
        return ", ".join(dict.fromkeys(failure.model for failure in failures))
    if len(images) == 1 and len(cells) < 2:
        return failures[0].where
    within = f" in {counted(len(cells), 'cell')}" if cells else ""
    return f"{counted(len(images), 'image')}{within} ({first_of(images, NAMED)})"
