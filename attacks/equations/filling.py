r"""Fills the directions that uploads leave open with the most probable picture.

Solving an upload that is known to be noisy exactly (`equations.span`) amplifies its errors. Here
each equation for a picture X (N, p) is weighed by its known error (`NoisyUpload`). With A_r, G_r
and the hidden patches H_r of upload r, b_k the directions that these leak into and P_r = I - sum_k
w_k b_k b_k^T, the picture is where

    sum_r tr((A_r^T X - G_r) P_r (A_r^T X - G_r)^T) / t_r^2
        + sum_r sum_{j in H_r} |x_j P_r|^2 / s_r^2
        + (X - m)^T Sigma^-1 (X - m)

is least. w_k is 1 - LEAK (e / strength)^2, e the strength that noise alone would reach: directions
no stronger than noise are removed too, because a leak misleads more than noise of its size. t^2 =
var(G) + var(A) sum_i E x_i^2, the second term because A is noisy as well, and at least what A
leaves unexplained of G. The second sum says that hidden patches lie in their span; it is used where
all directions of the span are above the noise.

Conjugate gradients start at the exact solution or, where noise spoilt that, at the prior's mean.
Their preconditioner is the quadratic with each patch alone,

    S (x) M + I (x) Sigma_p^-1,   S = sum_r (A_r A_r^T / t_r^2 + I_{H_r} / s_r^2),

M the mean of the P_r. Given a picture, the rows of A have a mean and a spread that follow from what
was sent and from G = A^T X. With these a better picture is found, PASSES times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attacks.budget import image
from attacks.equations import PATCH, TABLE
from attacks.equations.completion import (
    FieldEnergy,
    complete,
    complete_patchwise,
    conjugate_gradients,
    field_energy,
    whole_picture,
)
from attacks.equations.patch_system import PatchSystem, error_of, of_steps
from attacks.equations.span import Knowledge, noise_edge, off_rows
from attacks.prior.files import patch_moments
from attacks.prior.gaussian import TINY, noise_variance, regular
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Reconstruction

Completion = Literal["field", "patch", "none"]
MOST = 40
"""Open directions up to which the picture of fewest steps is looked for, of several uploads alone:
with one upload it costs photographs 6 dB."""


@dataclass(frozen=True)
class Filling:
    """How open directions are filled.

    prior       `fitted`, `stationary`, or the path of a fitted prior
    completion  `field` joins patches across their borders, `patch` takes each patch alone, `none`
                leaves open directions at zero
    exact       with `field`, look for patches of whole grey levels too
    """

    prior: str
    completion: Completion = "field"
    exact: bool = False

    def patches(self, view: AttackerView, knowledge: Sequence[Knowledge]) -> list[Tensor]:
        """Normalised patches (N, p) of the picture of each client step."""
        patches, batch = list[Tensor](), view.updates[0].batch
        for index, picture in enumerate(knowledge):
            with image(index * batch, batch):
                patches.append(self.likeliest(view, picture))
        return patches

    def likeliest(self, view: AttackerView, picture: Knowledge) -> Tensor:
        """Normalised patches (N, p): exact where they can be had so, else the most probable."""
        patch, pixels = view.model.patch_size, view.pixels
        if self.completion == "none":
            return picture.known
        if self.completion == "patch":
            return complete_patchwise(picture, *patch_moments(self.prior, patch, pixels))
        energy = field_energy(self.prior, patch, pixels)
        likely = complete(picture, energy)
        if self.exact and 0 < len(picture.basis) <= MOST:
            likely = whole_picture(picture, likely, energy, pixels)
        return likely

    def weighed(
        self,
        view: AttackerView,
        systems: Sequence[PatchSystem],
        exact: Sequence[Tensor],
        noisy: Sequence[bool],
    ) -> list[Tensor]:
        """The patches of `exact`, solved again with the uploads' errors weighed where `noisy`.

        systems holds one system per upload, exact what `patches` gave, noisy one bool per picture;
        see `most_probable`.
        """
        patch, pixels = view.model.patch_size, view.pixels
        moments = patch_moments(self.prior, patch, pixels)
        mean, covariance = (part.to(systems[0].rows) for part in moments)
        field = None
        if self.completion == "field":
            field = field_energy(self.prior, patch, pixels).on(mean.device)
        patches = []
        for index, guess in enumerate(exact):
            if not noisy[index]:
                patches.append(guess)
                continue
            uploads = [
                noisy_upload(update, system, index, mean, covariance)
                for update, system in zip(view.updates, systems, strict=True)
            ]
            patches.append(most_probable(uploads, mean, covariance, field, guess))
        return patches


@dataclass(frozen=True)
class Solution:
    """What uploads determine of each of n pictures, and its most probable patches."""

    rounds: Sequence[Sequence[Knowledge]]  # by upload, then by picture
    knowledge: Sequence[Knowledge]
    patches: Sequence[Tensor]  # (N, p) each, normalised
    noisy: Sequence[bool]  # whether errors were weighed, so that no direction is known exactly

    def reconstruction(
        self, view: AttackerView, facts: dict[str, Tensor] | None = None
    ) -> Reconstruction:
        """The pictures to be scored; `facts` are further diagnostics, one value per client step.
        How many directions are open is not known where errors were weighed."""
        shown = [
            wanted(view, first.hidden, patches)
            for first, patches in zip(self.rounds[0], self.patches, strict=True)
        ]
        counts = torch.tensor([len(picture.basis) for picture in self.knowledge]).double()
        diagnostics = {
            **(facts or {}),
            "open_directions": counts.masked_fill(torch.tensor(self.noisy), torch.nan),
            "always_masked": torch.stack([p.hidden.sum() for p in self.knowledge]).double(),
        }
        hidden = torch.stack([span.hidden for span in self.rounds[0]])
        return of_steps(view, torch.stack(shown), hidden, diagnostics)


def wanted(view: AttackerView, hidden: Tensor, patches: Tensor) -> Tensor:
    """The patches of the picture to be scored, plain or as the client fed it. As fed, each masked
    place gets the mean of the masked patches, because their order is not in the gradient."""
    if view.against == "plain" or not hidden.any():
        return patches
    return torch.where(hidden.unsqueeze(-1), patches[hidden].mean(0), patches)


# errors weighed -----------------------------------------------------------------------------------


LEAK = 0.02
"""How far below the noise a leak is still removed. Larger values help a single upload and hurt
several, the more so the less noise there is."""
NOTHING = 1e-12  # share of the norm below which a singular value counts as zero


@dataclass(frozen=True)
class NoisyUpload:
    """One upload of one picture, whose error is known; float64."""

    rows: Tensor  # A (N, D), hidden rows zero, and as it is estimated
    total: Tensor  # G P (D, p)
    hidden: Tensor  # (N,)
    precision: float  # 1 / t^2
    inside: float  # 1 / s^2, s the size of a hidden patch outside its span; 0: not used
    sent: Tensor  # A as uploaded
    errors: tuple[float, float]  # variance of the error on an entry of A and on one of G
    energy: float  # E x^2 of an entry of a patch
    dtype: torch.dtype
    leak: Tensor  # b (k, p), the directions in which hidden patches show in G
    weights: Tensor  # w (k,)
    strengths: Tensor  # (k,) singular values of b in what the visible rows leave of G
    mixed: Tensor  # G b^T (D, k)

    @cached_property
    def weight(self) -> Tensor:
        """A A^T / t^2 (N, N)."""
        return self.precision * (self.rows @ self.rows.mT)

    def pull(self) -> Tensor:
        """The quadratic's right side, A G P / t^2 (N, p)."""
        return self.precision * (self.rows @ self.total)

    def off(self, patches: Tensor) -> Tensor:
        """Patches (N, p) times P."""
        return off_leak(patches, self.leak, self.weights)

    def force(self, patches: Tensor) -> Tensor:
        """The quadratic's matrix applied to X (N, p)."""
        out = self.off(patches)
        return self.weight @ out + self.inside * torch.where(self.hidden.unsqueeze(1), out, 0.0)

    def with_rows(self, patches: Tensor) -> NoisyUpload:
        """The same with A estimated again, given a guess of X: G = A^T X depends on A too."""
        (of_rows, of_total), visible = self.errors, ~self.hidden
        if not of_rows or not of_total:
            return self
        seen = patches[visible]
        sent_precision = torch.eye(len(seen)).to(seen) / of_rows
        spread = torch.linalg.inv(sent_precision + self.off(seen) @ seen.mT / of_total)
        rows = torch.zeros_like(self.rows)
        right = self.sent[visible] / of_rows + seen @ self.total.mT / of_total
        rows[visible] = spread @ right
        expected = of_total + float(spread.diagonal().sum()) * self.energy
        variance = _variance(expected, rows, self.total, self.dtype)
        return replace(self, rows=rows, precision=1 / variance)

    def without_leak(self, patches: Tensor) -> NoisyUpload:
        """The same with the leak that P misses weighed, given a guess of X.

        The directions b are off by noise over their strengths, so that P does not quite remove the
        hidden patches: of their share C b of G, C diag(1 / strength) times noise is left. Both
        sides of G = A^T X are multiplied by the inverse root of I + C diag(1 / strength^2) C^T.
        """
        if not len(self.leak):
            return self
        share = self.mixed - self.rows.mT @ (patches @ self.leak.mT)
        share = share * self.weights / self.strengths
        u, s, _ = torch.linalg.svd(share, full_matrices=False)
        shrink = 1 - (1 + s.square()).rsqrt()
        rows = self.rows - (self.rows @ u * shrink) @ u.mT
        total = self.total - (u * shrink) @ (u.mT @ self.total)
        return replace(self, rows=rows, total=total)


