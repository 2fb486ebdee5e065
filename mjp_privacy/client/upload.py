"""Makes a client's upload: train, apply the defences, and state what is public about it.

    gradient or local steps -> defences, in their order -> only the parameters asked for

Withheld parameters are left out from the start. Defences see all others, because a clip norm or
a set of largest entries concerns the whole upload; parameters that nobody asked for are dropped
at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.disturbance import Disturbed, Draws, added
from mjp_privacy.client.defenses.registry import StepDefense, UploadDefense, defense_of
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.local_training import LocalTraining, clients_at_once
from mjp_privacy.client.optimizers import noise_gain
from mjp_privacy.client.positions import noisy
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel


def make_upload(
    model: LoadedModel,
    inputs: Sequence[ClientInput],
    client: ClientConfig,
    *,
    names: Sequence[str] | None = None,
    round: int = 0,
    seed: int = 0,
) -> ClientUpdate:
    """What n independent clients upload in one round, as one update with a leading axis n.

    inputs: one for each local step, all of the same m = n * client.batch images.
    names: the parameters wanted; None for all.

    `make_upload(model, [inputs], ClientConfig(batch=4), names=["pos_embed"])`.
    """
    _check_inputs(inputs, client)
    trainer = FedSGDClient(model, client)
    if client.defenses or not client.one_plain_step:
        update = _defended(trainer, inputs, trainer.wanted(names), round, seed)
    else:
        update = trainer.update(inputs[0], names=names)
    weights = weights_of(model) if client.server_lr else None
    update = replace(update, round=round, weights_before=weights)
    return noisy(update, client.position_noise, inputs[0].image_ids, seed=seed)


def _check_inputs(inputs: Sequence[ClientInput], client: ClientConfig) -> None:
    if len(inputs) != client.steps:
        raise UserError(
            f"An upload of {client.steps} local steps (client.steps) needs an input for each, got "
            f"{len(inputs)}. Give one input for each step."
        )
    if any(tuple(step.image_ids) != tuple(inputs[0].image_ids) for step in inputs):
        raise UserError(
            "The inputs of a client's local steps hold different images: expected the same images "
            "in the same order, because a client trains on its own images in every step."
        )


def _defended(
    trainer: FedSGDClient,
    inputs: Sequence[ClientInput],
    names: Sequence[str],
    round: int,
    seed: int,
) -> ClientUpdate:
    """Uploads made for a few clients at a time, since whole uploads are large: only the wanted
    parameters of each are kept."""
    client, total = trainer.config, len(inputs[0].image_ids)
    at_once = client.batch * clients_at_once(trainer.model, client.batch)
    parts = [
        _upload(trainer, [s.part(slice(start, start + at_once)) for s in inputs], round, seed)
        for start in range(0, total, at_once)
    ]
    differs = client.upload == "weight_difference"
    return ClientUpdate(
        _joined([part.sent for part in parts], names),
        kind=client.upload,
        dtype=trainer.model.cls_token.dtype,
        batch=client.batch,
        optimizer=client.optimizer,
        lr=client.lr if differs else None,
        steps=client.steps,
        weight_decay=client.weight_decay if differs else 0.0,
        momentum=client.momentum,
        dal_lambda=client.dal_lambda if trainer.localizes else 0.0,
        noise=_joined([part.noise for part in parts], names),
        rounding=_joined([part.rounding for part in parts], names),
        clipped=client.clips,
    )


def _upload(
    trainer: FedSGDClient, inputs: Sequence[ClientInput], round: int, seed: int
) -> Disturbed:
    """Whole uploads of a few clients: training, then the defences in their order."""
    client = trainer.config
    defenses = [defense_of(text) for text in client.defenses]
    step_defense = next((item for item in defenses if isinstance(item, StepDefense)), None)
    training = LocalTraining(trainer, step_defense, seed, round)
    if client.upload == "gradient":
        state = Disturbed(training.gradient(inputs[0]))
    else:
        state = Disturbed(training.difference(inputs))
    if step_defense is not None:
        state = replace(state, noise=_noise_of_steps(step_defense, client, state.sent))
    for place, defense in enumerate(defenses):
        if isinstance(defense, UploadDefense):
            purpose = f"{defense.name} {place}"
            draws = Draws(seed, inputs[0].image_ids[:: client.batch], round, purpose)
            altered = defense.apply(state.sent, draws)
            noise = added(state.noise, altered.noise)
            state = Disturbed(altered.sent, noise, added(state.rounding, altered.rounding))
    return state


def _noise_of_steps(
    defense: StepDefense, client: ClientConfig, sent: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The standard deviation that noise inside the steps has in the upload, by parameter.

    Empty for AdamW, which divides the noise by numbers that stay with the client.
    """
    level = defense.deviation(client.batch)
    if not level or client.optimizer != "sgd":
        return {}
    if client.upload == "weight_difference":
        level *= noise_gain(client.steps, client.momentum, client.lr)
    return {
        name: torch.full((len(g),), level, dtype=torch.float64, device=g.device)
        for name, g in sent.items()
    }


def _joined(parts: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
    return {n: torch.cat([part[n] for part in parts]) for n in names if n in parts[0]}


def weights_of(model: LoadedModel) -> Mapping[str, Tensor]:
    """The model's parameters by name; they share its memory."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
