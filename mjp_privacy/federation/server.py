"""The server: uploads averaged with their numbers of images as weights, then an optimiser's step.

    g = sum_k n_k g_k / sum_k n_k,     w <- w - lr * step(g) - lr * decay * w

A weight difference d counts as g = -d, so plain SGD with lr 1 on differences is FedAvg, and Adam
on either is FedAdam. Parameters that no client uploads stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.config import Server
from mjp_privacy.interfaces import ClientUpdate

Weights = dict[str, Tensor]
BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class ServerState:
    """Adam's moments; empty before the first step and with plain SGD."""

    step: int = 0
    first: Mapping[str, Tensor] = field(default_factory=dict)
    second: Mapping[str, Tensor] = field(default_factory=dict)


def mean_gradient(uploads: Iterable[tuple[ClientUpdate, int]]) -> Weights:
    """The mean of the uploads by parameter name, weighted by images.

    uploads: each with its number of images; only one is in memory at a time.
    """
    total, mean, first = 0, dict[str, Tensor](), None
    for update, images in uploads:
        kind = (update.kind, tuple(sorted(update.grads)))
        first = first or kind
        if kind != first:
            raise UserError(
                "The clients of a round sent uploads of different kinds or parameters. Expected "
                "the same kind (gradient or weight_difference) and the same names from each."
            )
        weight = images if update.kind == "gradient" else -images
        for name, gradient in update.grads.items():
            part = gradient[0] * weight
            mean[name] = mean[name].add_(part) if name in mean else part
        total += images
    if not total:
        raise UserError("No client sent an upload in this round: expected at least one.")
    return {name: tensor.div_(total) for name, tensor in mean.items()}


def learning_rate(server: Server, round: int, rounds: int) -> float:
    """Linear warm-up, then constant or half a cosine to zero; the cosine counts from round 0."""
    if round < server.warmup:
        return server.lr * (round + 1) / server.warmup
    if server.schedule == "constant":
        return server.lr
    return server.lr * (1 + math.cos(math.pi * round / rounds)) / 2


def server_step(
    server: Server,
    weights: Mapping[str, Tensor],
    state: ServerState,
    uploads: Iterable[tuple[ClientUpdate, int]],
    *,
    round: int,
    rounds: int,
) -> tuple[Weights, ServerState]:
    """The weights and the optimiser's state after a round.

    Nothing is changed in place; weights that no client uploaded are passed on as they are.
    """
    mean = mean_gradient(uploads)
    rate = learning_rate(server, round, rounds)
    if server.optimizer == "adam":
        state = _moments(state, mean)
    moved = dict(weights)
    for name, gradient in mean.items():
        step = gradient if server.optimizer == "sgd" else _adam(state, name)
        moved[name] = weights[name] - rate * (step + server.weight_decay * weights[name])
    return moved, state


def _moments(state: ServerState, mean: Mapping[str, Tensor]) -> ServerState:
    first, second = dict(state.first), dict(state.second)
    for name, g in mean.items():
        zero = torch.zeros_like(g)
        first[name] = BETAS[0] * first.get(name, zero) + (1 - BETAS[0]) * g
        second[name] = BETAS[1] * second.get(name, zero) + (1 - BETAS[1]) * g.square()
    return ServerState(state.step + 1, first, second)


def _adam(state: ServerState, name: str) -> Tensor:
    first = state.first[name] / (1 - BETAS[0] ** state.step)
    second = state.second[name] / (1 - BETAS[1] ** state.step)
    return first / (second.sqrt() + EPSILON)
