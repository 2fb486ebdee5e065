r"""The patches behind a span: what MJP's masked positions hold, exactly but in no order.

By linear algebra one upload gives the masked patches only as a span: with Q an orthonormal basis
of the unmasked rows of `pos_embed.grad`, H = (I - QQ^T) G = A_M^T X_M, whose row space B (k, p) is
the span of the masked patches X_M. Two facts lead from the span to the patches.

1. `unk_embed.grad` is the sum of the masked rows, A_M^T 1. So t = lstsq(H B^T, (I - QQ^T) sum)
   has a . t = 1 for the coordinates a of every masked patch (x = a B): scale and sign are known.
2. Pixels are 8-bit: n = 255 (std x + mean) is a vector of integers. The integer vectors of the
   span form a lattice of which the masked patches are a basis (`lattice.reduction`), namely the
   basis that looks like photographs (`lattice.cost`): inside 0...255, smooth, with a . t = 1.

The same lattice completes an unmasked patch, which linear algebra gives except for its part in the
span: the integer vectors of c + span are the patch plus combinations of the masked ones.

It needs pixels that are multiples of 1/255 when the client normalises them (no resampling, mixing
or noise after the rounding), and gradients so exact that the span is known to a small fraction of
a grey level (float32 is enough). FastICA on the same span, which needs no integers, recovers
nothing usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attacks.lattice.bases import combination_basis, patch_basis
from attacks.lattice.cost import GREY, precision
from attacks.lattice.descent import Moves
from attacks.lattice.frame import Frame, Reals
from attacks.lattice.mosaic import FIXED, continued
from attacks.lattice.reduction import FIRST, STEP, SpanLattice, order_of_pixels, span_lattice
from attacks.lattice.search import without_surplus
from mjp_privacy.core.budget import spent

NOISES = (2e-5, 1e-4, 5e-4, 2e-3)
"""Grey levels that the span may be off, tried in turn. Smaller ones need fewer pixels; trained ViTs
at 192 pixels are off by 3e-5 to 1e-4 in float32, the package's small ones by up to 2e-3."""

EXTENSIONS = 6  # times that further pixels are included for one of them
COARSE = 1e-4  # the least noise for unmasked patches, which are less exact
MORE = 0.3  # share of further pixels by which those are completed
WHOLE = 0.2  # grey levels by which an unmasked patch may miss integers


@dataclass(frozen=True)
class Unmixed:
    """The masked patches, and the lattice that completes the others."""

    patches: Tensor  # (k, p) in [0, 1], multiples of 1/255, in no order, without repetitions
    frame: Frame
    lattice: SpanLattice

    def complete(self, partial: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Unmasked patches known but for their part in the span -> (m, p) in [0, 1], and (m,) bool.

        partial (m, p), in the model's space, is any vector of patch + span; guess (m, p) in [0, 1]
        is where the search starts. Where the bool is False no integer vector was found, and the row
        must not be used.
        """
        frame, masked = self.frame, np.rint(self.patches.numpy() * 255)
        points = partial.detach().cpu().double().numpy() * frame.gain + frame.zero
        centre = np.full_like(points, GREY)
        if guess is not None:
            centre = guess.detach().cpu().double().numpy() * 255
        nearest = self.lattice.nearest(points, centre)
        whole = abs(nearest - np.rint(nearest)).max(1) < WHOLE
        surplus: Reals = np.zeros(len(points))
        if not frame.flat:
            surplus = frame.solved(nearest - points)[:, -1]
        moves = Moves.of(frame, frame.parts(), masked)
        for row in np.flatnonzero(whole):
            whole[row] = not spent()
            if not whole[row]:
                continue
            start = without_surplus(frame, np.rint(nearest[row]), surplus[row], masked)
            whole[row] = start is not None
            if start is not None:
                nearest[row] = moves.descended(start, centre[row])
        return torch.from_numpy(nearest / 255), torch.from_numpy(whole)

    def continued(self, patches: Tensor, members: Tensor) -> Tensor:
        """Patches (N, p) in [0, 1] in their places, improved by what lies beside them; members (N,)
        as in `lattice.mosaic.continued`."""
        grey, masked = (255 * p.detach().cpu().double().numpy() for p in (patches, self.patches))
        loose = members.numpy() != FIXED
        grey[loose] = np.rint(grey[loose])
        better = continued(self.frame, np.rint(masked), grey, members.numpy())
        return torch.from_numpy(better / 255).to(patches)


def sum_coordinates(projected: Tensor, basis: Tensor, unknown: Tensor) -> Tensor:
    """t (k,) with a . t = 1 for every masked patch x = a @ basis.

    projected (D, p) is H, basis (k, p) orthonormal rows of its span, unknown (D,) the projection
    (I - QQ^T) of dL/dE_unk, which is the sum of the masked rows.
    """
    mixed = (projected @ basis.mT).double()
    return torch.linalg.lstsq(mixed, unknown.double().unsqueeze(-1)).solution.squeeze(-1)


def unmix(
    basis: Tensor,
    t: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    patch_size: int,
) -> Unmixed | None:
    """The masked patches from their span: basis (k, p) in the model's space, and t (k,).

    None where no lattice of k integer vectors is found: the pixels are not multiples of 1/255, the
    span is not exact enough, or there are too few pixels for so many patches.
    """
    frame = Frame.of(basis, t, mean, std, patch_size)
    metric = precision(basis.shape[1], patch_size)
    for noise in NOISES:
        if spent():
            break
        unmixed = _unmixed(frame, span_lattice(frame.space, metric, noise))
        if unmixed is not None:
            return unmixed
    return None


def _unmixed(frame: Frame, lattice: SpanLattice) -> Unmixed | None:
    """The patches by the lattice of the frame's space, with its noise, or None."""
    size = len(frame.t)
    waiting = order_of_pixels(lattice)
    step = max(FIRST, size)
    for _ in range(EXTENSIONS):
        if spent():
            break
        lattice, waiting = lattice.extended(waiting[:step]), waiting[step:]
        step = max(STEP, size // 6)
        combinations = combination_basis(frame, *lattice.vectors())
        patches = None if combinations is None else patch_basis(frame, combinations)
        if patches is not None:
            more = waiting[: max(STEP, round(MORE * size))]
            completing = replace(lattice, noise=max(lattice.noise, COARSE)).extended(more)
            return Unmixed(torch.from_numpy(patches / 255), frame, completing)
        if not len(waiting):
            break
    return None
