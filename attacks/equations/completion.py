r"""The most probable picture among those that agree with what is known about each patch.

Patches are x_i = known_i + a_i B.

**Field** (`complete`). The picture is a Gaussian field with mean colour m and a precision Sigma^-1
that an orthonormal DCT diagonalises; conjugate gradients in a (N, q) minimise its energy

    E(a) = (x(a) - m)^T Sigma^-1 (x(a) - m),

which joins patches across their borders: worth 4 dB over a prior for each patch alone.

**Fewest steps** (`fewest_steps`). Drawings, letterboxes and saturated regions are no such field:
most neighbouring pixels are equal. Here a minimises

    sum |differences of neighbouring pixels|  +  OUTSIDE sum (levels beyond 0...255)^2

by iteratively reweighted least squares. 8-bit pixels show whether it is right: nothing but the
picture itself has a whole patch of whole grey levels. Such patches are kept, the others looked for
again.

**Whole grey levels** (`whole_picture`). Integer vectors among known_i + a_i B are a lattice of q
steps, mostly as long as patches differ, so that a guess that is off by a small part of a step gives
the patch exactly. Guesses nearer to the lattice than by chance are taken, the others made anew
beside them. In a flat picture the guess is that of fewest steps; where a step is one grey level of
a flat patch, its patches count as soon as they have come out whole by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import scipy
import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.patch_system import in_levels, least_squares, normalisation, normalised
from attacks.equations.span import Knowledge
from attacks.lattice.unmixing import Unmixed, unmix_differences
from attacks.prior.files import find_prior
from attacks.prior.gaussian import JITTER, GaussianPrior, cosine_basis, regular
from mjp_privacy.core.schema import height_width
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import Grid, to_images, to_patches

FIELD_TOLERANCE = 1e-4  # share of the first residual's norm at which to stop
FIELD_STEPS = 300


@dataclass(frozen=True)
class FieldEnergy:
    """Sigma^-1 of a normalised picture under a prior."""

    precision: Tensor  # (C, C, H, W), of each DCT coefficient
    down: Tensor  # (H, H), of the DCT
    across: Tensor  # (W, W)
    mean: Tensor  # (C,)
    patch_precision: Tensor  # (p, p), of a patch alone: the preconditioner
    patch_size: int
    grid: Grid

    @classmethod
    def of(cls, prior: GaussianPrior, patch_size: int, pixels: Pixels) -> FieldEnergy:
        """The energy for the model's picture size, with enough jitter to be invertible."""
        spectrum = prior.field_spectrum(pixels)
        least = JITTER * float(spectrum.diagonal(dim1=-2, dim2=-1).mean())
        eye = torch.eye(spectrum.shape[-1], dtype=spectrum.dtype)
        covariance = prior.patch(patch_size, pixels)[1]
        height, width = height_width(pixels.size)
        return cls(
            torch.linalg.inv(spectrum + least * eye).permute(2, 3, 0, 1).contiguous(),
            cosine_basis(height),
            cosine_basis(width),
            prior.mean_colour(pixels),
            torch.linalg.inv(regular(covariance)),
            patch_size,
            Grid.of(pixels.size, patch_size),
        )

    def on(self, device: torch.device) -> FieldEnergy:
        """The same on another device."""
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def force(self, patches: Tensor) -> Tensor:
        """Sigma^-1 applied to a picture given as patches (N, p), as patches."""
        picture = to_images(patches, self.grid, self.patch_size)
        shaped = (self.precision * self._transformed(picture)).sum(1)
        return to_patches(self._transformed(shaped, back=True), self.patch_size)

    def _transformed(self, picture: Tensor, *, back: bool = False) -> Tensor:
        """The orthonormal DCT of a picture (C, H, W), or its inverse."""
        if picture.device.type == "cpu":
            kind = 3 if back else 2
            return torch.from_numpy(
                scipy.fft.dctn(picture.numpy(), kind, axes=(1, 2), norm="ortho")
            )
        if back:
            return self.down.mT @ picture @ self.across
        return self.down @ picture @ self.across.mT


@lru_cache(maxsize=4)
def field_energy(prior: str, patch_size: int, pixels: Pixels) -> FieldEnergy:
    """The energy under the prior of this name, made once for all pictures of a size."""
    found = find_prior(prior, patch=patch_size, size=pixels.size, channels=len(pixels.mean))
    return FieldEnergy.of(found, patch_size, pixels)


