r"""The pictures of a batch from uploads of it: patches by the lattice, sorted, and verified.

**Patches** (`BatchPatches`). Off the span S of their differences the patches of one position are
known and equal, C_i (`equations.batches`). Pixels are integers, so the differences of all positions
generate a lattice of rank N (B - 1) (`lattice.unmixing`), and

    x_{b,i} in C_i + Z d_1 + ... + Z d_q,

of which few vectors look like photographs. In a short basis most steps are differences of the
batch's own pictures. So from the vector nearest to a guess, moved while that looks more like a
photograph, all B patches are a few steps away, and LayerNorm's length tells which. What is missing
is then looked for with the differences that were found as further steps.

**Whether a patch stands in a batch** (`NormTest`). Block 0's first layer says of the patch x at
position i (`equations.span`), z = W x + beta + e_i:

    P diag(gamma) (z - mean(z)) + s(x) P b = 0,    s(x) the standard deviation of z's entries.

For x = x_i + sum_j c_j d_j this holds but for the length: the part along P b gives a number s that
is linear in c, and s(x)^2 is quadratic in c. Both agree for the patches of the batch and by chance
for one vector in many thousands. It needs B N + 1 < D tokens, and a LayerNorm with biases b, as
trained ones have; without it the patches that look most like photographs are taken.

**Pictures.** Borders tell mostly which patches belong together (`jigsaw`); the layers after block
0's attention tell it surely (`equations.layers`), and patches are exchanged until pictures pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations import QKV
from attacks.equations.batches import differences, superposed
from attacks.equations.completion import complete, field_energy
from attacks.equations.layers import LayerSpans, StepUpload, rectangles
from attacks.equations.patch_system import gradient, in_levels, normalised, patch_system
from attacks.equations.span import Knowledge, TokenEquations, sees_a_norm, token_equations
from attacks.jigsaw import sorted_into_pictures
from attacks.lattice.cost import Frame, Places, Reals
from attacks.lattice.search import Moves, short_vectors, sums_of
from attacks.lattice.unmixing import COARSE, Unmixed, unmix_differences
from mjp_privacy.interfaces import AttackerView, ClientUpdate
from mjp_privacy.models.jigsaw import Grid

CLOSE = 8.0
"""Units of rounding by which both lengths may differ, times |gamma| / |P b|: so much a small bias b
magnifies the rounding of z. Those of true patches differ by up to 1 of it on a trained ViT-Ti, and
by up to 4, one by 9, on `patch14_vit`."""
MOST = 5e-4  # a share by which a part of all sums of differences agrees: the test says nothing
LEAST = 1e-9  # the same as a share: exact pixels are found in the client's gradient only so exactly
TELLS = 1e-4  # the length of P b, as a share of b's, from which it tells patches apart


@dataclass(frozen=True)
class NormTest:
    """The test of one step's patches, in grey levels."""

    equations: TokenEquations
    frame: Frame
    eps: float  # of the LayerNorm
    close: float  # share by which both lengths may differ

    @classmethod
    def of(
        cls, view: AttackerView, update: ClientUpdate, index: int, batch: int, frame: Frame
    ) -> NormTest | None:
        """The test of the step at `index`, of `batch` pictures; None where there is none."""
        norm = getattr(view.model.blocks[0], "norm1", None)
        if not isinstance(norm, torch.nn.LayerNorm) or sees_a_norm(view.model) is not None:
            return None
        if norm.bias is None:
            return None
        tokens = view.model.tokens + (batch - 1) * view.model.grid.patches
        if QKV not in update.grads or tokens >= gradient(view, update, QKV).shape[-1]:
            return None
        equations = token_equations(view, update, index, batch)
        if float(equations.shift.norm()) <= TELLS * float(norm.bias.detach().double().norm()):
            return None
        magnified = float(norm.weight.detach().double().norm()) / float(equations.shift.norm())
        close = max(CLOSE * magnified * torch.finfo(update.dtype).eps, LEAST)
        if close > MOST:
            return None
        return cls(equations, frame, norm.eps, close)

    def along(self, steps: Reals) -> LatticeTest:
        """The same for sums of integer steps (r, p)."""
        pushed = self._centred(torch.from_numpy(steps / self.frame.gain), 0.0)
        gram = (pushed @ pushed.mT).numpy() / pushed.shape[1]
        return LatticeTest(self, steps, pushed.numpy(), gram, self._told(pushed))

    def at(self, patch: Reals, place: int) -> tuple[Reals, float, float]:
        """z (D,) of a patch (p,) in grey levels, centred; its squared length and the s told."""
        normalised = torch.from_numpy((patch - self.frame.zero) / self.frame.gain)
        z = self._centred(normalised.unsqueeze(0), self.equations.own[place].cpu())
        squared = float(z.square().mean()) + self.eps
        return z[0].numpy(), squared, float(self._told(z)[0])

    def _centred(self, patches: Tensor, added: Tensor | float) -> Tensor:
        z = patches @ self.equations.weight.cpu().mT + added
        return z - z.mean(-1, keepdim=True)

    def _told(self, z: Tensor) -> Reals:
        """The s that the part along P b tells, (m,)."""
        shift = self.equations.shift.cpu()
        told = z @ (self.equations.system.cpu().mT @ shift)
        return np.asarray(-(told / shift.square().sum()).numpy())


