r"""Looks in the span of a batch for a picture whose layers' inputs lie in the upload's spans.

The unknowns are a in X = C + a V (`equations.batch_span`), N^2 (B - 1) numbers instead of the
N p B of a batch, in coordinates in which patches of photographs have unit variance. L-BFGS
minimises what lies outside (`equations.layer_spans`), at first with a small weight on the energy of
the field prior, which ends at zero.

The local minima are pictures in which every patch is nearly that of *one* picture of the batch, but
not all of the same. So B searches go together: each starts at what the mean picture leaves for it
after those before, and so finds other patches. Then patches are exchanged between the local minima
a rectangle at a time while that lessens what lies outside. As attention mixes all tokens, patches
of pictures that are in the minority give way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.completion import FieldEnergy
from attacks.equations.layer_spans import LayerSpans
from attacks.equations.superposition import Superposition
from mjp_privacy.models.jigsaw import to_images

STAGES = ((1e-3, 60), (1e-5, 60), (0.0, 100))
"""Weight of the prior's energy per pixel, and steps of L-BFGS; then further stages without it."""
FURTHER = 4  # further stages, as long as each divides what lies outside by GAIN
GAIN = 3.0
EXCHANGES = 12  # of rectangles, at most, for one picture
MATES = 6  # the latest local minima, whose patches are tried in each other's places
AT_ONCE = 64  # pictures that the network sees together
HISTORY = 50  # steps that L-BFGS remembers
SPREAD = 0.7  # standard deviations of the prior by which random starts leave the mean picture
Stages = Sequence[tuple[float, int]]


