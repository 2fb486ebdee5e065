r"""What one upload of a batch says of each of its B pictures, how exactly, and two guesses.

With patches x_{b,i} of picture b at position i, and g_{b,i} their gradients, the upload holds

    G = sum_{b,i} g_{b,i} x_{b,i}^T,    row i of pos_embed.grad = sum_b g_{b,i},

the latter over the pictures in which position i is visible. Off the rows of the table's gradient (Q
an orthonormal basis of them)

    H = (I - Q Q^T) G   has row space   S,   orthonormal basis V (q, p),   q = N (B - 1) + k,

the span of the differences between the pictures at each position, and of every patch that MJP
masked; k counts the positions that are masked in all pictures. Then C = lstsq(A_v^T, G (I - P_S)),
A_v the visible rows, holds what all pictures have in common off S:

    (I - P_S) x_{b,i} = C_i  where position i is visible in picture b,  and c where it is masked,

with c = 0; where the gradient of E_unk is sent, the sum of the masked g_{b,i}, it is one more row
of A_v, q is one less and c is C's last row.

The first singular value of H beyond the q-th is the size e of the upload's errors, which tilt the
basis row v_j by e / s_j. So a patch x with the lift a = x V^T meets its equation up to

    e sqrt( |(a - L_i V^T) / s|^2 + |row i of (A_v^T)^+|^2 ),   L = lstsq(A_v^T, G).

**Guesses.** x_{b,i} = C_i + a_{b,i} V. Along V the gradients determine no picture and no mean; they
hold one superposition of the pictures, L_i = sum_j sum_b w_ij,b x_{b,j}, whose weights are unknown
but for their sums over b, 1 for i = j and 0 for other j.

mean       The g_{b,i} of a position differ from their mean as much across the rows of A as along
           them, and across they show: G = A^T X + noise, X the mean picture, with independent rows
           of noise of covariance H^T H / (D - v), v rows of A being visible. The likeliest X has

               B (X - m)^T Sigma^-1 (X - m) + sum_k (D - v) / s_k^2 |A^T (a_k - l_k)|^2  least,

           a and l the coordinates along V of X and L, s the singular values of H.
smoothest  The most probable single picture C + a V: close to the one with the least contrast where
           the others have much more.

**Several uploads of one batch** (`differences`). S is the same whatever the weights, while an
upload leaves D - N - 1 rows of H, as the gradients of LayerNorms' inputs are orthogonal to ones: so
R uploads show it where R (D - N - 1) >= N (B - 1). The patches off S are averaged by how exact they
are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.equations.completion import (
    FieldEnergy,
    complete,
    conjugate_gradients,
    field_energy,
)
from attacks.equations.patch_system import PatchSystem, least_squares
from attacks.equations.span import Knowledge, noise_edge, off_rows
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Refusal
from mjp_privacy.models import MJPVisionTransformer

GAP = 100.0  # by which a singular value exceeds the one after it where the rank ends
WEAK = 3.0  # times the noise: a direction no stronger than this is one of the noise


@dataclass(frozen=True)
class BatchSpan:
    """(I - P_S) x_i = C_i for the N positions of every picture of one upload, and, as one row more,
    for the masked patches of all pictures; float64."""

    basis: Tensor  # V (q, p), orthonormal rows
    complement: Tensor  # C (N + 1, p), its last row c, as where masked in all pictures
    hidden: Tensor  # (N,) bool: masked in all pictures
    strength: Tensor  # (q,) singular values of H; infinite for a direction that is noise
    noise: float  # e
    mixture: Tensor  # L V^T (N + 1, q)
    gain: Tensor  # (N + 1,) by which errors of G enter a row of C
    mixed: bool = False  # a position may be visible in one picture and masked in another

    def known(self, visible: Tensor) -> Tensor:
        """The right-hand sides (N, p) of a picture that is visible at these positions (N,)."""
        return torch.where(visible.unsqueeze(-1), self.complement[:-1], self.complement[-1])

    def off(self, patches: Tensor) -> Tensor:
        """(I - P_S) applied to rows (..., p)."""
        return patches - (patches @ self.basis.mT) @ self.basis

    def tilt(self, directions: Tensor) -> Tensor:
        """How far off S unit vectors of S (m, p) may seem to lie because of errors; (m,)."""
        return self.noise * (directions @ self.basis.mT / self.strength).norm(dim=-1)

    def expected(self, patches: Tensor, visible: Tensor) -> Tensor:
        """How far patches (N, p) that stand in the upload may seem off their equations; (N,).

        visible  (N,) bool: the positions at which the picture is visible
        """
        mixture = torch.where(visible.unsqueeze(-1), self.mixture[:-1], self.mixture[-1])
        gain = torch.where(visible, self.gain[:-1], self.gain[-1])
        lift = patches @ self.basis.mT - mixture
        return self.noise * ((lift / self.strength).square().sum(-1) + gain.square()).sqrt()


def batch_span(
    system: PatchSystem, index: int, batch: int, precision: float, *, can_mask: bool = False
) -> BatchSpan:
    """The span of the upload at `index` of the system, taken for one of `batch` pictures.

    precision  eps of the numbers that were sent: errors are at least of this relative size
    can_mask   pictures may have masks of their own; the gradient of E_unk is used where it was sent
    """
    hidden, total = system.hidden[index], system.total[index]
    rows = system.rows[index][~hidden]
    sums = None if system.hidden_sum is None or not can_mask else system.hidden_sum[index]
    pooled = sums is not None and bool(sums.any())
    if sums is not None and pooled:
        rows = torch.cat((rows, sums[None]))
    _, s, vh = torch.linalg.svd(off_rows(total, rows), full_matrices=False)
    count = len(hidden) * (batch - 1) + int(hidden.sum()) - pooled
    count = max(0, min(count, len(s)))
    basis, strength = vh[:count], s[:count]
    noise = max(rounding_of(total, precision), float(s[count]) if count < len(s) else 0.0)
    # A direction of this size is one of the noise: no patch lies in it, so nothing tilts it.
    strength = torch.where(strength > WEAK * noise, strength, torch.inf)
    identity = torch.eye(len(total)).to(total)
    operator = least_squares(rows, identity)
    masked = torch.cat((operator, operator.new_zeros(1, len(total))))[int((~hidden).sum())]
    by_place = masked.expand(len(hidden) + 1, -1).clone()
    by_place[:-1][~hidden] = operator[: int((~hidden).sum())]
    solved = by_place @ total
    lift = solved @ basis.mT
    return BatchSpan(
        basis,
        solved - lift @ basis,
        hidden,
        strength,
        noise,
        lift,
        by_place.norm(dim=1),
        can_mask and (sums is None or pooled),
    )


def rounding_of(total: Tensor, precision: float) -> float:
    """The largest singular value to expect of the rounding of G (D, p), entry by entry."""
    deviation = precision / 2 * float(total.square().mean().sqrt())
    return noise_edge(deviation, *total.shape)


def pictures_by_rank(total: Tensor, patches: int, precision: float) -> int | None:
    """The number of pictures that the rank of G (D, p) shows; None where no gap shows a rank.

    G has rank N B, less where patches are equal or combinations of others. There its singular
    values drop by the factor GAP at least, down to the noise.
    """
    s = torch.linalg.svdvals(total).clamp_min(rounding_of(total, precision))
    drop, place = (s[:-1] / s[1:]).max(0)
    return math.ceil((int(place) + 1) / patches) if float(drop) > GAP else None


# two guesses from one upload ----------------------------------------------------------------------


SHOWN = 30.0
"""Times the noise that a direction's singular value must be to count as a difference of pictures.
What a weaker one leaks into the mixture is of the noise's size."""