@dataclass(frozen=True)
class LatticeTest:
    """The test of patches that are a given one and a sum of a few steps."""

    test: NormTest
    steps: Reals  # (r, p)
    pushed: Reals  # (r, D) what each step adds to z
    gram: Reals  # (r, r)
    told: Reals  # (r,) what each step adds to the s that is told

    def passed(self, patch: Reals, place: int, rows: Places, signs: Reals) -> Places:
        """Which sums patch + signs @ steps[rows] pass; rows and signs (n, k), k may be 0."""
        z, squared, told = self.test.at(patch, place)
        toward = self.pushed @ z / len(z)
        lengths = squared + 2 * (signs * toward[rows]).sum(1)
        for first in range(rows.shape[1]):
            for second in range(rows.shape[1]):
                both = self.gram[rows[:, first], rows[:, second]]
                lengths = lengths + signs[:, first] * signs[:, second] * both
        true = np.sqrt(np.maximum(lengths, self.test.eps))
        away = abs(told + (signs * self.told[rows]).sum(1) - true)
        return np.flatnonzero(away <= self.test.close * true)

    def neighbours(self, place: int, starts: Reals, batch: int, furthest: int) -> Reals:
        """The patches (m, p) of one position, about `batch`, that pass and are at most so many
        steps from one that is given or found; nearest first."""
        found: list[Reals] = []
        for size in range(furthest + 1):
            found = [patch for start in starts for patch in self._passing(place, start, size)]
            if found:
                break
        found = list(_distinct(found)) if found else []
        looked = [0] * len(found)  # the sizes of sums that were tried around each patch
        while len(found) < batch and looked and min(looked) < furthest and not spent():
            around = looked.index(min(looked))
            looked[around] += 1
            more = self._passing(place, found[around], looked[around])
            found = list(_distinct([*found, *more]))
            looked += [0] * (len(found) - len(looked))
        return np.stack(found) if found else starts[:0]

    def _passing(self, place: int, start: Reals, size: int) -> Reals:
        """The patches that pass the test and are `size` steps away from a start."""
        rows, signs = sums_of(len(self.steps), size)
        passed = self.passed(start, place, rows, signs)
        steps = np.einsum("nk,nkp->np", signs[passed], self.steps[rows[passed]])
        return _inside(start + steps)


# the patches of each position ---------------------------------------------------------------------


FURTHEST = 3  # steps between two patches of one position, at most
LOOKS = 3  # at what is missing, with the differences that were found as further steps


@dataclass(frozen=True)
class BatchPatches:
    """A search for the patches of each position."""

    lattice: Unmixed
    steps: Reals  # (q, p) a short basis of the lattice, in grey levels
    moves: Moves
    test: NormTest | None

    @classmethod
    def of(cls, lattice: Unmixed, test: NormTest | None) -> BatchPatches:
        """The search in a lattice of differences (`lattice.unmixing.unmix_differences`)."""
        basis = np.rint(255 * lattice.patches[1:].numpy())
        steps, _ = short_vectors(lattice.frame.parts, basis)
        moves = Moves.of(lattice.frame, np.vstack((0 * steps[:1], steps)))
        return cls(lattice, steps, moves, test)

    def found(self, known: Tensor, guesses: Sequence[Tensor], batch: int) -> list[Reals]:
        """For each position the patches (m, p) that are found, at most `batch`, in grey levels.

        known    (N, p) normalised: the patches but for multiples of the steps
        guesses  pictures (N, p) in [0, 1] near which to look
        """
        starts = self._starts(known, guesses)
        if self.test is None:
            return [self._likeliest(each, batch) for each in starts]
        near = self.test.along(self.steps)
        found = [near.neighbours(place, each, batch, FURTHEST) for place, each in enumerate(starts)]
        for _ in range(LOOKS):
            lacking = [place for place, each in enumerate(found) if len(each) < batch]
            pairs = [(each, *np.triu_indices(len(each), 1)) for each in found]
            own = [step for each, one, other in pairs for step in each[one] - each[other]]
            if not lacking or not own or spent():
                break
            steps = _distinct([*self.steps, *own])
            wide = self.test.along(steps)
            before = sum(map(len, found))
            for place in lacking:
                tried = found[place] if len(found[place]) else starts[place]
                found[place] = wide.neighbours(place, tried, batch, FURTHEST - 1)
            if sum(map(len, found)) == before:
                break
        return [self._best(each, batch) for each in found]

    def _starts(self, known: Tensor, guesses: Sequence[Tensor]) -> list[Reals]:
        """For each position (m, p) what looks most like a photograph near the guesses."""
        near = [self.lattice.nearest(known, guess) for guess in guesses]
        starts = []
        for place in range(len(known)):
            own = [
                self.moves.descended(
                    np.rint(255 * vectors[place].numpy()), 255 * guess[place].cpu().double().numpy()
                )
                for guess, (vectors, whole) in zip(guesses, near, strict=True)
                if bool(whole[place])
            ]
            starts.append(_distinct([*np.rint(own)]) if own else np.zeros((0, known.shape[1])))
        return starts

    def _likeliest(self, starts: Reals, batch: int) -> Reals:
        """The patches that look most like photographs, at most a step away from one of them."""
        best = self._best(starts, 1)
        if not len(best):
            return best
        around = np.vstack((best + self.steps, best - self.steps))
        return np.vstack((best, self._best(_inside(around), batch - 1)))

    def _best(self, patches: Reals, count: int) -> Reals:
        """Those that cost least."""
        if not len(patches):
            return patches
        order = np.argsort(self.lattice.frame.cost(patches), kind="stable")
        return patches[order[:count]]


