"""What a run will do, decided before anything is computed: cells, their attacks, blocks of images.

`run` makes a plan, `work` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.block import Block
from mjp_privacy.experiment.config import Cell, Experiment, expand
from mjp_privacy.experiment.gradient_residual import RESIDUAL_OVER
from mjp_privacy.experiment.identity import cell_key
from mjp_privacy.experiment.refusals import refused_by_network
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.interfaces import Attack, Control
from mjp_privacy.models import LoadedModel


@dataclass(frozen=True)
class Plan:
    """The cells of a run in table order, the attack of each, and each model's blocks of images."""

    experiment: Experiment
    cells: Sequence[Cell]
    attacks: Mapping[Cell, Attack | Control]
    blocks: Mapping[str, Sequence[Block]]  # by model, in the config's order

    @property
    def units(self) -> int:
        """The number of units: images, counted once in each cell."""
        return sum(len(block.records) for cell in self.cells for block in self.blocks[cell.model])

    def cells_of(self, model: str) -> list[Cell]:
        """The cells that attack this model, in table order."""
        return [cell for cell in self.cells if cell.model == model]

    def gradients(self, cell: Cell, model: LoadedModel) -> list[str]:
        """The parameters whose gradients this cell's clients upload.

        They are the union over all attacks that share the upload, finished or not, so that an
        interrupted run computes the same upload again; and the one that residuals are taken over.
        """

        def upload_key(cell: Cell) -> tuple[Any, ...]:
            attack = self.attacks[cell]
            victim = None if isinstance(attack, Control) else attack.victim
            return cell.model, cell.setting, cell.gamma, cell.dtype, cell.client, victim

        key = upload_key(cell)
        names: list[str] = []
        for peer in self.cells:
            attack = self.attacks[peer]
            if upload_key(peer) != key or isinstance(attack, Control):
                continue
            if refused_by_network(peer, model, attack) is not None:
                continue  # what it reads is not there
            try:
                names += _names(attack.needs(model))
            except Exception:
                if attack is self.attacks[cell]:  # another's mistake is that one's own failure
                    raise
        return list(dict.fromkeys([*names, RESIDUAL_OVER]))


def _names(needed: Any) -> list[str]:
    """The parameters that an attack of anybody's says that it reads."""
    if isinstance(needed, str) or not all(isinstance(name, str) for name in needed):
        raise TypeError(f"needs: expected names of parameters, got {shown(repr(needed), 100)}")
    return list(needed)


def make_plan(experiment: Experiment, source: UploadSource) -> Plan:
    """Expand the grid into cells and cut each model's images into blocks of whole client steps.

    A cell that appears twice, or images that do not fill the last client step, are errors.
    """
    cells = expand(experiment)
    _check_distinct(cells, experiment)
    attacks = {cell: find_attack(cell.attack.name, cell.attack.options) for cell in cells}
    used = {cell.model for cell in cells}
    models = [name for name in experiment.models if name in used]
    _check_steps(cells, models, source, experiment.block)
    return Plan(
        experiment,
        cells,
        attacks,
        {name: _blocks(source, name, experiment.block) for name in models},
    )


def _blocks(source: UploadSource, model: str, size: int) -> list[Block]:
    records = source.records(model)
    return [
        Block(index, records[start : start + size])
        for index, start in enumerate(range(0, len(records), size))
    ]


def _check_distinct(cells: Sequence[Cell], experiment: Experiment) -> None:
    """Raise if two cells have the same key: they would overwrite each other's rows."""
    seen: set[str] = set()
    for cell in cells:
        key = cell_key(cell, experiment)
        if key in seen:
            raise UserError(
                f"The grid holds {cell.model}, setting {cell.setting}, gamma {cell.gamma}, "
                f"{cell.dtype}, {cell.attack.title} twice. Expected each cell once."
            )
        seen.add(key)


def _check_steps(
    cells: Sequence[Cell], models: Sequence[str], source: UploadSource, block: int
) -> None:
    """Raise unless every model's images fill whole steps of all its clients."""
    for name in models:
        clients = [cell.client for cell in cells if cell.model == name]
        batches = {client.batch for client in clients}
        multiple, images = math.lcm(*batches), len(source.records(name))
        if images % multiple:
            raise UserError(
                f"{images} images do not fill the client steps of {name} "
                f"(client.batch {', '.join(map(str, sorted(batches)))}). Expected a multiple "
                f"of {multiple}, such as --limit {_fitting(images, clients, block)}."
            )


def check_partners(plan: Plan) -> None:
    """Raise where the last block of a simulated client that shuffles its images is one batch: its
    images would have the same partners in every round, as if they were fixed."""
    block = plan.experiment.block
    for name, blocks in plan.blocks.items():
        clients = [cell.client for cell in plan.cells_of(name)]
        batch, images = _largest_shuffled(clients), sum(len(one.records) for one in blocks)
        if batch and blocks and len(blocks[-1].records) < 2 * batch:
            raise UserError(
                f"{images} images leave {len(blocks[-1].records)} for the last block of {name} "
                f"(block {block}). Expected two batches at least with partners: fresh "
                f"({2 * batch} images), because those of a single batch keep their partners. Give "
                f"another number of images, such as --limit {_fitting(images, clients, block)}."
            )


def _fitting(images: int, clients: Sequence[ClientConfig], block: int) -> int:
    """The largest number of images up to this one, or else the smallest above it, that fills the
    steps of all clients and leaves no batch alone whose partners should be fresh."""
    multiple = math.lcm(*(client.batch for client in clients))
    least = 2 * _largest_shuffled(clients)

    def fits(number: int) -> bool:
        return number % multiple == 0 and (number % block == 0 or number % block >= least)

    below = next((number for number in range(images, 0, -1) if fits(number)), None)
    return next(filter(fits, count(images + 1))) if below is None else below


def _largest_shuffled(clients: Sequence[ClientConfig]) -> int:
    """The largest batch of those clients that shuffle their images; 0 if none does."""
    return max((client.batch for client in clients if client.partners == "fresh"), default=0)