def complete(
    knowledge: Knowledge,
    energy: FieldEnergy,
    kept: Tensor | None = None,
    exact: Tensor | None = None,
) -> Tensor:
    """All patches (N, p) of the most probable picture, normalised; those `kept` (N,) are taken from
    `exact` (N, p)."""
    known, basis = knowledge.known, knowledge.basis
    if not len(basis):
        return known
    energy = energy.on(known.device)
    area = energy.patch_size**2
    centre = energy.mean.repeat_interleave(area)
    start, free = (centre - known) @ basis.mT, known.new_ones(len(known), 1)
    if kept is not None and exact is not None:
        known = torch.where(kept.unsqueeze(1), exact, known)
        free = (~kept).unsqueeze(1).to(known)
        start = start * free
    preconditioner = torch.linalg.inv(basis @ energy.patch_precision @ basis.mT)

    def apply(a: Tensor) -> Tensor:
        """Sigma^-1 restricted to the open directions."""
        return energy.force(a @ basis) @ basis.mT * free

    residual = -energy.force(known + start @ basis - centre) @ basis.mT * free
    moved = conjugate_gradients(apply, residual, lambda force: force @ preconditioner)
    return known + (start + moved) @ basis


def complete_patchwise(knowledge: Knowledge, mean: Tensor, covariance: Tensor) -> Tensor:
    """Normalised patches (N, p), each the most probable by itself under N(mean, covariance)."""
    known, basis = knowledge.known, knowledge.basis
    precision = torch.linalg.inv(regular(covariance.to(known)))
    pull = (mean.to(known) - known) @ precision @ basis.mT
    return known + torch.linalg.solve(basis @ precision @ basis.mT, pull.mT).mT @ basis


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    residual: Tensor,
    precondition: Callable[[Tensor], Tensor],
    tolerance: float = FIELD_TOLERANCE,
    steps: int = FIELD_STEPS,
    *,
    start: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    """The solution a of apply(a) = residual, starting at zero, to a share of the residual.

    start  where to begin instead; the residual is what is left there
    least  residual * precondition(residual) at which to end, in place of the share

    It ends with the last a where rounding or NaN makes a step impossible.
    """
    solution = torch.zeros_like(residual) if start is None else start
    target = tolerance * residual.norm()
    shaped = precondition(residual)
    direction, product = shaped, (residual * shaped).sum()
    for _ in range(steps):
        left = residual.norm() > target if least is None else product > least
        if not left or (least is None and spent()):
            break
        moved = apply(direction)
        curvature = (direction * moved).sum()
        if not curvature > 0:
            break
        step = product / curvature
        solution = solution + step * direction
        residual = residual - step * moved
        shaped = precondition(residual)
        next_product = (residual * shaped).sum()
        direction, product = shaped + next_product / product * direction, next_product
    return solution


# the picture of fewest steps ----------------------------------------------------------------------


OUTSIDE = 20.0  # weight of a grey level squared beyond the range, beside that of a step at its end
FIRST, LAST = 0.05, 0.00025  # of the range: steps below it count as squares, at first and at last
SHRINK = 0.8  # of that limit, from one reweighting to the next
SPARSE_STEPS = 40  # of conjugate gradients after each reweighting
SPARSE_TOLERANCE = 1e-5  # share of the residual at which they stop
WHOLE = 0.1  # grey levels by which pixels of a kept patch may miss integers
SPARSE_ROUNDS = 4  # at most, each with the patches kept that were found before


def fewest_steps(
    knowledge: Knowledge, start: Tensor, patch_size: int, pixels: Pixels
) -> tuple[Tensor, Tensor]:
    """The picture (N, p) of fewest steps in [0, 1], and which of its patches have whole grey levels
    in every pixel, bool (N,), so that they are known to be right.

    start  a guess (N, p), normalised, as is the knowledge

    Patches that have come out whole are kept in further rounds, and the others start anew.
    """
    scale, zero = normalisation(pixels, patch_size, start)
    basis = torch.linalg.qr((knowledge.basis * scale).mT).Q.mT  # orthonormal again
    grid = Grid.of(pixels.size, patch_size)
    problem = _Problem(knowledge.known * scale + zero, basis, grid, patch_size)
    levels = start * scale + zero
    kept = torch.zeros(len(levels), dtype=torch.bool, device=levels.device)
    for _ in range(SPARSE_ROUNDS):
        levels = problem.solved(levels, ~kept)
        whole = whole_levels(levels)
        if spent() or not bool((whole & ~kept).any()) or bool(whole.all()):
            break
        kept = kept | whole
        levels = torch.where(kept.unsqueeze(1), (255 * levels).round() / 255, levels)
        problem = replace(problem, known=torch.where(kept.unsqueeze(1), levels, problem.known))
    return levels, whole_levels(levels)