def off_leak(patches: Tensor, leak: Tensor, weights: Tensor) -> Tensor:
    """Patches (N, p) times P = I - sum_k w_k b_k b_k^T."""
    return patches - (patches @ leak.mT * weights) @ leak


def noisy_upload(
    update: ClientUpdate, system: PatchSystem, index: int, mean: Tensor, covariance: Tensor
) -> NoisyUpload:
    """The upload of the picture at `index`; mean (p,) and covariance (p, p) of a patch."""
    of_rows, of_total = (float(error_of(update, name)[index]) ** 2 for name in (TABLE, PATCH))
    rows, total, hidden = system.rows[index], system.total[index], system.hidden[index]
    energies = covariance.diagonal() + mean.square()  # E x^2 of every entry
    energy = float(energies.mean())
    expected = of_total + of_rows * len(rows) * energy
    rest, masked = off_rows(total, rows[~hidden]), int(hidden.sum())
    edge = noise_edge(expected**0.5, max(rest.shape[0] - int((~hidden).sum()), 0), rest.shape[1])
    _, strengths, basis = torch.linalg.svd(rest, full_matrices=False)
    strengths, basis = strengths[:masked], basis[:masked]
    kept = strengths > max(LEAK**0.5 * edge, float(NOTHING * rest.norm()))  # of positive weights
    strengths, basis = strengths[kept], basis[kept]
    weights = 1 - LEAK * (edge / strengths).square()
    outside = off_leak(total, basis, weights)
    variance = _variance(expected, rows, outside, update.dtype)
    inside = 0.0
    if masked and len(basis) == masked and strengths[-1] > edge:
        spread = variance * float(strengths.reciprocal().square().mean()) * float(energies.sum())
        inside = 1 / max(spread, TINY)
    facts = rows, (of_rows, of_total), energy, update.dtype
    leak = basis, weights, strengths, total @ basis.mT
    return NoisyUpload(rows, outside, hidden, 1 / variance, inside, *facts, *leak)


