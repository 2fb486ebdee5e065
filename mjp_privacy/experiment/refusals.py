"""Why there is nothing to attack or to score, before an attack is asked; and what each attack of a
run will answer, before there are uploads.

For the latter (`foreseen`) an attack is asked by its own `unsupported`, with the view that it will
get in the run, but of tensors on torch's meta device: what is said before a run is what its rows
say after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from attacks import lacks_parts, traits_of
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.traces import HEAD, HEAD_BIAS
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.source import META, ModelVariants, Names
from mjp_privacy.interfaces import (
    Attack,
    AttackerView,
    ClientUpdate,
    Control,
    Pixels,
    Refusal,
)
from mjp_privacy.models import LoadedModel, MJPVisionTransformer
from mjp_privacy.uploads.folder import Series
from mjp_privacy.uploads.record import Upload, stacked

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


# before a run -------------------------------------------------------------------------------------


def foreseen(variants: ModelVariants, cell: Cell, names: Names) -> Refusal | None:
    """Why the attack does not apply to simulated clients of a cell, or None:
    foreseen(ModelVariants(outline_model("cifar_vit"), META), cell, cell.attacker.needs)."""
    if (refusal := refused_by_network(cell, variants.model)) is not None:
        return refusal
    if not cell.uploads:
        return None
    if (refusal := refused_by_setting(cell)) is not None:
        return refusal
    client = cell.client
    model = variants.of(cell.victim, cell.dtype, client.positions, client.adapters)
    trainer = FedSGDClient(model, client)
    further = {"partners": client.partners, "position_noise": client.position_noise}

    def uploads(needed: Sequence[str]) -> Sequence[ClientUpdate]:
        update = trainer.described(_empty(model, trainer.wanted(needed)), **further)
        return [update] * cell.uploads

    return _asked(cell, model, names, uploads, labelled=True)


def foreseen_of_series(
    series: Sequence[Series],
    outline: LoadedModel,
    cell: Cell,
    names: Names,
    sent_by: Callable[[Upload], Set[str]],
) -> Refusal | None:
    """Why the attack does not apply to recorded uploads, or None.

    sent_by: the names of an upload's tensors
    """
    assert not isinstance(cell.attacker, Control)
    if refusal := lacking(series, cell.attacker, outline) or refused_by_setting(cell):
        return refusal

    def uploads(needed: Sequence[str]) -> Sequence[ClientUpdate]:
        updates = []
        for number in range(cell.uploads):
            of_round = [each.uploads[number] for each in series]
            sent = [name for name in needed if all(name in sent_by(each) for each in of_round)]
            updates.append(replace(stacked(of_round[:1], [], META), grads=_empty(outline, sent)))
        return updates

    labelled = all(
        first.header.labels is not None
        # or readable off the classifier's gradient
        or (first.header.batch == 1 and not sent_by(first).isdisjoint((HEAD, HEAD_BIAS)))
        for first in (each.first for each in series)
    )
    return _asked(cell, outline, names, uploads, labelled=labelled)


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


def _empty(model: LoadedModel, names: Sequence[str]) -> dict[str, Tensor]:
    """Gradients of one step (1, *shape) without values."""
    parameters = dict(model.named_parameters())
    return {
        name: torch.empty(1, *parameters[name].shape, dtype=parameters[name].dtype, device=META)
        for name in names
    }


def _asked(
    cell: Cell,
    model: LoadedModel,
    names: Names,
    uploads: Callable[[Sequence[str]], Sequence[ClientUpdate]],
    *,
    labelled: bool,
) -> Refusal | None:
    """What the attack answers of the uploads of those parameters that the model has; None where it
    would have to look at values, which are not there, or where its own code fails.

    Then it is asked in the run, with uploads that have values.
    """
    assert not isinstance(cell.attacker, Control)
    known = {name for name, _ in model.named_parameters()}
    try:
        needed = [name for name in names(model) if name in known]
    except Exception:  # an attack of anybody's
        return None
    updates = uploads(needed)
    card, batch = model.card, updates[0].batch
    labels = torch.zeros(batch, dtype=torch.long) if labelled else None
    pixels = Pixels(card.img_size, card.mean, card.std)
    view = AttackerView(model, updates, pixels, labels, SETTINGS[cell.setting].against)
    try:
        return cell.attacker.unsupported(view)
    except Exception:  # on a tensor without values errors are of any class
        return None