@dataclass(frozen=True)
class Superposition:
    """What one upload says of the B pictures of its batch, and two guesses; normalised, float64."""

    span: BatchSpan
    energy: FieldEnergy
    basis: Tensor  # (q, p) the directions of the span's basis that exceed the noise
    mean: Tensor  # (N, p)
    smoothest: Tensor  # (N, p)

    def pictures(self, batch: int) -> Tensor:
        """Patches (B, N, p): the smoothest picture, and the mean of the others for each of them."""
        rest = (batch * self.mean - self.smoothest) / max(batch - 1, 1)
        return torch.stack([self.smoothest, *[rest] * (batch - 1)])

    @cached_property
    def units(self) -> tuple[Tensor, Tensor]:
        """Steps (q, p) along which patches of photographs have unit variance, and the L (q, q) that
        takes coordinates along the basis to such: L L^T = V Sigma^-1 V^T."""
        root = torch.linalg.cholesky(self.basis @ self.energy.patch_precision @ self.basis.mT)
        return torch.linalg.solve_triangular(root, self.basis, upper=False), root


def superposed(
    view: AttackerView, update: ClientUpdate, system: PatchSystem, index: int, prior: str
) -> Superposition:
    """Both guesses from the upload's step at `index`; `system` is the upload's patch system."""
    span = batch_span(system, index, update.batch, torch.finfo(update.dtype).eps)
    energy = field_energy(prior, view.model.patch_size, view.pixels).on(span.complement.device)
    shown = span.strength.isfinite() & (span.strength > SHOWN * span.noise)
    basis = span.basis[shown]
    rows = system.rows[index]
    free = max(rows.shape[1] - int((~span.hidden).sum()), 1)  # D - v, what visible rows leave
    variance = span.strength[shown].square() / free
    mixture = span.complement[:-1] + span.mixture[:-1] @ span.basis
    mean = _most_probable_mean(rows, mixture, basis, variance, energy, update.batch)
    common = mixture - (mixture @ basis.mT) @ basis
    smoothest = complete(Knowledge(common, basis, span.hidden), energy)
    return Superposition(span, energy, basis, mean, smoothest)


