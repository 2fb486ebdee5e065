r"""APRIL's closed form (arXiv 2112.14087), as breaching runs it, knowing E_unk, and with a prior.

With a block 0 that has neither norm1 nor residuals, attention sees z itself, and one upload holds

    A = dL/dE_pos (one row per token),   b = Wq^T dWq + Wk^T dWk + Wv^T dWv = A^T Z.

So Z = lstsq(A^T, b), and each patch is x_i = W^+ (z_i - e_i - beta). Two limits come from
arithmetic and must not be taken for privacy: W^+ cannot restore what W drops (width below patch
length: the rank ceiling), and a large cond(A) uses up the gradient's precision. Apart from these
the solution is exact for batch 1 with N+1 <= D.

`april_prior` lifts the rank ceiling and weighs noise. The class token and what is added to the
patches are known, so

    b - g_0 z_0^T - A^T (1 beta^T + E) = A^T X W^T + noise,

and `prior.gaussian` gives E[X] in place of W^+ (lstsq), with the noise measured on the upload.
Masked positions (zero rows) have E_unk added, and one row, dL/dE_unk, stands for all of them: it
gives the content that they share, not that of each patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.equations import QKV, TABLE, UNKNOWN
from attacks.equations.patch_system import (
    condition_and_rank,
    lacks_positions,
    located,
    minimum_norm_solve,
    no_gradient,
    of_steps,
    pictures_of,
    pseudo_inverse,
    to_unit_range,
    too_few_equations,
    unless_underdetermined,
)
from attacks.equations.span import sees_a_norm
from attacks.prior.files import patch_moments
from attacks.prior.gaussian import PatchPrior, noise_variance, posterior_patches
from mjp_privacy.interfaces import AttackerView, Grads, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class April(Usual):
    """The published attack: `pos_embed.grad` as uploaded, the position table subtracted everywhere.

    engine  `batched`: many images at once, in float64; `breaching`: that package's own code, image
            by image. They give the same images; `breaching` is the reference.
    """

    engine: Literal["batched", "breaching"] = "batched"
    name: ClassVar[str] = "april"
    traits: ClassVar[tuple[str, ...]] = ("rank",)
    published: ClassVar[bool] = True
    victim: ClassVar[Literal["intact", "april_block"]] = "april_block"

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table and of block 0's query, key and value weights."""
        return (TABLE, QKV)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why APRIL's equations do not hold or have too few rows for this upload, or None."""
        if self.engine == "breaching" and view.model.patch_embed.proj.bias is None:
            text = "breaching's own code needs a bias in the patch embedding; batched does not"
            return Refusal("model", text)
        if self.engine == "breaching" and len(set(view.model.grid)) > 1:
            return Refusal("model", "breaching's own code takes square pictures; batched does not")
        return refused(view, self.needs(view.model))

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Solve for the embeddings and invert the patch embedding, one image per client step."""
        update = view.updates[0]
        table_grads = update.grads[TABLE].squeeze(1)
        if self.engine == "breaching":
            from attacks.breaching import april_one_by_one

            images = april_one_by_one(view.model, update.grads, view.pixels, update.dtype)
            facts = condition_and_rank(table_grads, update.dtype)
            return Reconstruction(to_unit_range(view, images), diagnostics=facts)
        weight = view.model.get_parameter(QKV).detach()
        z, singular_values = minimum_norm_solve(table_grads, update.grads[QKV], factor=weight)
        z = z - view.model.table.detach().double()
        diagnostics = condition_and_rank(table_grads, update.dtype, singular_values)
        images = pictures_of(view, inverted(view.model, z[:, 1:]))
        return Reconstruction(images, diagnostics=diagnostics)


def inverted(model: MJPVisionTransformer, z: Tensor) -> Tensor:
    """Patches W^+ (z - bias) (n, N, p) of embeddings z (n, N, D), positions subtracted."""
    inverse = pseudo_inverse(model.patch_embed.proj.weight.detach().double().flatten(1))
    return (z - model.patch_bias.detach().double()) @ inverse.mT


def refused(view: AttackerView, names: Sequence[str]) -> Refusal | None:
    """Why APRIL's equations cannot be solved with the gradients of these parameters, or None."""
    model, update = view.model, view.updates[0]
    if (refusal := lacks_positions(model)) is not None:
        return refusal
    if missing := [name for name in names if name not in update.grads]:
        return no_gradient(model, *missing)
    if update.batch != 1:
        return Refusal("batch", f"APRIL is for batch 1; the client's batch is {update.batch}")
    if update.kind != "gradient":
        text = "APRIL needs a gradient; the upload is a weight difference"
        return Refusal("weight_difference", text)
    if (refusal := sees_a_norm(model)) is not None:
        return refusal
    if model.dist_token is not None:
        text = "the model has a distillation token, whose row APRIL's equations leave out"
        return Refusal("model", text)
    if model.index_embed is not None:
        text = "APRIL subtracts the position table alone; the model adds an index table too"
        return Refusal("model", text)
    return too_few_equations(model, extra=1, who="APRIL's equations")


