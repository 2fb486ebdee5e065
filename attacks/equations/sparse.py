r"""The picture of fewest steps among those that agree with what is known about each patch.

Photographs are close to a Gaussian field (`equations.completion`); drawings, letterboxes and
saturated regions are not: most neighbouring pixels are equal. Patches are x_i = known_i + a_i B,
and a is chosen to minimise

    sum |differences of neighbouring pixels|  +  OUTSIDE sum (levels beyond 0...255)^2

by iteratively reweighted least squares, each a few steps of conjugate gradients. Pixels that were
8-bit show whether the result is right: nothing but the picture itself has a whole patch of whole
grey levels. Such patches are kept, and the others are looked for again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.levels import normalisation
from attacks.equations.span import Knowledge
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import to_images, to_patches

OUTSIDE = 20.0  # weight of a grey level squared beyond the range, beside that of a step at its end
FIRST, LAST = 0.05, 0.00025  # of the range: steps below it count as squares, at first and at last
SHRINK = 0.8  # of that limit, from one reweighting to the next
STEPS = 40  # of conjugate gradients after each reweighting
TOLERANCE = 1e-5  # share of the residual at which they stop
WHOLE = 0.1  # grey levels by which pixels of a kept patch may miss integers
ROUNDS = 4  # at most, each with the patches kept that were found before


@dataclass(frozen=True)
class Sparse:
    """A picture of patches in [0, 1], and which of them are known to be right."""

    patches: Tensor  # (N, p)
    whole: Tensor  # (N,) bool: whole grey levels in every pixel


def fewest_steps(knowledge: Knowledge, start: Tensor, patch_size: int, pixels: Pixels) -> Sparse:
    """The picture of fewest steps from the guess `start` (N, p), normalised, as is the knowledge.

    Patches that have come out whole are kept in further rounds, and the others start anew.
    """
    scale, zero = normalisation(pixels, patch_size, start)
    problem = _Problem.of(knowledge, scale, zero, patch_size)
    levels = start * scale + zero
    kept = torch.zeros(len(levels), dtype=torch.bool, device=levels.device)
    for _ in range(ROUNDS):
        levels = problem.solved(levels, ~kept)
        whole = _whole(levels)
        if spent() or not bool((whole & ~kept).any()) or bool(whole.all()):
            break
        kept = kept | whole
        levels = torch.where(kept.unsqueeze(1), (255 * levels).round() / 255, levels)
        problem = replace(problem, known=torch.where(kept.unsqueeze(1), levels, problem.known))
    return Sparse(levels, _whole(levels))


def _whole(levels: Tensor) -> Tensor:
    """Which patches (N, p) in [0, 1] have whole grey levels only, none of them outside."""
    grey = 255 * levels
    inside = (grey > -WHOLE) & (grey < 255 + WHOLE)
    return (inside & ((grey - grey.round()).abs() < WHOLE)).all(1)


@dataclass(frozen=True)
class _Problem:
    """Patches known + a @ basis in [0, 1]."""

    known: Tensor  # (N, p)
    basis: Tensor  # (q, p)
    patch_size: int

    @classmethod
    def of(cls, knowledge: Knowledge, scale: Tensor, zero: Tensor, patch_size: int) -> _Problem:
        """From normalised patches; the basis is made orthonormal again."""
        basis = torch.linalg.qr((knowledge.basis * scale).mT).Q.mT
        return cls(knowledge.known * scale + zero, basis, patch_size)

    def solved(self, start: Tensor, free: Tensor) -> Tensor:
        """The patches (N, p) of fewest steps; those that are not `free` (N,) stay as known."""
        rows = free.unsqueeze(1).to(start)
        a = (start - self.known) @ self.basis.mT * rows
        limit = FIRST
        while limit > LAST and not spent():
            patches = self.known + a @ self.basis
            weights = _Weights.of(self._picture(patches), limit)
            a = a + self._step(weights, patches, rows)
            limit *= SHRINK
        return self.known + a @ self.basis

    def _picture(self, patches: Tensor) -> Tensor:
        """(C, side, side)."""
        return to_images(patches, self.patch_size, patches.shape[1] // self.patch_size**2)

    def _step(self, weights: _Weights, patches: Tensor, rows: Tensor) -> Tensor:
        """The change of a (N, q) that minimises the weighted squares, by conjugate gradients."""

        def apply(a: Tensor) -> Tensor:
            force = weights.force(self._picture(a @ self.basis))
            return to_patches(force, self.patch_size) @ self.basis.mT * rows

        pull = weights.force(self._picture(patches)) - weights.edge
        residual = -to_patches(pull, self.patch_size) @ self.basis.mT * rows
        curvature = to_patches(weights.diagonal(), self.patch_size) @ self.basis.square().mT
        shaped = residual / curvature
        solution, direction = torch.zeros_like(residual), shaped
        product, target = (residual * shaped).sum(), TOLERANCE * residual.norm()
        for _ in range(STEPS):
            if not residual.norm() > target:
                break
            moved = apply(direction)
            length = product / (direction * moved).sum()
            solution = solution + length * direction
            residual = residual - length * moved
            shaped = residual / curvature
            following = (residual * shaped).sum()
            direction, product = shaped + following / product * direction, following
        return solution


@dataclass(frozen=True)
class _Weights:
    """A quadratic form of pictures (C, side, side) that touches the cost at one of them."""

    sideways: Tensor  # (C, side, side - 1) of squared differences
    downwards: Tensor  # (C, side - 1, side)
    outside: Tensor  # (C, side, side) of squared pixels beyond the range
    edge: Tensor  # outside * the end of the range that is nearest

    @classmethod
    def of(cls, picture: Tensor, limit: float) -> _Weights:
        """At a picture; differences below `limit` count as squares."""
        sideways, downwards = picture.diff(dim=2), picture.diff(dim=1)
        outside = OUTSIDE * ((picture < 0) | (picture > 1)).to(picture)
        return cls(
            (sideways.square() + limit**2).rsqrt(),
            (downwards.square() + limit**2).rsqrt(),
            outside,
            outside * picture.clamp(0, 1),
        )

    def force(self, picture: Tensor) -> Tensor:
        """The form's matrix times a picture."""
        pull = self.outside * picture
        step = self.sideways * picture.diff(dim=2)
        pull[:, :, 1:] += step
        pull[:, :, :-1] -= step
        step = self.downwards * picture.diff(dim=1)
        pull[:, 1:] += step
        pull[:, :-1] -= step
        return pull

    def diagonal(self) -> Tensor:
        """The diagonal of the form's matrix, as a picture."""
        total = self.outside.clone()
        total[:, :, 1:] += self.sideways
        total[:, :, :-1] += self.sideways
        total[:, 1:] += self.downwards
        total[:, :-1] += self.downwards
        return total
