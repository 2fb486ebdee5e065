"""Makes a client's upload: train, apply the defences, and state what is public about it.

    gradient or local steps -> defences, in their order -> only the parameters asked for

Withheld parameters are left out from the start. Defences see all others, because a clip norm or
a set of largest entries concerns the whole upload; parameters that nobody asked for are dropped
at the end. And what an upload shows by itself: a single image's class, its client's half precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig, local_round
from mjp_privacy.client.defenses.disturbance import Disturbed, Draws, added, per_step
from mjp_privacy.client.defenses.registry import StepDefense, UploadDefense, defense_of
from mjp_privacy.client.gradients import HALF, FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.vit import copied

PATCH, TABLE = "patch_embed.proj.weight", "pos_embed"
HEAD, HEAD_BIAS = "head.weight", "head.bias"
Autocast = Literal["none", "fp16", "bf16"]


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
    wanted, total = trainer.wanted(names), len(inputs[0].image_ids)
    trained, at_once = wanted, total
    if client.defenses or not client.one_plain_step:  # whole uploads, of a few clients at a time
        trained = trainer.wanted(None)
        size = sum(p.numel() for p in model.parameters()) * client.batch
        at_once = client.batch * max(1, MOST_NUMBERS // size)
    parts = [
        _upload(
            trainer, [s.part(slice(start, start + at_once)) for s in inputs], trained, round, seed
        )
        for start in range(0, total, at_once)
    ]
    unknown = list(_joined([part.unknown for part in parts], wanted).values())
    update = trainer.described(
        _joined([part.sent for part in parts], wanted),
        noise=_joined([part.noise for part in parts], wanted),
        rounding=_joined([part.rounding for part in parts], wanted),
        undeclared=torch.stack(unknown).any(0).cpu() if client.defenses and unknown else None,
        round=round,
    )
    return noisy(update, client.position_noise, inputs[0].image_ids, seed=seed)


def _upload(
    trainer: FedSGDClient,
    inputs: Sequence[ClientInput],
    names: Sequence[str],
    round: int,
    seed: int,
) -> Disturbed:
    """Uploads of a few clients, of these parameters: training, then the defences in their order.

    `unknown` is, for every parameter, what any of them left undeclared.
    """
    client = trainer.config
    defenses = [defense_of(text) for text in client.defenses]
    step_defense = next((item for item in defenses if isinstance(item, StepDefense)), None)
    training = LocalTraining(trainer, names, step_defense, seed, round)
    plain = client.upload == "gradient"
    sent = training.gradient(inputs[0]) if plain else training.difference(inputs)
    # The noise inside steps is of unknown size for AdamW, which divides it by what it keeps.
    level = 0.0 if step_defense is None else step_defense.deviation(client.batch)
    known = client.optimizer == "sgd"
    if client.upload == "weight_difference":
        level *= noise_gain(client.steps, client.momentum, client.lr)
    noise, unknown = {}, {}
    for name, g in sent.items():
        unknown[name] = torch.full((len(g),), bool(level) and not known, device=g.device)
        if level and known:
            noise[name] = torch.full((len(g),), level, dtype=torch.float64, device=g.device)
    state = Disturbed(sent, noise, unknown=unknown)
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


def _joined(parts: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
    if len(parts) == 1:  # not copied: whole uploads are large
        return {name: parts[0][name] for name in names if name in parts[0]}
    return {name: torch.cat([part[name] for part in parts]) for name in names if name in parts[0]}


def weights_of(model: LoadedModel) -> Mapping[str, Tensor]:
    """The model's parameters by name; they share its memory."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# ------------------------------------------------------------------------------------------------
# What a client computes: the gradient of one step, or several local steps, for many at once.
# If it has a `StepDefense`, that works inside every step. The optimisers are equal to torch's:
#
#     sgd     v <- mu v + (g + wd w),  w <- w - lr v,  v = g + wd w in the first step
#     adamw   w <- (1 - lr wd) w - lr m^ / (sqrt(v^) + eps)
#
# Velocity and moments start at zero in every upload.

