r"""What block 0's attention says of tokens that no table of positions tells apart: where they
stand, and in a batch whose they are.

**Order.** What attention adds up, o_t, depends on where all patches stand, and the gradient of the
layer that it is handed to, dL/dW_o = sum_t (dL/dr_t) o_t^T, has its rows in the span of the sums of
the right order. So of every order of known patches the network says, forward, what share of that
gradient lies outside: about 1e-13 for the right one in float32, 1e-8 or more with two patches
exchanged. Exchanges that lessen it lead to the right order from borders' guess, if all patches are
right. A network that does not see the order leaves the share as it is; then borders have it.

**Pictures.** Attention adds up the tokens of one picture. For a token with the query q and the sum
o,

    sum_y w_y exp(q . k_y / sqrt(d)) (v_y - o) = 0

is linear in the weights of all tokens y, which are 1 for its own picture's and 0 for others. Where
a table tells places they sum to 1 at each, elsewhere over all places to N. Rotary positions and a
relative bias change the exponents, so weights are nearly right then. Whether the groups are that
they form, each token says: its sum lies among the values of its own group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor, nn

from attacks.budget import spent
from attacks.equations.block import PROJ
from attacks.equations.layers import client_model
from attacks.equations.patch_system import gradient
from attacks.equations.span import off_rows
from attacks.equations.token_peeling import SentGradient
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import AttackerView, ClientUpdate
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import Grid, to_images
from mjp_privacy.models.live.blocks import queries_keys_values
from mjp_privacy.models.vit import input_of

AT_ONCE = 32  # orders that the network sees together
NOISE = 4.0  # times the share that gradients' noise is expected to leave outside that ends a search
ROUNDED = 1e3
"""Times the precision of the gradients, squared, that the right order leaves outside at most where
they have no other noise; float64's counts as float32's, which the ridge is above."""
RIDGE = 1e-12  # of the sums' mean square: sums of random weights are nearly the same
PART = 6  # the share of patches that are moved where no exchange is better
PATIENCE = 12  # times in a row that this may lead to no better order
TRIALS = 8_000  # orders that are looked at, at most
SEEN = 1.5  # times the least share of shifted pictures that another one has where order is seen
SAME = 1e-3  # relative difference up to which two orders show the same picture
NEARER = 0.5  # of the share of the given order that another one, not right, has where it is better


def other_orders(grid: Grid) -> list[Tensor]:
    """Orders (N,) of patches in which a network that sees how far apart they are, but not in which
    direction, or positions on a ring, computes the same as in their own: rolled by a row or a
    column, turned and mirrored."""
    own = torch.arange(grid.patches).view(grid.rows, grid.columns)
    turned = [own.roll(1, 0), own.roll(1, 1), own.flip(0), own.flip(1), own.flip(0, 1)]
    if grid.rows == grid.columns:
        turned += [own.T, own.T.flip(0), own.T.flip(1), own.T.flip(0, 1)]
    return [order.flatten() for order in turned if not torch.equal(order, own)]


@dataclass(frozen=True, eq=False)
class PatchOrder:
    """What the gradient behind block 0's attention says of the order of known patches."""

    model: MJPVisionTransformer
    rows: Tensor  # (k, D + 1), float64: the gradient's rows, turned, as far as above its noise
    enough: float  # the share that noise may leave outside of the right order's span

    @classmethod
    def of(
        cls, view: AttackerView, update: ClientUpdate, step: int, others: Tensor | None = None
    ) -> PatchOrder | None:
        """By one step's gradient of the layer behind attention; None where there is none, where it
        has too few columns, and of networks with a table, whose tokens say where they stand.

        others  (m, D) what that layer receives, up to its length, of the tokens of other pictures
                of the step, whose sums are taken out of the gradient
        """
        names, tokens = (f"{PROJ}.weight", f"{PROJ}.bias"), view.model.tokens
        if view.model.pos_embed is not None or names[0] not in update.grads:
            return None
        grads = {name: gradient(view, update, name)[step] for name in names if name in update.grads}
        if others is not None:
            others = others.to(grads[names[0]].dtype)
            grads = {name: off_rows(sent, others) for name, sent in grads.items()}
        sent = SentGradient.of(grads, [PROJ], tokens)
        if tokens >= min(sent.total.shape) or not len(sent.values):
            return None
        rows = sent.values[:, None] * sent.rows
        outside = sent.noise * len(rows) * (rows.shape[1] - tokens) / float(rows.square().sum())
        precision = max(torch.finfo(dtype).eps for dtype in (update.dtype, torch.float32))
        return cls(client_model(view, update), rows, max(NOISE * outside, ROUNDED * precision**2))

    def outside(self, orders: Tensor) -> Tensor:
        """What share of the gradient lies outside the span of the sums of pictures (m, N, p)."""
        size = self.model.patch_size
        like = self.model.like
        x = torch.stack([to_images(one, self.model.grid, size) for one in orders]).to(like)
        with torch.no_grad():
            sums = input_of(self.model, self.model.get_submodule(PROJ), x).double()
        if sums.shape[-1] < self.rows.shape[1]:
            sums = torch.cat((sums, torch.ones_like(sums[..., :1])), 2)
        inner = sums @ sums.mT
        ridge = RIDGE * inner.diagonal(dim1=1, dim2=2).mean(1)
        inner.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        along = sums @ self.rows.mT
        inside = (along * torch.linalg.solve(inner, along)).sum((1, 2))
        return (1 - inside / self.rows.square().sum()).clamp_min(0)

    def found(self, patches: Tensor) -> tuple[Tensor, bool]:
        """Which of the normalised patches (N, p) stands at each place, (N,), and whether this is
        the right order: it leaves outside what noise does, and others leave more, those that some
        networks do not tell from it among them (`other_orders`). Where nothing is right nor clearly
        better, they stay as they are."""
        places = torch.arange(len(patches), device=patches.device)
        grid = places.view(self.model.grid)
        shifts = torch.cartesian_prod(*map(torch.arange, grid.shape)).tolist()
        shifted = torch.stack([grid.roll(by, (0, 1)).flatten() for by in shifts])
        shares = torch.cat([self.outside(patches[some]) for some in shifted.split(AT_ONCE)])
        least = float(shares.min())
        if float(shares.max()) <= SEEN * max(least, self.enough):
            return places, False  # the network does not see the order
        search = _Search(self, patches, shifted[shares.argmin()], least)
        generator = torch_generator("order of patches", len(patches))
        search.exchange(generator)
        search.move_some(generator)
        if search.share > max(self.enough, NEARER * float(shares[0])):
            return places, False  # as with dropout, whose part no order lessens
        found = patches[search.order]
        others = found[torch.stack(other_orders(self.model.grid)).to(found.device)]
        apart = (others - found).flatten(1).norm(dim=1) > SAME * found.norm()
        as_good = apart & (self.outside(others) <= self.enough)
        return search.order, search.share <= self.enough and not bool(as_good.any())