@dataclass(frozen=True)
class UnknownAwareApril(Usual):
    """APRIL by an attacker who knows that the client uses MJP.

    The zero rows of `pos_embed.grad` show which positions are masked, and `unk_embed.grad` is the
    sum of the gradients there. It enters the system as one row that stands for all of them,

        [A_visible; dL/dE_unk]^T [Z_visible; z_unk] = b,

    and z_unk - E_unk is inverted for every masked position: the content that the masked patches
    have in common, not that of each patch.
    """

    name: ClassVar[str] = "april_unk_aware"
    traits: ClassVar[tuple[str, ...]] = ("rank", "masks")
    victim: ClassVar[Literal["intact", "april_block"]] = "april_block"

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """As `april`, with the gradient of the unknown embedding where the model has one."""
        return (TABLE, QKV, UNKNOWN) if model.unk_embed is not None else (TABLE, QKV)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """As `april`; a model without an unknown embedding is refused too."""
        if view.model.unk_embed is None:
            return Refusal("unknown_embedding", "the model has no unknown embedding")
        return refused(view, self.needs(view.model))

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Read the mask off the zero rows, then solve with one row for all masked patches."""
        model, update = view.model, view.updates[0]
        assert model.unk_embed is not None
        table_grads = update.grads[TABLE].squeeze(1)
        rows = torch.cat((table_grads, update.grads[UNKNOWN].squeeze(1)), dim=1)
        weight = model.get_parameter(QKV).detach()
        z, singular_values = minimum_norm_solve(rows, update.grads[QKV], factor=weight)
        hidden = located(view, update)
        masked_embedding = z[:, -1:] - model.unk_embed.detach().double()
        visible_embeddings = z[:, 1:-1] - model.table.detach().double()[:, 1:]
        z = torch.where(hidden.unsqueeze(-1), masked_embedding, visible_embeddings)
        return Reconstruction(
            pictures_of(view, inverted(model, z)),
            mask=hidden,
            diagnostics=condition_and_rank(rows, update.dtype, singular_values)
            | {"zero_rows": (table_grads == 0).all(-1).sum(-1).double()},
        )


# with a prior -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AprilPrior(UnknownAwareApril):
    """APRIL with a prior: `prior` is `fitted`, `stationary`, or the path of a fitted prior."""

    prior: str = "fitted"
    name: ClassVar[str] = "april_prior"
    traits: ClassVar[tuple[str, ...]] = ("masks", "public photographs")

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """As `april`, but too few equations are no reason: the prior fills in."""
        return unless_underdetermined(refused(view, self.needs(view.model)))

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Posterior mean of every patch; all masked patches of an image get the same content."""
        model, update = view.model, view.updates[0]
        table_grads = update.grads[TABLE].squeeze(1).double()
        hidden = located(view, update)
        rows, total = self._system(model, update.grads, table_grads)
        mean, covariance = patch_moments(self.prior, model.patch_size, view.pixels)
        weight = model.patch_embed.proj.weight.detach().double().flatten(1)
        prior = PatchPrior(mean.to(weight), covariance.to(weight), weight)
        noise = noise_variance(rows, total, update.dtype)
        solved, _ = posterior_patches(rows, total, prior, noise)
        shared = solved[:, -1:] if model.unk_embed is not None else solved[:, :1]
        patches = torch.where(hidden.unsqueeze(-1), shared, solved[:, : hidden.shape[1]])
        facts = condition_and_rank(table_grads, update.dtype)
        return of_steps(view, patches, hidden, {**facts, "noise_std": noise.sqrt()})

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