Weights = Mapping[str, Tensor]
"""Weights by parameter name, (n, *shape): every client has its own."""

MOST_NUMBERS = 2**27
"""Of the gradients of clients that are computed together. Each example counts as a whole gradient,
which is what clipping keeps in memory."""


@dataclass(frozen=True)
class LocalTraining:
    """What n clients compute, of some parameters, before defences change the whole upload."""

    client: FedSGDClient
    names: Sequence[str]
    defense: StepDefense | None
    seed: int
    round: int

    def difference(self, inputs: Sequence[ClientInput]) -> dict[str, Tensor]:
        """w_E - w_0 after one step for each of the inputs, in the precision of the weights: little
        is left of a step that is small beside them."""
        optimizer = OPTIMIZERS[self.client.config.optimizer](self.client.config)
        count = len(inputs[0].image_ids) // self.client.config.batch
        start = {name: self.client.model.get_parameter(name).detach() for name in self.names}
        weights = {name: w.expand(count, *w.shape) for name, w in start.items()}
        for number, step in enumerate(inputs):
            grads = self.gradient(step, weights if number else None, number)
            weights = {n: optimizer.step(n, weights[n], grads[n]) for n in self.names}
        return {name: weights[name] - start[name] for name in self.names}

    def gradient(
        self, inputs: ClientInput, weights: Weights | None = None, number: int = 0
    ) -> dict[str, Tensor]:
        """The gradient (n, *shape) of local step `number`; weights None: the model's, shared by all
        clients."""
        client, batch = self.client, self.client.config.batch
        if self.defense is not None:  # which asks for the gradient of each example
            client = replace(client, config=replace(client.config, batch=1))
            if weights is not None:
                weights = {name: w.repeat_interleave(batch, 0) for name, w in weights.items()}
        if weights is None:
            plain = client.gradients(inputs, names=self.names)
        else:
            with client.differentiating():
                plain = client.step_gradients(weights, client.steps(inputs), own_weights=True)
        if self.defense is None:
            return plain
        examples = {name: g.unflatten(0, (-1, batch)) for name, g in plain.items()}
        round = local_round(self.round, number)
        draws = Draws(self.seed, inputs.image_ids[::batch], round, self.defense.name)
        return self.defense.step_gradient(examples, draws)


BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's defaults


class Sgd:
    """SGD with momentum and weight decay, as torch.optim.SGD."""

    def __init__(self, client: ClientConfig) -> None:
        self.client = client
        self.velocity: dict[str, Tensor] = {}

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        velocity = gradient + self.client.weight_decay * weight
        if self.client.momentum:
            if name in self.velocity:
                velocity = self.client.momentum * self.velocity[name] + velocity
            self.velocity[name] = velocity
        return weight - self.client.lr * velocity