@dataclass
class _Search:
    """The best order so far, and its share."""

    said: PatchOrder
    patches: Tensor  # (N, p)
    order: Tensor  # (N,)
    share: float
    trials: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the order is not yet right, and there is time."""
        return self.share > self.said.enough and self.trials < TRIALS and not spent()

    def exchange(self, generator: torch.Generator) -> None:
        """Exchange two patches as long as that lessens the share."""
        pairs, better = torch.combinations(torch.arange(len(self.patches))), True
        while better:
            better = False
            for some in pairs[torch.randperm(len(pairs), generator=generator)].split(AT_ONCE):
                if not self.goes_on:
                    return
                trials = self.order.repeat(len(some), 1)
                rows = torch.arange(len(some))[:, None]
                trials[rows, some] = self.order[some.flip(1).to(self.order.device)]
                shares = self.said.outside(self.patches[trials])
                self.trials += len(trials)
                if float(shares.min()) < self.share:
                    self.order, self.share = trials[shares.argmin()], float(shares.min())
                    better = True

    def move_some(self, generator: torch.Generator) -> None:
        """Leave an order in which no exchange is better: move some patches, exchange again, and
        keep what is better."""
        count, idle = len(self.patches), 0
        while self.goes_on and idle < PATIENCE:
            before = self.order, self.share
            some = torch.randperm(count, generator=generator)[: max(3, count // PART)]
            order = self.order.clone()
            order[some] = order[some.roll(1)]
            self.order, self.share = order, float(self.said.outside(self.patches[order][None]))
            self.exchange(generator)
            idle = 0 if self.share < before[1] else idle + 1
            if idle:
                self.order, self.share = before


# whose tokens they are ----------------------------------------------------------------------------


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
            solved, error = scipy.optimize.nnls(
                left.cpu().numpy(), right.cpu().numpy(), maxiter=10_000
            )
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
    tokens, count = costs.shape
    slots = torch.arange(count).repeat_interleave(-(-tokens // count))
    _, columns = scipy.optimize.linear_sum_assignment(costs[:, slots].cpu().numpy())
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
            size = -(-len(z) // count)
            found = [order[number * size :][:size] for number in range(count)]
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
    own = torch.cat((torch.arange(fixed, device=members.device), fixed + members))
    errors = np.zeros((len(v), sums.shape[1]))
    for head, (values, of_head) in enumerate(zip(v, sums, strict=True)):
        length = float(of_head.square().sum(1).mean().sqrt())
        left = torch.cat((values[own].mT / length, values.new_ones(1, len(own)))).cpu().numpy()
        right = torch.cat((of_head / length, of_head.new_ones(len(of_head), 1)), 1).cpu().numpy()
        if not len(own):  # no column, on which nnls of SciPy 1.17 ends the process
            errors[head] = np.linalg.norm(right, axis=1)
            continue
        for place, one in enumerate(right):
            try:
                errors[head, place] = scipy.optimize.nnls(left, one, maxiter=10_000)[1]
            except (RuntimeError, ValueError):  # it did not converge, or met no number
                errors[head, place] = 1.0
    return torch.from_numpy(errors.mean(0)).to(v)
