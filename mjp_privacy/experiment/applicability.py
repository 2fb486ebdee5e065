"""Attacks that do not apply: said before a run as far as models tell, and counted after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import out_of_memory
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import counted
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.messages import CellDone, Message
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.source import Outlook, UploadSource


@dataclass
class Refusals:
    """Counts the rows (an image in a cell) that attacks refused, by reason.

    refusals.add(message); refusals.lines()  # ("40 rows in 2 cells: a batch of 2",)
    """

    rows: dict[str, int] = field(default_factory=dict)
    cells: dict[str, set[str]] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        """Count what a cell's block refused; every image once for each reason."""
        if not isinstance(message, CellDone):
            return
        for reason, count in message.refused.items():
            self.rows[reason] = self.rows.get(reason, 0) + count
            self.cells.setdefault(reason, set()).add(message.run_id)

    def lines(self) -> tuple[str, ...]:
        """A line for each reason, the commonest first."""
        ranked = sorted(self.rows, key=lambda reason: (-self.rows[reason], reason))
        return tuple(
            f"{counted(self.rows[reason], 'row')} in {counted(len(self.cells[reason]), 'cell')}: "
            f"{reason}"
            for reason in ranked
        )


@dataclass(frozen=True)
class Forecast:
    """What is known of a run before it starts."""

    lines: tuple[str, ...]
    """One for each reason: "3 of 12 cells: april, april_prior: a batch of 2"."""
    unopened: Mapping[str, str]  # models that cannot be opened, with the reason


def forecast(plan: Plan, source: UploadSource) -> Forecast:
    """Which attacks of the grid will not apply, whatever the images show, and which models cannot
    be opened. Only outlines of the models are read."""
    attacks: dict[str, list[str]] = {}
    cells: dict[str, int] = {}
    unopened: dict[str, str] = {}
    for model in plan.blocks:
        try:
            outlook = source.foresee(model)
            refused = {c: _refusals(plan, outlook, c) for c in plan.cells_of(model)}
        except UserError as error:
            unopened[model] = str(error)
            continue
        except Exception as error:  # it is opened again in the run, which tells what it is
            if interrupted() or out_of_memory(error):
                raise
            continue
        for cell, reasons in refused.items():
            for reason in reasons:
                cells[reason] = cells.get(reason, 0) + 1
                attacks.setdefault(reason, []).append(cell.attack.title)
    lines = (
        f"{cells[reason]} of {counted(len(plan.cells), 'cell')}: "
        f"{', '.join(dict.fromkeys(attacks[reason]))}: {reason}"
        for reason in sorted(cells, key=lambda reason: -cells[reason])
    )
    return Forecast(tuple(lines), unopened)


def _refusals(plan: Plan, outlook: Outlook, cell: Cell) -> list[str]:
    """The reasons why a cell's attack will not apply to some of its blocks, each once."""
    refusals = [
        outlook.refuses(
            cell, plan.attacks[cell], lambda model: plan.gradients(cell, model), block.records
        )
        for block in plan.blocks[cell.model]
    ]
    return list(dict.fromkeys(refusal.text for refusal in refusals if refusal is not None))