def _inside(patches: Reals) -> Reals:
    """Those whose pixels are all within 0...255."""
    return patches[((patches >= 0) & (patches <= 255)).all(1)]


def _distinct(patches: Sequence[Reals]) -> Reals:
    """The different ones (m, p), in the order in which they came."""
    different = {(patch + 0.0).tobytes(): patch for patch in patches}  # -0.0 is 0.0
    return np.stack(list(different.values()))


# patches exchanged between pictures ---------------------------------------------------------------


EXCHANGES = 24  # at most
AT_ONCE = 64  # pictures that the network sees together
TINY = 1e-300
Shares = Callable[[Tensor], Tensor]
"""What lies outside for each of some pictures (m, N, p), (m,)."""


def exchanged(pictures: Tensor, grid: Grid, shares: Shares, enough: float) -> tuple[Tensor, Tensor]:
    """Pictures (B, N, p) with rectangles of patches exchanged between two at a time, as long as
    that lessens what lies outside; and what does (B,). At most `enough` is a picture that is left
    as it is."""
    pictures, outside = pictures.clone(), shares(pictures)
    regions = rectangles(grid).to(pictures.device)
    for _ in range(EXCHANGES):
        rest = [place for place, share in enumerate(outside.tolist()) if share > enough]
        best = max(
            (
                _best_exchange(pictures, outside, *pair, regions, shares)
                for pair in combinations(rest, 2)
            ),
            key=lambda trial: trial[0],
            default=None,
        )
        if best is None or best[0] <= 0 or spent():
            break
        _, pair, both, left = best
        pictures[pair], outside[pair] = both, left
    return pictures, outside


def _best_exchange(
    pictures: Tensor, outside: Tensor, first: int, second: int, regions: Tensor, shares: Shares
) -> tuple[float, list[int], Tensor, Tensor]:
    """The exchange between two pictures that gains most: by how much the logarithms of what lies
    outside sink, the pair, both pictures after it and what then lies outside of them."""
    pair = [first, second]
    one, other = pictures[pair]
    tried = []
    for some in regions.split(AT_ONCE):
        inside = some.unsqueeze(2)
        both = torch.stack((torch.where(inside, other, one), torch.where(inside, one, other)), 1)
        tried.append(shares(both.flatten(0, 1)).view(-1, 2))
    left = torch.cat(tried)
    gains = (outside[pair].clamp_min(TINY).log() - left.clamp_min(TINY).log()).sum(1)
    best = int(gains.argmax())
    region = regions[best].unsqueeze(1)
    both = torch.stack((torch.where(region, other, one), torch.where(region, one, other)))
    return float(gains[best]), pair, both, left[best]


# the pictures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPicture:
    """One picture of a batch."""

    patches: Tensor  # (N, p) normalised
    outside: float = math.nan  # what share of its layers' inputs lies outside; NaN: not verified
    by_lattice: bool = False


