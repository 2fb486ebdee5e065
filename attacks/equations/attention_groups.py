r"""Which tokens of a batch are of one picture, as block 0's attention says.

Attention adds up the tokens of one picture. For a token with the query q and the sum o,

    sum_y w_y exp(q . k_y / sqrt(d)) (v_y - o) = 0

is linear in the weights of all tokens y, which are 1 for its own picture's and 0 for others. Where
a table tells places, they sum to 1 at each, and elsewhere over all places to N. Rotary positions
and a relative bias change the exponents by what the places are, which is not yet known: the
weights are nearly right then. Whether the groups are that they form, each token says: its sum lies
among the values of its own group.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attacks.budget import spent
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.live.blocks import queries_keys_values

ROUNDS = 3  # times that a group is told from its members' weights
STARTS, STEPS = 8, 12
"""Groupings from which tokens are assigned, and times that this is done from each."""
HULL = 1e-2  # the mean error at which all tokens are in their groups


def _queries_keys_values_of(
    model: MJPVisionTransformer, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (heads, n, d) of block 0's inputs (n, D), not turned by places."""
    block: Any = model.blocks[0]
    attention = block.attn
    with torch.no_grad():
        given = block.norm1(z)
        made = queries_keys_values(attention)(given)
        biases: list[Any] = [getattr(attention, f"{name}_bias", None) for name in "qkv"]  # BEiT's
        if all(bias is not None for bias in biases):
            made = made + torch.cat(biases).to(made)
        q, k, v = made.view(len(given), 3, attention.num_heads, -1).permute(1, 2, 0, 3)
        q, k = (getattr(attention, f"{a}_norm", nn.Identity())(x) for a, x in (("q", q), ("k", k)))
    return q, k, v


def weights_in_sums(
    model: MJPVisionTransformer, fixed: Tensor, z: Tensor, attended: Tensor, adds_up: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights (m, m) of tokens for all of them in their sums, and what is left of each one's
    equations (m,).

    fixed     (f, D) block 0's inputs that every picture has: class tokens, registers
    z         (m, D) those of the tokens
    attended  (m, D) the tokens' sums
    adds_up   (k, m) what the weights are multiplied by to make 1
    """
    from scipy.optimize import nnls

    q, k, v = _queries_keys_values_of(model, torch.cat((fixed, z)))
    sums = attended.view(len(z), len(v), 1, -1).transpose(0, 1)
    weights, errors = list[Tensor](), list[float]()
    for index in range(len(z)):
        powers = (k @ q[:, len(fixed) + index, :, None])[:, :, 0] * q.shape[-1] ** -0.5
        powers = (powers - powers.amax(1, keepdim=True)).exp()
        columns = (powers[:, :, None] * (v - sums[:, index])).permute(0, 2, 1).flatten(0, 1)
        columns = columns / columns.square().mean().sqrt()
        left = torch.cat((columns[:, len(fixed) :], adds_up))
        right = torch.cat((-columns[:, : len(fixed)].sum(1), adds_up.new_ones(len(adds_up))))
        try:
            solved, error = nnls(left.cpu().numpy(), right.cpu().numpy(), maxiter=10_000)
        except (RuntimeError, ValueError):  # it did not converge, or met no number
            solved, error = np.zeros(left.shape[1]), math.inf
        weights.append(torch.from_numpy(solved).to(v))
        errors.append(error)
    return torch.stack(weights), torch.tensor(errors).to(v)


def groups(affinity: Tensor, count: int) -> list[Tensor]:
    """Which of the tokens with this affinity (m, m) are together, in so many groups of one size.

    The first group grows around one token, the next around one of those that are left; then all
    are assigned anew to the groups that they are nearest to, until nothing changes.
    """
    size = -(-len(affinity) // count)
    group = affinity.new_full((len(affinity),), -1, dtype=torch.long)
    for number in range(count):
        left = (group < 0).nonzero().flatten()
        if not len(left):
            break
        members = left[affinity[left][:, left].sum(1).argmax()][None]
        for _ in range(ROUNDS):
            near = affinity[left][:, members].mean(1)
            members = left[near.argsort(descending=True)[:size]]
        group[members] = number
    for _ in range(len(affinity)):
        shares = torch.stack([affinity[:, group == g].mean(1) for g in range(count)], 1)
        before, group = group, _assigned(-shares.nan_to_num())
        if torch.equal(before, group):
            break
    return [(group == number).nonzero().flatten() for number in range(count)]


def _assigned(costs: Tensor) -> Tensor:
    """The group of each token (m,), all groups of one size, for which costs (m, g) are least."""
    from scipy.optimize import linear_sum_assignment

    tokens, count = costs.shape
    slots = torch.arange(count).repeat_interleave(-(-tokens // count))
    _, columns = linear_sum_assignment(costs[:, slots].cpu().numpy())
    return slots[torch.from_numpy(columns)].to(costs.device)


def refined_groups(
    model: MJPVisionTransformer, fixed: Tensor, z: Tensor, attended: Tensor, found: list[Tensor]
) -> list[Tensor]:
    """Groups in which each token's sum is one of its own group's values: in every head of weights
    that are positive and add up to 1, whatever places make of queries and keys. Where the groups
    are not so, tokens are assigned to where that fits best, from there or from random groups.
    """
    _, _, v = _queries_keys_values_of(model, torch.cat((fixed, z)))
    sums = attended.view(len(z), len(v), -1).transpose(0, 1)
    count, generator = len(found), torch_generator("groups of tokens", len(z))
    best, least = found, math.inf
    for start in range(STARTS):
        if start:
            order = torch.randperm(len(z), generator=generator).to(z.device)
            found = [*order.chunk(count)]
        for _ in range(STEPS):
            errors = torch.stack([_hull_errors(v, sums, len(fixed), one) for one in found], 1)
            total = float(errors.gather(1, _numbers(found, len(z))[:, None]).mean())
            if total < least:
                best, least = found, total
            group = _assigned(errors)
            if spent() or least < HULL or torch.equal(group, _numbers(found, len(z))):
                break
            found = [(group == number).nonzero().flatten() for number in range(count)]
        if spent() or least < HULL:
            break
    return best


def _numbers(found: list[Tensor], tokens: int) -> Tensor:
    """The group of each token (m,)."""
    group = torch.zeros(tokens, dtype=torch.long, device=found[0].device)
    for number, members in enumerate(found):
        group[members] = number
    return group


def _hull_errors(v: Tensor, sums: Tensor, fixed: int, members: Tensor) -> Tensor:
    """How far (m,) sums (heads, m, d) are from what values of a group add up to, the mean of all
    heads' relative errors."""
    from scipy.optimize import nnls

    own = torch.cat((torch.arange(fixed, device=members.device), fixed + members))
    errors = np.zeros((len(v), sums.shape[1]))
    for head, (values, of_head) in enumerate(zip(v, sums, strict=True)):
        length = float(of_head.square().sum(1).mean().sqrt())
        left = torch.cat((values[own].mT / length, values.new_ones(1, len(own)))).cpu().numpy()
        right = torch.cat((of_head / length, of_head.new_ones(len(of_head), 1)), 1).cpu().numpy()
        for place, one in enumerate(right):
            try:
                errors[head, place] = nnls(left, one, maxiter=10_000)[1]
            except (RuntimeError, ValueError):  # it did not converge, or met no number
                errors[head, place] = 1.0
    return torch.from_numpy(errors.mean(0)).to(v)