def _variance(expected: float, rows: Tensor, total: Tensor, dtype: torch.dtype) -> float:
    """t^2: the variance expected from known errors, but at least what the rows leave of G."""
    measured = float(noise_variance(rows[None], total[None], dtype)[0])
    return max(expected, measured, TINY)


# the most probable picture ------------------------------------------------------------------------


TOLERANCE = 1e-6  # share of the first residual, most of which comes from visible patches
STEPS = 300
PASSES = 4  # new estimates of the rows and the leak, after the first solution


def most_probable(
    uploads: Sequence[NoisyUpload],
    mean: Tensor,
    covariance: Tensor,
    field: FieldEnergy | None,
    exact: Tensor,
) -> Tensor:
    """The most probable patches (N, p), normalised.

    mean (p,) and covariance (p, p) are those of one patch. Without a field each patch has that
    prior alone. `exact` (N, p), the solution that ignores all errors, is where to start.
    """
    patches = _solved(uploads, mean, covariance, field, exact)
    for _ in range(PASSES):
        weighed = [upload.with_rows(patches).without_leak(patches) for upload in uploads]
        patches = _solved(weighed, mean, covariance, field, patches)
    return patches


def _solved(
    uploads: Sequence[NoisyUpload],
    mean: Tensor,
    covariance: Tensor,
    field: FieldEnergy | None,
    guess: Tensor,
) -> Tensor:
    """The patches (N, p) that minimise the quadratic for fixed rows and leaks."""
    precision, inverse = _patches_alone(uploads, covariance)
    pull = torch.stack([upload.pull() for upload in uploads]).sum(0)
    prior_mean = mean if field is None else field.mean.repeat_interleave(field.patch_size**2)
    centre = prior_mean.to(pull).expand_as(pull)

    def apply(patches: Tensor) -> Tensor:
        """The quadratic's matrix times patches (N, p)."""
        prior = patches @ precision if field is None else field.force(patches)
        return torch.stack([upload.force(patches) for upload in uploads]).sum(0) + prior

    force_at_centre = torch.stack([upload.force(centre) for upload in uploads]).sum(0)
    wanted, start = pull - force_at_centre, guess - centre
    least, pulled = TOLERANCE**2 * (wanted * inverse(wanted)).sum(), apply(start)
    left = wanted - pulled
    if not (start * (pulled / 2 - wanted)).sum() < 0:  # the quadratic is less at the centre, 0
        start, left = torch.zeros_like(wanted), wanted
    return centre + conjugate_gradients(apply, left, inverse, steps=STEPS, start=start, least=least)


def _patches_alone(
    uploads: Sequence[NoisyUpload], covariance: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Sigma_p^-1, and the inverse of S (x) M + I (x) Sigma_p^-1 as it applies to (N, p)."""
    identity = torch.eye(len(covariance)).to(uploads[0].rows)
    covariance = regular(covariance.to(identity))
    mean_outside = torch.stack([upload.off(identity) for upload in uploads]).mean(0)
    weights = [u.weight + torch.diag(u.inside * u.hidden.to(identity)) for u in uploads]
    s, u = torch.linalg.eigh(torch.stack(weights).sum(0))  # S = U diag(s) U^T
    root = torch.linalg.cholesky(covariance)
    m, w = torch.linalg.eigh(root.mT @ mean_outside @ root)
    v = root @ w  # V^T Sigma_p^-1 V = I, V^T M V = diag(m)
    scale = s.clamp_min(0).unsqueeze(1) * m.clamp_min(0) + 1

    def inverse(force: Tensor) -> Tensor:
        return u @ ((u.mT @ force @ v) / scale) @ v.mT

    return torch.linalg.inv(covariance), inverse
