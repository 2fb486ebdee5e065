r"""Gradients as they were sent: from weights, rounded by autocast.

**Weights that a client sends back.** SGD, E steps, momentum mu:

    d = w_E - w_0 = -lr sum_e c_e g_e,    c_e = 1 + mu + ... + mu^(E-e-1),
    g ~ -d / (lr sum_e c_e),

exact for one step, otherwise the weighted mean of the steps' gradients at weights that moved. With
weight decay w_E = a w_0 + b g, of the steps' own recursion in (a, b): g ~ ((a - 1) w_0 - d) / -b.
AdamW's first step sends u = -(d + lr decay w) / lr = g / (|g| + eps): g = eps u / (1 - |u|) where
the weights' precision resolves 1 - |u|, and a constant times the sign where it does not. Later
steps divide by a running scale that the attacker is not told.

**Weight decay that nobody declared**, or of some tensors alone, leaves l w in a gradient.
LayerNorms take out a token's mean, so that gradients of what is added to tokens sum up to 0 over
their width, and these sums are l times those of w.

**Autocast.** Tokens and the position table are float32, products of matrices in half precision. So
dL/dz_i passes through a rounding h on its way back to the patch embedding, and the patches do too:

    row i of pos_embed.grad = g_i in float32,
    patch_embed.proj.weight.grad = h(sum_i h(g_i) h(x_i)^T).

Of one picture and one step the rows h(g_i) are known exactly: the sent rows, rounded. What is left
is the last rounding of the sum, whose size shows in the sum itself, and h(x).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from attacks.equations import PATCH, PATCH_BIAS, TABLE, UNKNOWN
from mjp_privacy.client.gradients import HALF, TABLES
from mjp_privacy.client.upload import EPSILON, rounded, shares_of_steps, spacing
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientUpdate, Refusal

State = Mapping[str, Tensor]
Rounding = TypeVar("Rounding", float, Tensor)


INVERTED = ("sgd", "adamw")
"""Optimisers whose weight differences can be turned back into gradients."""


def holds_no_gradient(update: ClientUpdate) -> Refusal | None:
    """Why no gradient can be computed from an upload, or None."""
    why = ""
    if update.kind == "gradient":
        return None
    if not update.lr:
        why = " with an unknown learning rate"
    elif update.optimizer not in INVERTED:
        why = f" of {update.optimizer}, which holds no gradient"
    elif update.optimizer == "adamw" and update.steps > 1:
        why = (
            f" of {update.steps} AdamW steps, each entry divided by its own running scale, which "
            "holds no gradient"
        )
    text = f"the upload is a weight difference{why}"
    return Refusal("weight_difference", text) if why else None


def pseudo_gradient(update: ClientUpdate, sent: Tensor, state: State, name: str) -> Tensor:
    """The gradient of one parameter (n, *shape), float64, from the difference `sent`.

    `state` holds the weights before the client's steps, by name.
    """
    if math.isinf(1 / effective_rate(update)):
        raise UserError(
            f"lr={update.lr:g}: expected the learning rate of the client that sent the difference "
            "of its weights; divided by this one, no difference is a number."
        )
    if update.optimizer == "sgd":
        kept = decayed_by(update)[0] if update.weight_decay else 1.0
        return ((kept - 1) * state[name].double() - sent) / effective_rate(update)
    assert update.lr
    shown = -sent / update.lr - update.weight_decay * state[name].double()
    coarsest = max(float(weight.abs().max()) for weight in state.values())
    resolved = torch.finfo(update.dtype).eps * coarsest / update.lr
    # One resolution for all parameters, so that entries cut by it have the same scale.
    return EPSILON * shown / (1 - shown.abs()).clamp_min(resolved)


def weight_rounding(update: ClientUpdate, step: Rounding) -> Rounding:
    """The error of a pseudo-gradient near zero if weights are rounded to multiples of `step`: there
    AdamW's u is g / eps."""
    assert update.lr
    return (step if update.optimizer == "sgd" else EPSILON * step) / update.lr


def effective_rate(update: ClientUpdate) -> float:
    """-b: how far weights move per unit of a gradient that is the same in every step."""
    assert update.lr
    if update.weight_decay and update.optimizer == "sgd":
        return -decayed_by(update)[1]
    return update.lr * sum(shares_of_steps(update.steps, update.momentum))


def decayed_by(update: ClientUpdate) -> tuple[float, float]:
    """a and b in w_E = a w_0 + b g, after SGD's steps with weight decay and one gradient g."""
    assert update.lr
    (a, b), (of_weights, of_gradient) = (1.0, 0.0), (0.0, 0.0)  # the latter two of the velocity
    for _ in range(update.steps):
        of_weights = update.momentum * of_weights + update.weight_decay * a
        of_gradient = update.momentum * of_gradient + update.weight_decay * b + 1
        a, b = a - update.lr * of_weights, b - update.lr * of_gradient
    return a, b


ADDED = (TABLE, PATCH, PATCH_BIAS, "attn.proj.bias", "mlp.fc2.bias")  # what is added to tokens
MULTIPLE = 0.05  # share of the sums that may be no multiple of the weights'
ROUNDED, ABOVE = 1e3, 100.0
"""Times what the last digit is worth that sums may be which are 0, and that a multiple must be."""
BEYOND = 10.0
"""Times what many sums leave that a multiple in the few of biases must be: they are not quite 0
where a branch is not given what a norm makes of tokens, and one sum is a multiple of any weight."""


