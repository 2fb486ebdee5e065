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
from mjp_privacy.client.defenses.disturbance import Disturbed, Draws, added, per_step
from mjp_privacy.client.defenses.registry import StepDefense, UploadDefense, defense_of
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.local_training import LocalTraining, clients_at_once, noise_gain
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.vit import copied


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
    assert len(inputs) == client.steps, "a client takes one input for each local step"
    trainer = FedSGDClient(model, client)
    if client.defenses or not client.one_plain_step:
        update = _defended(trainer, inputs, trainer.wanted(names), round, seed)
    else:
        update = trainer.update(inputs[0], names=names)
    weights = weights_of(model) if client.server_lr else None
    update = replace(update, round=round, weights_before=weights, partners=client.partners)
    return noisy(update, client.position_noise, inputs[0].image_ids, seed=seed)


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
    unknown = list(_joined([part.unknown for part in parts], names).values())
    return trainer.described(
        _joined([part.sent for part in parts], names),
        noise=_joined([part.noise for part in parts], names),
        rounding=_joined([part.rounding for part in parts], names),
        undeclared=torch.stack(unknown).any(0).cpu() if client.defenses and unknown else None,
    )


def _upload(
    trainer: FedSGDClient, inputs: Sequence[ClientInput], round: int, seed: int
) -> Disturbed:
    """Whole uploads of a few clients: training, then the defences in their order.

    `unknown` is, for every parameter, what any of them left undeclared.
    """
    client = trainer.config
    defenses = [defense_of(text) for text in client.defenses]
    step_defense = next((item for item in defenses if isinstance(item, StepDefense)), None)
    training = LocalTraining(trainer, step_defense, seed, round)
    plain = client.upload == "gradient"
    sent = training.gradient(inputs[0]) if plain else training.difference(inputs)
    state = _with_noise_of_steps(sent, step_defense, client)
    for place, defense in enumerate(defenses):
        if isinstance(defense, UploadDefense):
            purpose = f"{defense.name} {place}"
            first_ids = inputs[0].image_ids[:: client.batch]
            draws = Draws(seed, first_ids, round, purpose, client.steps)
            altered = defense.apply(state.sent, draws)
            silent = altered.undeclared(state.sent)
            state = Disturbed(
                altered.sent,
                added(state.noise, altered.noise),
                added(state.rounding, altered.rounding),
                {name: state.unknown[name] | silent[name] for name in silent},
            )
    return state


def _with_noise_of_steps(
    sent: dict[str, Tensor], defense: StepDefense | None, client: ClientConfig
) -> Disturbed:
    """The upload with what is known of the noise inside its steps, whose size is not known for
    AdamW: it divides the noise by numbers that stay with the client."""
    level = 0.0 if defense is None else defense.deviation(client.batch)
    known = client.optimizer == "sgd"
    if client.upload == "weight_difference":
        level *= noise_gain(client.steps, client.momentum, client.lr)
    noise, unknown = {}, {}
    for name, g in sent.items():
        unknown[name] = torch.full((len(g),), bool(level) and not known, device=g.device)
        if level and known:
            noise[name] = torch.full((len(g),), level, dtype=torch.float64, device=g.device)
    return Disturbed(sent, noise, unknown=unknown)


def _joined(parts: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
    return {n: torch.cat([part[n] for part in parts]) for n in names if n in parts[0]}


def weights_of(model: LoadedModel) -> Mapping[str, Tensor]:
    """The model's parameters by name; they share its memory."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


TABLE = "pos_embed"


def with_sinusoidal_positions(model: LoadedModel) -> LoadedModel:
    """A copy of the model with sines and cosines of row and column as its position table.

    The class token's row is zero.
    """
    if model.position_embedding != "learned":
        raise UserError(
            "client.positions: sinusoidal replaces a learned position table, but this model's is "
            f"{model.position_embedding}. Set positions: own, or use another model."
        )
    altered = copied(model)
    patches = sinusoidal_table(model.grid, model.embed_dim)
    with torch.no_grad():
        altered.table.zero_()
        altered.table[0, 1:] = patches.to(altered.table)
    return altered


def sinusoidal_table(grid: Grid, width: int) -> Tensor:
    """(N, D) float64: sin and cos of row and of column, D/4 frequencies each, from 1 to 1e-4."""
    if width % 4:
        raise UserError(
            "client.positions: sinusoidal needs an embedding width divisible by 4, got "
            f"{width}: sine and cosine of row and column take a quarter each. Set positions: own."
        )
    frequencies = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    index = torch.arange(grid.patches)
    places = index // grid.columns, index % grid.columns
    angles = [place[:, None] * frequencies for place in places]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=-1)


def noisy(
    update: ClientUpdate, relative: float, image_ids: Sequence[str], *, seed: int
) -> ClientUpdate:
    """The update with Gaussian noise on every row of its gradient of the position table.

    The noise of a step has `relative` times the root mean square of the gradient's nonzero
    entries; it is drawn for (seed, the step's first image, round).
    """
    if not relative or TABLE not in update.grads:
        return update
    gradient = update.grads[TABLE]
    nonzero = (gradient != 0).flatten(1).sum(-1).clamp(min=1)
    scale = relative * (gradient.square().flatten(1).sum(-1) / nonzero).sqrt()
    noise = torch.stack(
        [
            torch.randn(
                gradient.shape[1:],
                generator=torch_generator("position noise", seed, first, update.round),
                dtype=torch.float64,
            )
            for first in image_ids[:: update.batch]
        ]
    )
    sent = {**update.grads, TABLE: gradient + per_step(scale, gradient) * noise.to(gradient)}
    return replace(update, grads=sent, position_noise=relative)
