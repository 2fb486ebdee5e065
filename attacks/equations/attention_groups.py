r"""Which tokens of a batch are of one picture, as block 0's attention says.

Attention adds up the tokens of one picture. For a token with the query q and the sum o,

    sum_y w_y exp(q . k_y / sqrt(d)) (v_y - o) = 0

is linear in the weights of all tokens y, which are 1 for its own picture's and 0 for others. Where
a table tells places, they sum to 1 at each, and elsewhere over all places to N. Rotary positions
and a relative bias change the exponents by what the places are, which is not yet known: the
weights are nearly right then, and the groups that they form are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mjp_privacy.models import MJPVisionTransformer

ROUNDS = 3  # times that a group is told from its members' weights


def queries_keys_values(attention: Any) -> Any:
    """The layer of an attention's queries, keys and values, or its own layers as that."""
    return getattr(attention, "joined", getattr(attention, "qkv", None))


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

    block: Any = model.blocks[0]
    attention, heads = block.attn, block.attn.num_heads
    with torch.no_grad():
        given = block.norm1(torch.cat((fixed, z)))
        made = queries_keys_values(attention)(given)
        biases: list[Any] = [getattr(attention, f"{name}_bias", None) for name in "qkv"]  # BEiT's
        if all(bias is not None for bias in biases):
            made = made + torch.cat(biases).to(made)
    q, k, v = made.view(len(given), 3, heads, -1).permute(1, 2, 0, 3)
    q, k = (getattr(attention, f"{a}_norm", nn.Identity())(x) for a, x in (("q", q), ("k", k)))
    sums = attended.view(len(z), heads, 1, -1).transpose(0, 1)
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
    from scipy.optimize import linear_sum_assignment  # half a second

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
    slots = torch.arange(count).repeat_interleave(size)
    for _ in range(len(affinity)):
        shares = torch.stack([affinity[:, group == g].mean(1) for g in range(count)], 1)
        _, columns = linear_sum_assignment(-shares.nan_to_num()[:, slots].cpu().numpy())
        moved = slots[torch.from_numpy(columns)].to(group)
        if torch.equal(moved, group):
            break
        group = moved
    return [(group == number).nonzero().flatten() for number in range(count)]
