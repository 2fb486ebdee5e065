"""The system of `patch_gradient` with a picture prior, for noisy gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from attacks.equations.names import PATCH, TABLE
from attacks.equations.patch_system import error_of, is_disturbed, patch_system
from attacks.equations.requirements import (
    lacks_patch_system,
    needs_patch_system,
    unless_underdetermined,
)
from attacks.equations.solution import solution
from attacks.prior import find_prior
from attacks.prior.wiener import PatchPrior, known_variance, noise_variance, posterior_patches
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer


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
        return solution(view, system, patches, values)
