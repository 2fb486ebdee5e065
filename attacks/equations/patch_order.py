r"""Where the patches of a picture stand, as attention tells it where no table does.

Networks with rotary positions or a relative bias embed a patch alike wherever it stands, and
borders alone would tell their patches' order. But what attention adds up, o_t, depends on where all
stand, and the gradient of the layer that it is handed to,

    dL/dW_o = sum_t (dL/dr_t) o_t^T,

has its rows in the span of the sums o_t of the right order. So of every order of known patches the
network says, forward, what share of that gradient lies outside: about 1e-13 for the right one in
float32, and 1e-8 or more with two patches exchanged in the networks that were looked at. Exchanges
that lessen it lead to the right order from borders' guess, if all patches are right.

A network that does not see the order leaves the share as it is; then borders have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.layers import client_model
from attacks.equations.patch_system import gradient
from attacks.equations.second_branch import PROJ
from attacks.equations.token_peeling import SentGradient
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import AttackerView, ClientUpdate
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images
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
            basis = torch.linalg.qr(others.mT.to(grads[names[0]].dtype)).Q
            grads = {name: sent - basis @ (basis.mT @ sent) for name, sent in grads.items()}
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
        the right order: it leaves outside what noise does, and others leave more."""
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
        return search.order, search.share <= self.enough


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
                better |= self.tried(trials)

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

    def tried(self, trials: Tensor) -> bool:
        """Whether one of at most AT_ONCE other orders (m, N) is better; the best is taken."""
        shares = self.said.outside(self.patches[trials])
        self.trials += len(trials)
        if not float(shares.min()) < self.share:
            return False
        self.order, self.share = trials[shares.argmin()], float(shares.min())
        return True