def less_undeclared_decay(update: ClientUpdate, state: State) -> tuple[ClientUpdate, list[float]]:
    """The update as if all weights had decayed as is declared, and the l of those that did not:
    embeddings of places, tensors of one axis, all others. Nothing is changed where the patch
    embedding's many sums, or the table's, are neither 0 nor multiples: no norms make them 0.

    state  the weights before the client's steps, by name
    """
    difference = update.kind == "weight_difference"
    if difference and (update.optimizer != "sgd" or not update.lr):
        return update, []
    rate = effective_rate(update) if difference else -1.0

    def multiple(names: Sequence[str]) -> tuple[float, float, float, float]:
        """The l in the sums of these tensors over the width, how long its part is, what is left,
        and what the last digits are worth."""
        found = []
        for name in names:
            own, sent = state[name].double(), update.grads[name].double()
            sent = pseudo_gradient(update, sent, state, name) if difference else sent
            axis, own = (-1 if name == TABLE else 1), own.expand_as(sent)
            rounded = sent.square() + (own / rate).square() * difference
            noise = torch.finfo(update.dtype).eps * rounded.sum(axis).sqrt()
            found.append(torch.stack([x.flatten() for x in (sent.sum(axis), own.sum(axis), noise)]))
        shown, own, noise = torch.cat(found, 1)
        times = float(shown @ own / own.square().sum().clamp_min(1e-300))
        rest = float((shown - times * own).norm())
        return times, float((times * own).norm()), rest, float(noise.norm())

    grads, found = dict(update.grads), list[float]()
    sizes = {name: sent.shape[1:] for name, sent in grads.items()}
    known = [n for n in grads if n in state and state[n].numel() == sizes[n].numel()]
    state = {name: state[name].reshape(sizes[name]) for name in known}
    many = [name for name in (PATCH, TABLE) if name in known][:1]
    _, long, left, worth = multiple(many) if many else (0.0, 0.0, 1.0, 0.0)
    if left >= max(MULTIPLE * long, ROUNDED * worth):
        return update, []
    vectors = [name for name in known if state[name].ndim == 1]
    table = [name for name in known if name in (TABLE, UNKNOWN)]
    for names in (table, vectors, [name for name in known if name not in (*table, *vectors)]):
        told = [name for name in names if name.endswith(ADDED)]
        if not told:
            continue
        times, long, rest, digit = multiple(told)
        is_multiple = rest < MULTIPLE * long and long > ABOVE * digit
        if names is vectors:  # of few sums
            is_multiple = is_multiple and long * worth > BEYOND * left * digit
        if is_multiple:
            found.append(times)
            for name in names:
                grads[name] = (grads[name] + rate * times * state[name].double()).to(grads[name])
    return replace(update, grads=grads), found


# the rounding of autocast -------------------------------------------------------------------------


def multiplied_rows(update: ClientUpdate, rows: Tensor) -> Tensor:
    """The rows (n, N, D) of dL/dz as the client multiplied them with its patches."""
    return rounded(rows, HALF[update.autocast]) if shows_its_rows(update) else rows


def computing_as(update: ClientUpdate, device: torch.device) -> torch.autocast:
    """A `with` block that rounds what the attacker computes as the client rounded it."""
    enabled = update.autocast != "none"
    half = HALF.get(update.autocast, torch.bfloat16)
    return torch.autocast(device.type, half, enabled=enabled)


def shows_its_rows(update: ClientUpdate) -> bool:
    """Whether rounding the uploaded rows gives those that the client multiplied with its patches:
    in one step of one picture by SGD, where no defence or clipping changed the rows since."""
    changed = TABLE in update.noise or TABLE in update.rounding or update.position_noise
    one = update.batch == 1 and update.steps == 1 and update.optimizer == "sgd"
    return update.autocast != "none" and one and not changed and not update.clipped


def autocast_error(update: ClientUpdate, name: str, gradient: Tensor) -> Tensor:
    """(n,) standard deviation of the error that autocast leaves on an entry of a gradient
    (n, *shape) where it stands in an equation, float64.

    It is that of the last rounding, with which each step's gradient of a linear layer ends; tables
    and norms are not rounded, but the rows of dL/dz are before they are multiplied.
    """
    exact = name in TABLES or "norm" in name.rpartition(".")[0]
    if name == TABLE:
        exact = shows_its_rows(update)
    if update.autocast == "none" or exact:
        return torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
    shares = shares_of_steps(update.steps, update.momentum)
    steps = math.sqrt(sum(share**2 for share in shares)) / sum(shares)
    return steps * rounding_error(gradient, HALF[update.autocast])


def rounding_error(values: Tensor, dtype: torch.dtype, least: float = 0.0) -> Tensor:
    """(n,) standard deviation of the rounding of values (n, *shape) to a precision, float64.

    The error of each value is uniform over the distance to the next number; `least` as in
    `spacing`.
    """
    return (spacing(values, dtype, least).flatten(1).square().mean(1) / 12).sqrt()