def _most_probable_mean(
    rows: Tensor,
    mixture: Tensor,
    basis: Tensor,
    variance: Tensor,
    energy: FieldEnergy,
    batch: int,
) -> Tensor:
    """The most probable mean picture (N, p): `mixture` (N, p) moved along the basis (q, p), where
    the noise of G has this variance (q,)."""
    if not len(basis):
        return mixture
    gram = rows @ rows.mT
    deviation = variance.sqrt()
    # The preconditioner takes each patch alone: U and R make both of its terms diagonal.
    alone = batch * (basis @ energy.patch_precision @ basis.mT)
    lengths, u = torch.linalg.eigh(gram)
    values, r = torch.linalg.eigh(deviation.unsqueeze(1) * alone * deviation)
    scale = lengths.clamp_min(0).unsqueeze(1) + values.clamp_min(values[-1] * 1e-12)

    def apply(a: Tensor) -> Tensor:
        """The quadratic's matrix, applied to coordinates (N, q)."""
        return batch * energy.force(a @ basis) @ basis.mT + (gram @ a) / variance

    def precondition(force: Tensor) -> Tensor:
        """The inverse of the quadratic's matrix with each patch alone."""
        return (u @ ((u.mT @ (force * deviation) @ r) / scale) @ r.mT) * deviation

    centre = energy.mean.repeat_interleave(energy.patch_size**2)
    pull = -batch * energy.force(mixture - centre) @ basis.mT
    return mixture + conjugate_gradients(apply, pull, precondition) @ basis


def too_many_pictures(model: MJPVisionTransformer, batch: int) -> Refusal | None:
    """Why the span of a batch of so many pictures does not show in an upload, or None.

    too_many_pictures(model, 16) for a ViT-Ti/16 at 64 px: "N B = 256 patches > D = 192: ..."
    """
    patches, width = model.grid.patches, model.embed_dim
    length = model.patch_embed.proj.weight[0].numel()
    most = min(width // patches, (length - 1) // patches + 1)
    if batch <= most:
        return None
    way_out = f"batches of at most {most} do" if most > 1 else "no batch of this model does"
    if patches * batch > width:
        text = (
            f"N B = {patches * batch} patches > D = {width}: the pictures of a batch show as a "
            f"span only where N B <= D; {way_out}"
        )
    else:
        text = (
            f"N (B - 1) = {patches * (batch - 1)} differences >= p = {length} pixels of a patch: "
            f"they leave nothing of it known unless N (B - 1) < p; {way_out}"
        )
    return Refusal("underdetermined", text)


# the span from several uploads --------------------------------------------------------------------


def differences(systems: Sequence[PatchSystem], batch: int, precision: float) -> Knowledge:
    """S and what lies off it, for uploads of one step of `batch` pictures each.

    precision  eps of the numbers that were sent
    """
    places = systems[0].rows.shape[1]
    left, solved, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    for system in systems:
        rows, total = system.rows[0], system.total[0]
        noise = rounding_of(total, precision)
        left.append(off_rows(total, rows) / noise)
        identity = torch.eye(len(total)).to(total)
        operator = least_squares(rows, identity)
        solved.append(operator @ total)
        weights.append((noise * operator.norm(dim=1, keepdim=True)).square().reciprocal())
    _, s, vh = torch.linalg.svd(torch.cat(left), full_matrices=False)
    count = min(places * (batch - 1), len(s))
    floor = max(float(s[count]) if count < len(s) else 0.0, 1.0)
    basis = vh[:count][s[:count] > SHOWN * floor]
    pairs = zip(solved, weights, strict=True)
    known = torch.stack([patches * weight for patches, weight in pairs]).sum(0)
    known = known / torch.stack(weights).sum(0)
    return Knowledge(known - (known @ basis.mT) @ basis, basis, systems[0].hidden[0])


def too_few_uploads(
    model: MJPVisionTransformer, batch: int, uploads: int, most: int
) -> Refusal | None:
    """Why uploads of so many pictures do not show a lattice of at most `most` steps, or None.

    too_few_uploads(model, 8, 1, 80) for a ViT-Ti/16 at 64 px: "N (B - 1) = 112 differences > 80".
    """
    patches, width = model.grid.patches, model.embed_dim
    length = model.patch_embed.proj.weight[0].numel()
    steps, shown = patches * (batch - 1), uploads * (width - patches - 1)
    limit = min(most, length - 1)
    if steps > limit:
        largest = 1 + limit // patches
        way_out = f"batches of at most {largest} do" if largest > 1 else "no batch is small enough"
        what = f"> {most}, the largest lattice that is reduced"
        if limit < most:
            what = f">= p = {length} pixels of a patch"
        text = f"N (B - 1) = {steps} differences {what}; {way_out}"
    elif steps > shown:
        enough = -(-steps // max(width - patches - 1, 1))
        text = (
            f"N (B - 1) = {steps} differences > R (D - N - 1) = "
            f"{uploads} * {width - patches - 1} "
            f"equations of {uploads} uploads; {enough} uploads of the same batch do"
        )
    else:
        return None
    return Refusal("underdetermined", text)