@dataclass
class LayerSearch:
    """A search for one picture: LayerSearch(spans, guess, energy).found(2, 12, 1e-9, generator)."""

    spans: LayerSpans
    guess: Superposition
    energy: FieldEnergy

    def __post_init__(self) -> None:
        basis, patch_precision = self.guess.basis, self.energy.patch_precision
        root = torch.linalg.cholesky(basis @ patch_precision @ basis.mT)
        self.units = torch.linalg.solve_triangular(root, basis, upper=False)
        self.back = basis.mT @ root
        mean = self.guess.mean
        self.known = mean - (mean @ basis.mT) @ basis
        self.centre = self.energy.mean.repeat_interleave(self.energy.patch_size**2)

    def found(
        self, batch: int, searches: int, enough: float, generator: torch.Generator
    ) -> tuple[Tensor, float] | None:
        """Patches (N, p) of one picture and its share, at most `enough`; None where so many
        searches find none."""
        if not len(self.units):
            share = self._share(self.guess.mean)
            return (self.guess.mean, share) if share <= enough else None
        group, pool = list[Tensor](), list[Tensor]()
        for start in self._starts(batch, searches, group, generator):
            patches, share = self._descended(start, STAGES)
            group.append(patches)
            pool.append(patches)
            if share > enough and len(pool) > 1:
                patches, share = self._recombined(patches, torch.stack(pool[-MATES:]))
                patches, share = self._descended(patches, STAGES[-1:])
            if share <= enough:
                return self._polished(patches)
            if spent():
                return None
        return None

    def _polished(self, patches: Tensor) -> tuple[Tensor, float]:
        """A picture that was found, made more exact in float64, and its share."""
        precisely = LayerSearch(self.spans.precise(), self.guess, self.energy)
        return precisely._descended(patches, STAGES[-1:])

    def _starts(
        self, batch: int, searches: int, group: list[Tensor], generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Patches (N, p) to start from: B at a time, the first a guess or a random picture, the
        others what the mean picture leaves for them after the `group` found so far."""
        smoothest, rest = self.guess.pictures(batch)[:2]
        first = [rest, smoothest, self.guess.mean]
        for _ in range(searches):
            if len(group) == batch:
                group.clear()
            if group:
                yield (batch * self.guess.mean - sum(group)) / (batch - len(group))
            elif first:
                yield first.pop(0)
            else:
                noise = torch.randn(len(self.known), len(self.units), generator=generator)
                yield self.guess.mean + SPREAD * noise.to(self.known) @ self.units

    def _recombined(self, start: Tensor, pool: Tensor) -> tuple[Tensor, float]:
        """A picture (N, p) and its share: `start` after rectangles of patches were exchanged one by
        one for those of the pool (K, N, p), as long as that lessens what lies outside."""
        best, least = start, self._share(start)
        regions = rectangles(self.spans.model.grid).to(start.device)
        at_once = max(1, AT_ONCE // len(pool))
        for _ in range(EXCHANGES):
            better = least, best
            for some in regions.split(at_once):
                trials = torch.where(some[:, None, :, None], pool, best).flatten(0, 1)
                shares = self._shares(trials)
                if float(shares.min()) < better[0]:
                    better = float(shares.min()), trials[shares.argmin()]
            if better[0] >= least or spent():
                break
            least, best = better
        return best, least

    def _shares(self, pictures: Tensor) -> Tensor:
        """What lies outside for each picture (K, N, p), (K,)."""
        with torch.no_grad():
            return self.spans.off(self._seen(pictures))

    def _share(self, patches: Tensor) -> float:
        """What lies outside for one picture (N, p)."""
        return float(self._shares(patches.unsqueeze(0)))

    def _descended(self, start: Tensor, stages: Stages) -> tuple[Tensor, float]:
        """The local minimum near a start, and its share."""
        moves, share = ((start - self.known) @ self.back).requires_grad_(), float("inf")
        for weight, steps in stages:
            share = self._stage(moves, weight, steps)
        for _ in range(FURTHER):
            before = share
            if spent():
                break
            share = self._stage(moves, 0.0, stages[-1][1])
            if share * GAIN > before:
                break
        return self._patches(moves.detach()), share

    def _patches(self, moves: Tensor) -> Tensor:
        return self.known + moves @ self.units

    def _stage(self, moves: Tensor, weight: float, steps: int) -> float:
        """Some steps of L-BFGS on `moves`, in place; the share outside after them."""
        scale, least = 0.0, (float("inf"), moves.detach().clone())
        optimizer = torch.optim.LBFGS(
            [moves],
            max_iter=steps,
            max_eval=steps + steps // 4,
            history_size=HISTORY,
            line_search_fn="strong_wolfe",
            tolerance_grad=0,
            tolerance_change=0,
        )

        def closure() -> Tensor:
            """The objective in units of its first value, so that no step is lost to rounding."""
            nonlocal scale, least
            optimizer.zero_grad()
            patches = self._patches(moves)
            outside = self.spans.off(self._seen(patches.unsqueeze(0)))[0].double()
            total, share = outside, float(outside.detach())
            if share < least[0]:
                least = share, moves.detach().clone()
            if weight:
                away = (patches - self.centre).detach()
                pull = weight * self.energy.force(away) / away.numel()
                # Linear in the patches with the energy's derivative; its value stands beside it.
                total = (
                    total + (pull * patches).sum() - (pull * (patches - away / 2)).detach().sum()
                )
            scale = scale or max(float(total.detach()), 1e-300)
            (total / scale).backward()
            return (total / scale).detach()

        optimizer.step(closure)
        if not weight:
            with torch.no_grad():
                moves.copy_(least[1])
        return self._share(self._patches(moves.detach()))

    def _seen(self, pictures: Tensor) -> Tensor:
        """Pictures (m, N, p) as (m, C, H, W) in the model's precision."""
        seen = to_images(pictures, self.energy.patch_size, len(self.energy.mean))
        return seen.to(self.spans.model.cls_token)


@cache
def rectangles(grid: int) -> Tensor:
    """Rectangles of patches, (R, N) bool: all of a small grid, of a large one some of each size."""
    spans = [
        (first, last)
        for first in range(grid)
        for last in range(first, grid)
        if first % max(1, (last - first) // 2, grid // 4) == 0 or last == first
    ]
    inside = torch.zeros(len(spans), grid, dtype=torch.bool)
    for row, (first, last) in enumerate(spans):
        inside[row, first : last + 1] = True
    return (inside[:, None, :, None] & inside[None, :, None, :]).flatten(2).flatten(0, 1)
