"""What a run will do, decided before anything is computed: cells, blocks of images, and refusals.

`run` makes a plan, `work` carries it out. A unit is one image in one cell. A refusal says why there
is nothing to attack or to score; `mjp check` foresees it for a model (`foreseen`): an attack is
asked by its own `unsupported`, with the view that a run would give it, but of tensors on torch's
meta device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch

from attacks import ATTACKS, lacks_parts, traits_of
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.cell_facts import cell_key
from mjp_privacy.experiment.config import Cell, Experiment, expand
from mjp_privacy.experiment.diagnostics import RESIDUAL_OVER
from mjp_privacy.experiment.source import META, Block, ModelVariants, UploadSource
from mjp_privacy.interfaces import Attack, Control, Refusal
from mjp_privacy.models import LoadedModel, MJPVisionTransformer
from mjp_privacy.uploads.folder import Series
from mjp_privacy.uploads.memory import view_of

NO_ONE_INPUT = Refusal(
    "target",
    "each upload was shuffled differently: there is no single shuffled image to reconstruct; "
    "score several uploads against the plain image (setting c)",
)
NO_SERIES = Refusal(
    "uploads",
    "it reads several uploads of the same images, and this client shuffles its images before every "
    "round (client.partners: fresh); only attacks that find what uploads share apply",
)
NO_TRUTH = Refusal("target", "the private images were not given, so nothing is scored")


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
        """The model's cells, those together that attack the same uploads: the work of one task.
        Those with the dearest attack come first, so that no worker is left alone with it."""
        groups: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.cells_of(model):
            groups.setdefault(cell.federation, []).append(cell)
        cost = {name: place for place, name in enumerate(ATTACKS)}

        def dearest(cells: list[Cell]) -> int:
            return max(cost.get(cell.attack.name, -1) for cell in cells)  # -1: a control

        return sorted(groups.values(), key=dearest, reverse=True)

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


def refused_by_setting(cell: Cell) -> Refusal | None:
    """Why the cell's setting leaves nothing to score its attack against, or None."""
    setting = SETTINGS[cell.setting]
    if cell.uploads > 1 and setting.shuffles and setting.against == "input":
        return NO_ONE_INPUT
    fresh = cell.uploads > 1 and cell.client.partners == "fresh"
    return NO_SERIES if fresh and "shared pictures" not in traits_of(cell.attack.name) else None


def refused_by_network(cell: Cell, model: MJPVisionTransformer) -> Refusal | None:
    """Why the attack or the client does not suit a network that is no plain ViT, or None."""
    if model.family == "vit":
        return None
    client, attack = cell.client, cell.attacker
    if client.positions != "own" or client.adapters is not None:
        text = f"clients of a {model.family} have positions: own and no low-rank adapters here"
        return Refusal("model", text)
    if client.mode == "train" and model.family == "resnet":
        text = "in training mode a ResNet's batch norm mixes images: clients need client.mode: eval"
        return Refusal("model", text)
    if isinstance(attack, Control) and attack.role == "floor":
        return None
    reason = lacks_parts(attack.name, model.family)
    return None if reason is None else Refusal("model", reason)


def refused_by_block(model: MJPVisionTransformer, attack: Attack) -> Refusal | None:
    """Why uploads of this model, made by somebody else, do not suit the attack; or None."""
    if (reason := lacks_parts(attack.name, model.family)) is not None:
        return Refusal("model", reason)
    if attack.victim == "intact" or model.first_block == "closed_form":
        return None
    return Refusal(
        "block",
        "it needs a client whose block 0 has neither norm1 nor residuals; this one trained the "
        "intact model",
    )


def foreseen(variants: ModelVariants, cell: Cell) -> Refusal | None:
    """Why the attack does not apply to simulated clients of a cell, or None; also where it would
    have to look at values, which are not there, or where its own code fails. Then it is asked in
    the run: foreseen(ModelVariants(outline_model("cifar_vit"), META), cell)."""
    if (refusal := refused_by_network(cell, variants.model)) is not None:
        return refusal
    if isinstance(cell.attacker, Control):
        return None
    if (refusal := refused_by_setting(cell)) is not None:
        return refusal
    client = cell.client
    model = variants.of(cell.victim, cell.dtype, client.positions, client.adapters)
    parameters = dict(model.named_parameters())
    trainer = FedSGDClient(model, client)
    try:
        needed = [name for name in cell.attacker.needs(model) if name in parameters]
        sent = {
            name: torch.empty(1, *parameters[name].shape, dtype=model.like.dtype, device=META)
            for name in trainer.wanted(needed)
        }
    except Exception:  # an attack of anybody's
        return None
    updates = [trainer.described(sent)] * cell.uploads
    labels = torch.zeros(updates[0].batch, dtype=torch.long)
    against = SETTINGS[cell.setting].against
    view = view_of(updates, [model] * len(updates), labels, against)
    try:
        return cell.attacker.unsupported(view)
    except Exception:  # on a tensor without values errors are of any class
        return None


def lacking(series: Sequence[Series], attack: Attack, model: LoadedModel) -> Refusal | None:
    """Why recorded uploads do not suit the attack: another block 0, or too few of them; or None."""
    if (refusal := refused_by_block(model, attack)) is not None:
        return refusal
    fewest = min(len(each.uploads) for each in series)
    if fewest < attack.uploads:
        are = "is" if fewest == 1 else "are"
        text = f"it needs {attack.uploads} uploads of the same images; {fewest} {are} recorded"
        return Refusal("uploads", text)
    return None
