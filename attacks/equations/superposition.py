r"""The pictures of a batch, guessed from what one upload says of them together.

With equations.batch_span's V, C and L, the patches x_{b,i} of all B pictures obey

    x_{b,i} = C_i + a_{b,i} V.

Off V the pictures are equal at each position, so the mean picture is C there, exactly. Along V the
two gradients determine no picture and no mean: whatever x'_{b,i} = C_i + a'_{b,i} V spans the same
space has gradients g' of its own, with the same sums over b and the same G. What they hold along V
is one superposition of the pictures,

    L_i = sum_j sum_b w_ij,b x_{b,j},   w_ij,b = (row i of (A^T)^+) . g_{b,j},

whose weights are unknown but for their sums over b, 1 for i = j and 0 for other j. Two guesses come
from it. Both know what photographs look like (`equations.completion`), and they differ in what they
take the part along V for.

mean       The g_{b,i} of a position differ from their mean as much across the rows of A as along
           them, and across they show: H = (I - Q Q^T) G. So G = A^T X + noise, X the mean picture,
           with independent rows of noise of covariance H^T H / (D - v), v rows of A being visible.
           The most probable X minimises

               B (X - m)^T Sigma^-1 (X - m) + sum_k (D - v) / s_k^2 |A^T (a_k - l_k)|^2,

           a and l the coordinates along V of X and L, s the singular values of H.
smoothest  The most probable single picture C + a V. Every picture of the batch has this form; the
           guess comes close to the one with the least contrast where the others have much more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.equations.batch_span import BatchSpan, batch_span
from attacks.equations.completion import (
    FieldEnergy,
    complete,
    conjugate_gradients,
    field_energy,
)
from attacks.equations.patch_system import PatchSystem
from attacks.equations.span import Knowledge
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Refusal
from mjp_privacy.models import MJPVisionTransformer

SHOWN = 30.0
"""Times the noise that a direction's singular value must be to count as a difference of pictures.
What a weaker one leaks into the mixture is of the noise's size."""


@dataclass(frozen=True)
class Superposition:
    """What one upload says of the B pictures of its batch, and two guesses; normalised, float64."""

    span: BatchSpan
    basis: Tensor  # (q, p) the directions of the span's basis that exceed the noise
    mean: Tensor  # (N, p)
    smoothest: Tensor  # (N, p)

    def pictures(self, batch: int) -> Tensor:
        """Patches (B, N, p): the smoothest picture, and the mean of the others for each of them."""
        rest = (batch * self.mean - self.smoothest) / max(batch - 1, 1)
        return torch.stack([self.smoothest, *[rest] * (batch - 1)])


def superposed(
    view: AttackerView, update: ClientUpdate, system: PatchSystem, index: int, prior: str
) -> Superposition:
    """Both guesses from the upload's step at `index`; `system` is the upload's patch system."""
    span = batch_span(system, index, update.batch, torch.finfo(update.dtype).eps)
    energy = field_energy(prior, view.model.patch_size, view.pixels).on(span.complement.device)
    shown = span.strength.isfinite() & (span.strength > SHOWN * span.noise)
    basis = span.basis[shown]
    rows = system.rows[index]
    variance = span.strength[shown].square() / _free(rows, span.hidden)
    mixture = span.complement + span.mixture @ span.basis
    mean = _most_probable_mean(rows, mixture, basis, variance, energy, update.batch)
    common = mixture - (mixture @ basis.mT) @ basis
    return Superposition(span, basis, mean, complete(Knowledge(common, basis, span.hidden), energy))


def _free(rows: Tensor, hidden: Tensor) -> int:
    """D - v: how many directions the visible rows of A leave over, at least 1."""
    return max(rows.shape[1] - int((~hidden).sum()), 1)


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
    patches, width = model.patch_embed.num_patches, model.embed_dim
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
