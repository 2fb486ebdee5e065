r"""Where uploads of batches meet: what pictures that stand in all of them must be.

A picture x in uploads r = 1..R obeys (I - P_r) x_i = c_{r,i} for each (`equations.batch_span`), so

    M x_i = sum_r c_{r,i},    M = sum_r (I - P_r).

Directions in which M vanishes belong to the span of every upload. Where the uploads share m
pictures these are the differences between the shared ones, N (m - 1) directions, and the patches
that were masked in all uploads: with none the picture is one, and determined. Where they share no
picture, the equations contradict each other as soon as there are more of them than unknowns,
sum_r (p - q_r) > p.

What counts as zero, of a direction or of a contradiction, is decided by the errors that each upload
shows of itself, never by pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.equations.batch_span import BatchSpan

TOLERANCE = 10.0
"""Times the expected error up to which a direction or a contradiction counts as zero. Expected is
a bound for random errors: those of a trained ViT's float32 gradients are .3 to 1.1 of it, and
pictures that are not shared contradict each other by 10^4 of it."""
DECIDABLE = 0.1
"""Share of the known part of the patches below which the tolerance must stay: with larger errors
equations that do not contradict each other say nothing."""
ROUNDING = 1e-12  # of the eigenvalues of M, which are computed in float64


@dataclass(frozen=True)
class Meeting:
    """M's eigenvalues and eigenvectors, as far as they differ from R and any."""

    spans: Sequence[BatchSpan]
    values: Tensor  # (K,) ascending
    vectors: Tensor  # (K, p) rows of length sqrt(R - value)

    @classmethod
    def of(cls, spans: Sequence[BatchSpan]) -> Meeting:
        """The meeting of these uploads, of which there is at least one."""
        stacked = torch.cat([span.basis for span in spans])
        if len(stacked) <= stacked.shape[1]:
            shared, turn = torch.linalg.eigh(stacked @ stacked.mT)
            vectors = turn.mT @ stacked
        else:
            shared, turn = torch.linalg.eigh(stacked.mT @ stacked)
            vectors = shared.clamp_min(0).sqrt().unsqueeze(1) * turn.mT
        return cls(spans, (len(spans) - shared).flip(0), vectors.flip(0))

    @cached_property
    def open(self) -> int:
        """How many directions lie in every span, as far as the errors of the spans tell."""
        near = self.values < 0.5  # of the angles between spans of different pictures
        error = torch.stack([span.tilt(self._unit(near)).square() for span in self.spans]).sum(0)
        return int((self.values[near] < ROUNDING + TOLERANCE**2 * error).sum())

    @property
    def basis(self) -> Tensor:
        """Orthonormal rows (open, p) of these directions."""
        return self._unit(slice(self.open))

    def _unit(self, which: slice | Tensor) -> Tensor:
        length = (len(self.spans) - self.values[which]).sqrt()
        return self.vectors[which] / length.unsqueeze(1)

    def patches(self, visible: Tensor) -> Tensor:
        """The patches (N, p) that meet all equations best, with no part along open directions.

        visible  (R, N) bool: where the picture is visible in each upload
        """
        total = self._known(visible).sum(0)
        count = len(self.spans)
        scale = count * self.values
        scale[: self.open] = -count * (count - self.values[: self.open])
        return total / count + (total @ self.vectors.mT / scale) @ self.vectors

    def _known(self, visible: Tensor) -> Tensor:
        """The right-hand sides (R, N, p) of the equations."""
        rows = zip(self.spans, visible, strict=True)
        return torch.stack([span.known(seen) for span, seen in rows])

    def known(self, visible: Tensor) -> Tensor:
        """Their length at each position, (N,)."""
        return self._known(visible).norm(dim=(0, 2))

    def contradiction(self, patches: Tensor, visible: Tensor) -> Contradiction:
        """How far these patches (N, p) are from meeting all equations."""
        known = self._known(visible)
        missed = torch.stack([span.off(patches) for span in self.spans]) - known
        pairs = zip(self.spans, visible, strict=True)
        expected = torch.stack([span.expected(patches, seen) for span, seen in pairs])
        return Contradiction(missed.norm(dim=(0, 2)), expected.norm(dim=0), known.norm(dim=(0, 2)))

    def error(self, expected: Tensor) -> Tensor:
        """The length (N,) of the error to expect of `patches`, from that of their equations.

        The errors of sum_r c_{r,i} have a covariance like M, so those of x_i one like its inverse.
        """
        width, rest = self.vectors.shape[1], self.values[self.open :].clamp_min(ROUNDING)
        outside = (width - len(self.values)) / len(self.spans)
        return expected * ((outside + float((1 / rest).sum())) / width) ** 0.5


@dataclass(frozen=True)
class Contradiction:
    """What is missing in the equations of each of N positions."""

    missed: Tensor  # (N,) length of what is left over
    expected: Tensor  # (N,) what errors leave over
    known: Tensor  # (N,) length of the right-hand sides

    @property
    def none(self) -> bool:
        """Whether the equations hold over all positions together, and could have failed to."""
        tolerance = TOLERANCE * float(self.expected.norm())
        decidable = tolerance <= DECIDABLE * float(self.known.norm())
        return decidable and float(self.missed.norm()) <= tolerance

    @property
    def none_at(self) -> Tensor:
        """The same (N,) of each position alone."""
        tolerance = TOLERANCE * self.expected
        decidable = (self.known > 0) & (tolerance <= DECIDABLE * self.known)
        return decidable & (self.missed <= tolerance)


def equations_left(spans: Sequence[BatchSpan]) -> int:
    """By how many the equations of these uploads exceed the unknowns of a patch."""
    width = spans[0].basis.shape[1]
    return sum(width - len(span.basis) for span in spans) - width
