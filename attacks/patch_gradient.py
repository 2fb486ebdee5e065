r"""Patch-gradient attack: the picture from two gradients of the unmodified model.

    patch_embed.proj.weight.grad = G = A^T X   with   A = the patch rows of pos_embed.grad,

so X = lstsq(A^T, G): for each pixel of a patch, D equations in N unknowns. It applies the
long-known identity of a linear layer (gradient of the weight = gradient of the output times input)
to the patch convolution; it needs no labels and works for any blocks and any loss. Exact for batch
1 with N <= D and nothing masked. Under MJP the masked rows of A are zero, so their patches are
missing from the system, and solving it anyway spoils all patches. With batch B the rows of A are
sums over the batch; the solution is a mixture of its pictures, which is scored as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.equations.least_squares import condition_and_rank, minimum_norm_solve
from attacks.equations.names import PATCH, TABLE
from attacks.equations.patch_system import PatchSystem, error_of, is_disturbed, patch_system
from attacks.equations.pictures import per_image, pictures
from attacks.equations.requirements import (
    lacks_patch_system,
    needs_patch_system,
    unless_underdetermined,
)
from attacks.prior import find_prior
from attacks.prior.wiener import PatchPrior, known_variance, noise_variance, posterior_patches
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class PatchGradient:
    """X = lstsq(A^T, G), of minimum norm."""

    name: ClassVar[str] = "patch_gradient"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table and the patch embedding."""
        return needs_patch_system(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload gives no linear system that determines the patches, or None."""
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Solve the system of the first upload."""
        return solve(view, patch_system(view, view.updates[0]))


def solve(view: AttackerView, system: PatchSystem) -> Reconstruction:
    """The minimum-norm pictures of a system, with its condition and rank."""
    patches, values = minimum_norm_solve(system.rows, system.total)
    return reconstruction(view, system, patches, values)


def reconstruction(
    view: AttackerView, system: PatchSystem, patches: Tensor, values: Tensor
) -> Reconstruction:
    """Solved patches as pictures; `values` are the singular values of the system's rows."""
    facts = condition_and_rank(system.rows, view.updates[0].dtype, values)
    return Reconstruction(
        pictures(view, patches),
        mask=per_image(view, system.hidden),
        diagnostics={name: per_image(view, fact) for name, fact in facts.items()},
    )


@dataclass(frozen=True)
class PatchPriorAttack:
    """The system of `patch_gradient`, solved with a Gaussian patch prior (`prior.wiener`).

    For noisy gradients (float16, noise added, an ill-conditioned A): mixtures of patches below the
    noise fall back to the prior. The noise level is measured on the upload, in the directions that
    A cannot reach, and is at least what the client's defences are known to add.
    """

    prior: str = "fitted"
    name: ClassVar[str] = "patch_prior"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table and the patch embedding."""
        return needs_patch_system(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """As `patch_gradient`, but too few equations are no reason: the prior fills in."""
        return unless_underdetermined(lacks_patch_system(view))

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Posterior mean of every patch under the prior and the measured noise."""
        update = view.updates[0]
        system = patch_system(view, update)
        patch, pixels = view.model.patch_size, view.pixels
        mean, covariance = find_prior(self.prior, patch=patch, size=pixels.size).patch(
            patch, pixels
        )
        noise = noise_variance(system.rows, system.total, update.dtype)
        prior = PatchPrior(mean.to(noise), covariance.to(noise))
        if is_disturbed(update):
            errors = (error_of(update, TABLE).to(noise), error_of(update, PATCH).to(noise))
            least = known_variance(*errors, prior, system.rows.shape[1])
            noise = torch.maximum(noise, least)
        patches, values = posterior_patches(system.rows, system.total, prior, noise)
        return reconstruction(view, system, patches, values)


@dataclass(frozen=True)
class PlainStep:
    """The first upload in which nothing was masked, solved as `patch_gradient` does.

    MJP's own recipe leaves half of the training steps unshuffled. The upload of such a step has no
    zero row in pos_embed.grad, so anybody can recognise it. A picture that was masked in every
    upload seen has no reconstruction.
    """

    uploads: int = 4
    name: ClassVar[str] = "plain_step"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"

    def __post_init__(self) -> None:
        if self.uploads < 1:
            raise UserError(f"plain_step, uploads: expected at least 1, got {self.uploads}.")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table and the patch embedding."""
        return needs_patch_system(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the uploads give no linear system that determines the patches, or None."""
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Solve each picture's first unmasked upload; `plain_upload` is its number, 0 for none."""
        systems = [patch_system(view, update) for update in view.updates]
        plain = torch.stack([~system.hidden.any(-1) for system in systems])  # (R, n)
        first_plain = plain.int().argmax(0)
        steps = torch.arange(plain.shape[1])
        rows = torch.stack([s.rows for s in systems])[first_plain, steps]
        total = torch.stack([s.total for s in systems])[first_plain, steps]
        chosen = PatchSystem(rows, total, torch.zeros_like(systems[0].hidden))
        solution = solve(view, chosen)
        reason = f"patches were masked in every one of the uploads seen ({len(systems)})"
        never_plain = per_image(view, ~plain.any(0)).nonzero().flatten().tolist()
        number = per_image(view, torch.where(plain.any(0), first_plain + 1, 0)).double()
        return Reconstruction(
            solution.images,
            diagnostics={**solution.diagnostics, "plain_upload": number},
            inapplicable=dict.fromkeys(never_plain, reason),
        )