class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW."""

    def __init__(self, client: ClientConfig) -> None:
        self.client = client
        self.state: dict[str, tuple[int, Tensor, Tensor]] = {}

    def step(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        zero = torch.zeros_like(gradient)
        count, first, second = self.state.get(name, (0, zero, zero))
        beta1, beta2 = BETAS
        count += 1
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        self.state[name] = (count, first, second)
        scale = (second / (1 - beta2**count)).sqrt() + EPSILON
        decayed = weight * (1 - self.client.lr * self.client.weight_decay)
        return decayed - self.client.lr * (first / (1 - beta1**count)) / scale


OPTIMIZERS: Mapping[str, type[Sgd | AdamW]] = {"sgd": Sgd, "adamw": AdamW}


def shares_of_steps(steps: int, momentum: float) -> list[float]:
    """The weight c_e of each step's gradient in SGD's w_E - w_0 = -lr sum_e c_e g_e, without decay:
    c_e = 1 + mu + ... + mu^(E - e - 1).

    shares_of_steps(2, 0.5) is [1.5, 1.0].
    """
    return [sum(momentum**power for power in range(steps - e)) for e in range(steps)]


def noise_gain(steps: int, momentum: float, lr: float) -> float:
    """Standard deviation of w_E - w_0 if independent noise of deviation 1 is on every gradient."""
    return lr * math.sqrt(sum(share**2 for share in shares_of_steps(steps, momentum)))


# ------------------------------------------------------------------------------------------------
# What a client does to its position table.


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


# ------------------------------------------------------------------------------------------------
# What an upload shows by itself. With cross entropy, dL/dlogits = softmax - onehot: negative for
# the image's class alone. It is the gradient of the classifier's bias, and the rows of its weight's
# gradient are multiples of it (iDLG, Zhao et al. 2020).

FITS = 1e-2  # how far a class's row may be from minus the sum of all others, relative to it


def label_in_gradient(grads: Mapping[str, Tensor]) -> Tensor | None:
    """(n,) classes of n single images from the gradients (n, *shape) of the classifier, or None.

    label_in_gradient({"head.bias": torch.tensor([[0.2, -0.9, 0.7]])}) is tensor([1]).
    """
    if HEAD_BIAS in grads:
        errors = grads[HEAD_BIAS]
        if HEAD in grads:  # of rows e_k h; e_k |h|^2 (e . e), which averages noise over h
            rows, bias = grads[HEAD].double(), errors.double().unsqueeze(-1)
            weighed = (rows @ (rows.mT @ bias)).squeeze(-1)
            errors = torch.where(weighed.any(-1, keepdim=True), weighed, errors)
        return errors.argmin(-1)
    # The class's row of (n, K, D) is as long as all others together, which point the other way; no
    # row is with two classes or with a loss over something else.
    if HEAD not in grads or grads[HEAD].shape[1] <= 2:
        return None
    rows = grads[HEAD].double()
    label = rows.norm(dim=-1).argmax(-1)
    own = rows.take_along_dim(label.view(-1, 1, 1), 1).squeeze(1)
    fits = rows.sum(1).norm(dim=-1) <= FITS * own.norm(dim=-1)
    return label if bool(fits.all()) else None


def labels_of_batch(bias: Tensor, batch: int) -> Tensor:
    """The classes (B,) of a batch, from the gradient (K,) of the classifier's bias: the mean of
    softmax - onehot over its images.

    Only classes of the batch are negative. What an image adds is -1 / B and its softmax, so further
    images of a class are where it is most negative yet.

    labels_of_batch(torch.tensor([0.1, -0.4, 0.3]), 1) is tensor([1]).
    """
    left, found = bias.double().clone(), list[int]()
    for certain in bias.argsort()[:batch].tolist():
        if bias[certain] < 0:
            found.append(certain)
            left[certain] += 1 / batch
    while len(found) < batch:
        most = int(left.argmin())
        found.append(most)
        left[most] += 1 / batch
    return torch.tensor(found)


def shown_autocast(grads: Mapping[str, Tensor]) -> Autocast:
    """Which autocast the gradients (n, *shape) of one upload show: none, fp16 or bf16.

    Under autocast the patch embedding's gradient has few enough bits for half precision, and the
    position table's has not. Where both have, the whole upload was rounded afterwards.
    """
    if not {PATCH, TABLE} <= grads.keys():
        return "none"
    for kind in ("bf16", "fp16"):
        if _fits(grads[PATCH], HALF[kind]) and not _fits(grads[TABLE], HALF[kind]):
            return kind
    return "none"


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether there are values besides zero and all have as few bits as this precision."""
    return bool(values.any()) and bool((rounded(values, dtype) == values).all())


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, float64, with as many bits as `dtype` has, whatever their exponents."""
    step = spacing(values, dtype)
    return torch.where(step > 0, (values.double() / step).round() * step, 0.0)


def spacing(values: Tensor, dtype: torch.dtype, least: float = 0.0) -> Tensor:
    """The distance from each value to the next number with as many bits as `dtype` has, float64; 0
    for zero. Numbers below `least` are as far apart as those from there; 0: exponents have no end,
    as those of scaled gradients."""
    size = values.double().abs()
    power = 2.0 ** (torch.frexp(size).exponent.double() - 1)
    return torch.where(size == 0, 0.0, torch.finfo(dtype).eps * power.clamp(min=least))
