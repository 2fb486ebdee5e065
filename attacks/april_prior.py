r"""APRIL's equations with a Gaussian patch prior, which lifts the rank ceiling and weighs noise.

With the altered block 0, b = Wq^T dWq + Wk^T dWk + Wv^T dWv = sum_i g_i z_i^T over all tokens. The
class token and what is added to the patches are known, so

    b - g_0 z_0^T - A^T (1 beta^T + E) = A^T X W^T + noise,

and `prior.wiener` gives the posterior mean E[X] in place of W^+ (lstsq): directions that W drops,
and mixtures of patches that are lost in float32 rounding, are filled by the prior instead of zeros
or noise. The noise level is measured on the upload itself. Masked positions (zero rows) have E_unk
added, and one row, dL/dE_unk, stands for all of them: it gives the content that they share, not
that of each patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.april import refused
from attacks.equations.least_squares import condition_and_rank
from attacks.equations.names import QKV, TABLE, UNKNOWN
from attacks.equations.patch_system import is_disturbed, located
from attacks.equations.pictures import pictures
from attacks.equations.requirements import unless_underdetermined
from attacks.prior import find_prior
from attacks.prior.wiener import PatchPrior, noise_variance, posterior_patches
from mjp_privacy.interfaces import AttackerView, Grads, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class AprilPrior:
    """APRIL with a prior: `prior` is `fitted`, `stationary`, or the path of a fitted prior."""

    prior: str = "fitted"
    name: ClassVar[str] = "april_prior"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "april_block"
    uploads: ClassVar[int] = 1

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """As `april`, with the gradient of the unknown embedding where the model has one."""
        return (TABLE, QKV, UNKNOWN) if model.unk_embed is not None else (TABLE, QKV)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """As `april`, but too few equations are no reason: the prior fills in."""
        return unless_underdetermined(refused(view, self.needs(view.model)))

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Posterior mean of every patch; all masked patches of an image get the same content."""
        model, update = view.model, view.updates[0]
        table_grads = update.grads[TABLE].squeeze(1).double()
        hidden = (table_grads[:, 1:] == 0).all(-1)
        if is_disturbed(update):
            hidden = located(view, update)
        rows, total = self._system(model, update.grads, table_grads)
        patch, pixels = model.patch_size, view.pixels
        mean, covariance = find_prior(self.prior, patch=patch, size=pixels.size).patch(
            patch, pixels
        )
        weight = model.patch_embed.proj.weight.detach().double().flatten(1)
        prior = PatchPrior(mean.to(weight), covariance.to(weight), weight)
        noise = noise_variance(rows, total, update.dtype)
        solved, _ = posterior_patches(rows, total, prior, noise)
        shared = solved[:, -1:] if model.unk_embed is not None else solved[:, :1]
        patches = torch.where(hidden.unsqueeze(-1), shared, solved[:, : hidden.shape[1]])
        facts = condition_and_rank(table_grads, update.dtype)
        return Reconstruction(
            pictures(view, patches), mask=hidden, diagnostics={**facts, "noise_std": noise.sqrt()}
        )

    def _system(
        self, model: MJPVisionTransformer, grads: Grads, table_grads: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A (n, N or N+1, D), its last row dL/dE_unk if there is one, and A^T X W^T (n, D, D)."""
        qkv = model.get_parameter(QKV).detach().double()
        total = qkv.mT @ grads[QKV].double()
        bias = model.patch_bias.detach().double()
        added = model.table.detach().double()[0]  # (N+1, D), class row first
        class_token = added[:1] + model.cls_token.detach().double()[0]
        constants = torch.cat((class_token, added[1:] + bias))
        rows = table_grads
        if model.unk_embed is not None:
            rows = torch.cat((rows, grads[UNKNOWN].squeeze(1).double()), dim=1)
            constants = torch.cat((constants, model.unk_embed.detach().double()[0] + bias))
        return rows[:, 1:], total - rows.mT @ constants