@dataclass(frozen=True)
class LatticePictures:
    """The search: LatticePictures(view, "fitted").found([upload])."""

    view: AttackerView
    prior: str

    def found(self, uploads: Sequence[StepUpload]) -> list[BatchPicture]:
        """The pictures of one step, as many as its batch has, those that were verified first.
        Verified ones are taken out of the uploads, and the smaller batch that is left is looked at
        again. What tests patches and pictures is the whole upload: taking out adds errors."""
        found, whole = list[BatchPicture](), uploads[0]
        sent = whole.update
        spans = LayerSpans.of(whole.model, whole.grads, sent.batch, sent.dtype)
        while batch := uploads[0].update.batch:
            left = self._looked_at(uploads, whole, spans)
            sure = [picture for picture in left if math.isfinite(picture.outside)]
            found += sure
            if len(sure) in (0, batch) or spent():
                return [*found, *(picture for picture in left if math.isnan(picture.outside))]
            for picture in sure:
                uploads = [upload.without(picture.patches) for upload in uploads]
        return found

    def _looked_at(
        self, uploads: Sequence[StepUpload], whole: StepUpload, spans: LayerSpans | None
    ) -> list[BatchPicture]:
        """The pictures that are left in the uploads, verified or not."""
        first, batch = uploads[0], uploads[0].update.batch
        systems = [patch_system(self.view, upload.update) for upload in uploads]
        known = differences(systems, batch, torch.finfo(first.update.dtype).eps)
        energy = field_energy(self.prior, self.view.model.patch_size, self.view.pixels)
        smoothest = complete(known, energy)
        mean = smoothest
        _, places, width = systems[0].rows.shape
        if places * batch <= width:
            mean = superposed(self.view, first.update, systems[0], 0, self.prior).mean
        rest = (batch * mean - smoothest) / max(batch - 1, 1)
        sorts = self._by_lattice(whole, batch, known, (smoothest, mean, rest))
        if sorts is None:
            guesses = torch.stack([smoothest, *[rest] * (batch - 1)])
            return self._verified(whole, spans, guesses, False)
        return self._verified(whole, spans, sorts, True)

    def _by_lattice(
        self, whole: StepUpload, batch: int, known: Knowledge, guesses: Sequence[Tensor]
    ) -> Tensor | None:
        """Pictures (B, N, p) of whole grey levels, sorted by their borders; None where there is no
        lattice. Where not all patches of a position are found, guesses stand for the others."""
        pixels, size = self.view.pixels, self.view.model.patch_size
        levels = [in_levels(guess, pixels, size) for guess in guesses]
        if not len(known.basis):
            patches = 255 * in_levels(known.known, pixels, size).cpu().double().numpy()
            sheets = np.rint(patches)[None].repeat(batch, axis=0)
        else:
            lattice = unmix_differences(known.basis, pixels, size, COARSE)
            if lattice is None:
                return None
            test = NormTest.of(self.view, whole.update, 0, whole.update.batch, lattice.frame)
            found = BatchPatches.of(lattice, test).found(known.known, levels, batch)
            mean = 255 * levels[1].cpu().double().numpy()
            equal = len(known.basis) < len(mean) * (batch - 1)
            filled = [_filled(*pair, batch, equal) for pair in zip(found, mean, strict=True)]
            sheets = sorted_into_pictures(np.stack(filled), self.view.model.grid, size)
        return normalised(torch.from_numpy(sheets / 255).to(known.known), pixels, size)

    def _verified(
        self, whole: StepUpload, spans: LayerSpans | None, pictures: Tensor, by_lattice: bool
    ) -> list[BatchPicture]:
        """The pictures (B, N, p) after exchanges of patches, verified where they pass."""
        if spans is None:
            return [BatchPicture(picture, math.nan, by_lattice) for picture in pictures]

        def shares(some: Tensor) -> Tensor:
            """What share of the layers' inputs of pictures (m, N, p) lies outside, (m,)."""
            with torch.no_grad():
                return spans.off(some).double()

        pictures, outside = exchanged(pictures, whole.model.grid, shares, spans.enough)
        verified = list[Tensor]()  # a picture that comes twice says nothing of the second place
        judged = list[BatchPicture]()
        for picture, share in zip(pictures, outside.tolist(), strict=True):
            passes = share <= spans.enough and not any(picture.equal(other) for other in verified)
            passes = passes and spans.sees_mixtures(picture)
            verified += [picture] if passes else []
            judged.append(BatchPicture(picture, share if passes else math.nan, by_lattice))
        return judged


def _filled(found: Reals, mean: Reals, batch: int, equal: bool) -> Reals:
    """Patches (B, p) of one position: those found, and for each other one what the mean patch (p,)
    of the batch leaves for it; or, where some patches of the batch are `equal`, a copy."""
    left = batch - len(found)
    if not left:
        return found
    if not len(found):
        return np.tile(mean.clip(0, 255), (batch, 1))
    rest = found[0] if equal else ((batch * mean - found.sum(0)) / left).clip(0, 255)
    return np.vstack((found, np.tile(rest, (left, 1))))