def whole_levels(levels: Tensor) -> Tensor:
    """Which patches (N, p) in [0, 1] have whole grey levels only, none of them outside."""
    grey = 255 * levels
    inside = (grey > -WHOLE) & (grey < 255 + WHOLE)
    return (inside & ((grey - grey.round()).abs() < WHOLE)).all(1)


@dataclass(frozen=True)
class _Problem:
    """Patches known + a @ basis in [0, 1]."""

    known: Tensor  # (N, p)
    basis: Tensor  # (q, p)
    grid: Grid
    patch_size: int

    def solved(self, start: Tensor, free: Tensor) -> Tensor:
        """The patches (N, p) of fewest steps; those that are not `free` (N,) stay as known."""
        rows = free.unsqueeze(1).to(start)
        a = (start - self.known) @ self.basis.mT * rows
        limit = FIRST
        while limit > LAST and not spent():
            patches = self.known + a @ self.basis
            picture = to_images(patches, self.grid, self.patch_size)
            a = a + self._step(_Weights.of(picture, limit), picture, rows)
            limit *= SHRINK
        return self.known + a @ self.basis

    def _step(self, weights: _Weights, picture: Tensor, rows: Tensor) -> Tensor:
        """The change of a (N, q) that minimises the weighted squares, by conjugate gradients."""

        def apply(a: Tensor) -> Tensor:
            force = weights.force(to_images(a @ self.basis, self.grid, self.patch_size))
            return to_patches(force, self.patch_size) @ self.basis.mT * rows

        pull = weights.force(picture) - weights.edge
        residual = -to_patches(pull, self.patch_size) @ self.basis.mT * rows
        curvature = to_patches(weights.diagonal(), self.patch_size) @ self.basis.square().mT
        return conjugate_gradients(
            apply, residual, lambda force: force / curvature, SPARSE_TOLERANCE, SPARSE_STEPS
        )


@dataclass(frozen=True)
class _Weights:
    """A quadratic form of pictures (C, H, W) that touches the cost at one of them."""

    sideways: Tensor  # (C, H, W - 1) of squared differences
    downwards: Tensor  # (C, H - 1, W)
    outside: Tensor  # (C, H, W) of squared pixels beyond the range
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


# patches of whole grey levels ---------------------------------------------------------------------


NEAR = 0.2  # of a step: how far a guess may be from the lattice, along each step
NEARLY_ALL, FEW = 0.9, 4  # patches kept with so few steps: the others are as near as half a step
FALSE = 0.05  # largest share of guesses taken that may be near by chance
ROUNDS = 8  # of new guesses, at most


def whole_picture(
    knowledge: Knowledge, likely: Tensor, energy: FieldEnergy, pixels: Pixels
) -> Tensor:
    """Normalised patches (N, p): exact ones where they can be had, near the most probable picture
    `likely` (N, p), which is made anew for the others."""
    size = energy.patch_size
    sparse, whole = fewest_steps(knowledge, likely, size, pixels)
    lattice = unmix_differences(knowledge.basis, pixels, size)
    kept = torch.zeros(len(likely), dtype=torch.bool, device=likely.device)
    patches = likely
    if flat := 2 * int(whole.sum()) > len(likely):
        patches = normalised(sparse, pixels, size)
        if lattice is None or len(lattice.frame.colours):
            kept = whole
    for _ in range(ROUNDS):
        if lattice is None or spent() or kept.all():
            break
        found, near = _near(lattice, knowledge.known, in_levels(patches, pixels, size), kept)
        if not near.any():
            break
        exact = normalised(found.to(likely), pixels, size)
        patches, kept = torch.where(near.unsqueeze(1), exact, patches), kept | near
        if not flat:
            patches = complete(knowledge, energy, kept, patches)
    return patches


def _near(lattice: Unmixed, known: Tensor, guess: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The patches (N, p) in [0, 1] of the lattice nearest to a guess, and (N,) bool: those beside
    the `kept` ones that the guess is near to, none if that may be by chance."""
    found, whole = lattice.nearest(known, guess)
    steps = lattice.patches[1:]
    missed = least_squares(steps, (guess.cpu() - found).mT).abs().amax(0)
    missed = missed.masked_fill(~(whole & ((found >= 0) & (found <= 1)).all(1)), torch.inf)
    if float(kept.double().mean()) > NEARLY_ALL and len(steps) <= FEW:
        return found, (missed < 0.5).to(kept.device) & ~kept
    near = (missed < NEAR).to(kept.device) & ~kept
    share, chance = float(near.sum()) / max(int((~kept).sum()), 1), (2 * NEAR) ** len(steps)
    truly = max(share - chance, 0) / (1 - chance)
    certain = (1 - truly) * chance <= FALSE * share
    return found, near if certain else torch.zeros_like(near)
