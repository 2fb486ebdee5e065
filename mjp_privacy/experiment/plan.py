"""What a run will do, decided before anything is computed: cells, their attacks, blocks of images.

`run` makes a plan, `work` carries it out. A unit is one image in one cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import out_of_memory
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import counted, shown
from mjp_privacy.experiment.cell_facts import cell_key
from mjp_privacy.experiment.config import Cell, Experiment, expand
from mjp_privacy.experiment.diagnostics import RESIDUAL_OVER
from mjp_privacy.experiment.refusals import refused_by_network
from mjp_privacy.experiment.source import Block, UploadSource
from mjp_privacy.interfaces import Control
from mjp_privacy.models import LoadedModel


@dataclass(frozen=True)
class Plan:
    """The cells of a run in table order, and each model's blocks of images."""

    experiment: Experiment
    cells: Sequence[Cell]
    blocks: Mapping[str, Sequence[Block]]  # by model, in the config's order

    @property
    def units(self) -> int:
        """The number of units: images, counted once in each cell."""
        return sum(len(self.images(cell.model)) for cell in self.cells)

    def images(self, model: str) -> list[str]:
        return [record.image_id for block in self.blocks[model] for record in block.records]

    def cells_of(self, model: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.model == model]

    def gradients(self, cell: Cell, model: LoadedModel) -> list[str]:
        """The parameters whose gradients this cell's clients upload.

        They are the union over all attacks that share the upload, finished or not, so that an
        interrupted run computes the same upload again; and the one that residuals are taken over.
        """
        names: list[str] = []
        for peer in self.cells:
            attack = peer.attacker
            if peer.federation != cell.federation or isinstance(attack, Control):
                continue
            if refused_by_network(peer, model) is not None:
                continue  # what it reads is not there
            try:
                needed = attack.needs(model)  # by anybody's code
                if isinstance(needed, str) or not all(isinstance(name, str) for name in needed):
                    got = shown(repr(needed), 100)
                    raise TypeError(f"needs: expected names of parameters, got {got}")
                names += needed
            except Exception:
                if peer is cell:  # another's mistake is that one's own failure
                    raise
        return list(dict.fromkeys([*names, RESIDUAL_OVER]))

    def groups(self, model: str) -> list[list[Cell]]:
        """The model's cells, those together that attack the same uploads: the work of one task."""
        groups: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.cells_of(model):
            groups.setdefault(cell.federation, []).append(cell)
        return list(groups.values())

    def needs_residual(self, cell: Cell, model: LoadedModel, *, scored: bool) -> bool:
        """Whether a cell's reconstructions are compared with their uploads by gradient, which costs
        as much as the uploads: where several attacks on the client as it trained compete for the
        attacker's choice, where there is no truth to score against, or where the config asks."""
        if "residual" in self.experiment.diagnostics or not scored:
            return True

        def met(peer: Cell) -> tuple[Any, ...] | None:
            """The client as it trained, if the peer's attack meets that."""
            altered = not peer.uploads or (
                peer.victim == "april_block" and model.first_block != "closed_form"
            )
            return None if altered else peer.federation[:-1]

        return met(cell) is not None and sum(met(peer) == met(cell) for peer in self.cells) > 1


def make_plan(experiment: Experiment, source: UploadSource) -> Plan:
    """Expand the grid into cells and cut each model's images into blocks of whole client steps.

    A cell that appears twice, or images that do not fill the blocks, are errors.
    """
    cells, keys = expand(experiment), set[str]()
    for cell in cells:
        if (key := cell_key(cell, experiment)) in keys:  # they would overwrite each other's rows
            raise UserError(
                f"The grid holds {cell.model}, setting {cell.setting}, gamma {cell.gamma}, "
                f"{cell.dtype}, {cell.attack.title} twice. Expected each cell once."
            )
        keys.add(key)
    used = {cell.model for cell in cells}
    blocks: dict[str, list[Block]] = {}
    for name in (name for name in experiment.models if name in used):
        records, size = source.records(name), experiment.block
        _check_blocks(name, len(records), [c for c in cells if c.model == name], size, source)
        starts = range(0, len(records), size)
        blocks[name] = [Block(n, records[at : at + size]) for n, at in enumerate(starts)]
    return Plan(experiment, cells, blocks)


def _check_blocks(
    name: str, images: int, cells: Sequence[Cell], size: int, source: UploadSource
) -> None:
    """Raise where images do not fill the client steps of a model, or where the last block of a
    simulated client that shuffles its images is one batch: its images would have the same partners
    in every round, as if they were fixed. Recorded clients are as they were."""
    multiple = math.lcm(*(cell.client.batch for cell in cells))
    shuffling = [] if source.recorded else [c for c in cells if c.client.partners == "fresh"]
    least = max((2 * cell.client.batch for cell in shuffling), default=0)

    def fits(number: int) -> bool:
        return number % multiple == 0 and (number % size == 0 or number % size >= least)

    if not fits(images):
        advised = next(n for n in chain(range(images, 0, -1), count(images + 1)) if fits(n))
        batches = ", ".join(map(str, sorted({cell.client.batch for cell in cells})))
        raise UserError(
            f"{images} images do not fill blocks of {size} with the client steps of {name} "
            f"(client.batch {batches}; a client with partners: fresh needs two steps in each). "
            f"Expected another number of images, such as --limit {advised}."
        )


# what will not apply ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """What is known of a run before it starts."""

    lines: tuple[str, ...] = ()
    """One for each reason: "3 of 12 cells: april, april_prior: a batch of 2"."""
    unopened: Mapping[str, str] = field(default_factory=dict)
    """Models that cannot be opened, with the reason."""
    largest_model: int = 0  # bytes of the float32 weights of the largest model


def forecast(plan: Plan, source: UploadSource) -> Forecast:
    """Which attacks of the grid will not apply, whatever the images show, and which models cannot
    be opened. Only outlines of the models are read."""
    refused: dict[str, list[str]] = {}  # the attacks of cells, by reason
    unopened: dict[str, str] = {}
    largest = 0
    for model, blocks in plan.blocks.items():
        own: list[tuple[str, str]] = []
        try:
            parameters = source.outline(model).model.parameters()
            largest = max(largest, sum(p.numel() * p.element_size() for p in parameters))
            for cell in plan.cells_of(model):
                found = source.foresee(cell, partial(plan.gradients, cell), blocks)
                reasons = dict.fromkeys(refusal.text for refusal in found if refusal is not None)
                own += [(reason, cell.attack.title) for reason in reasons]
        except UserError as error:
            unopened[model] = str(error)
        except Exception as error:  # it is opened again in the run, which tells what it is
            if interrupted() or out_of_memory(error):
                raise
        else:
            for reason, title in own:
                refused.setdefault(reason, []).append(title)
    lines = (
        f"{len(titles)} of {counted(len(plan.cells), 'cell')}: "
        f"{', '.join(dict.fromkeys(titles))}: {reason}"
        for reason, titles in sorted(refused.items(), key=lambda of_reason: -len(of_reason[1]))
    )
    return Forecast(tuple(lines), unopened, largest)
