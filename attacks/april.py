r"""APRIL's closed form (arXiv 2112.14087), as breaching runs it, and a variant that knows E_unk.

With a block 0 that has neither norm1 nor residuals, attention sees z itself, and one upload holds

    A = dL/dE_pos (one row per token),   b = Wq^T dWq + Wk^T dWk + Wv^T dWv = A^T Z.

So Z = lstsq(A^T, b), and each patch is x_i = W^+ (z_i - e_i - beta). Two limits come from
arithmetic and must not be taken for privacy: W^+ cannot restore what W drops (width below patch
length: the rank ceiling), and a large cond(A) uses up the gradient's precision. Apart from these
the solution is exact for batch 1 with N+1 <= D. E_unk is the unknown embedding that MJP adds at
masked positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attacks.equations.least_squares import condition_and_rank
from attacks.equations.names import QKV, TABLE, UNKNOWN
from attacks.equations.pictures import to_unit_range
from attacks.equations.requirements import lacks_positions, no_gradient, too_few_equations
from attacks.equations.tokens import sees_a_norm
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images

if TYPE_CHECKING:
    from attacks.breaching.closed_form import BatchedAprilAttacker


@dataclass(frozen=True)
class April:
    """The published attack: `pos_embed.grad` as uploaded, the position table subtracted everywhere.

    engine  `batched`: many images at once, in float64; `breaching`: that package's own code, image
            by image. They give the same images; `breaching` is the reference.
    """

    engine: Literal["batched", "breaching"] = "batched"
    name: ClassVar[str] = "april"
    published: ClassVar[bool] = True
    victim: ClassVar[Literal["intact", "april_block"]] = "april_block"
    uploads: ClassVar[int] = 1
    _attackers: WeakKeyDictionary[MJPVisionTransformer, BatchedAprilAttacker] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.engine not in ("batched", "breaching"):
            raise UserError(f"april: engine is 'batched' or 'breaching', got {self.engine!r}.")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table and of block 0's query, key and value weights."""
        return (TABLE, QKV)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why APRIL's equations do not hold or have too few rows for this upload, or None."""
        if self.engine == "breaching" and view.model.patch_embed.proj.bias is None:
            text = "breaching's own code needs a bias in the patch embedding; batched does not"
            return Refusal("model", text)
        return refused(view, self.needs(view.model))

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Solve for the embeddings and invert the patch embedding, one image per client step."""
        update = view.updates[0]
        table_grads = update.grads[TABLE].squeeze(1)
        if self.engine == "breaching":
            from attacks.breaching.closed_form import reconstruct_one_by_one

            images = reconstruct_one_by_one(view.model, update.grads, view.pixels, update.dtype)
            diagnostics = condition_and_rank(table_grads, update.dtype)
        else:
            images, singular_values = self._batched(view, table_grads)
            diagnostics = condition_and_rank(table_grads, update.dtype, singular_values)
        return Reconstruction(to_unit_range(view, images), diagnostics=diagnostics)

    def _batched(self, view: AttackerView, table_grads: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images (n, C, H, W) and the singular values of A."""
        attacker = self.attacker(view.model)
        z, singular_values = attacker.embeddings(table_grads, view.updates[0].grads[QKV])
        z = z - view.model.table.detach().double()
        patches = attacker.patches(z[:, 1:])
        return to_images(patches, view.model.patch_size, len(view.pixels.mean)), singular_values

    def attacker(self, model: MJPVisionTransformer) -> BatchedAprilAttacker:
        """The attacker of this model, kept because it holds the inverse of the patch embedding."""
        if model not in self._attackers:
            from attacks.breaching.closed_form import BatchedAprilAttacker

            self._attackers[model] = BatchedAprilAttacker(model)
        return self._attackers[model]


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
class UnknownAwareApril:
    """APRIL by an attacker who knows that the client uses MJP.

    The zero rows of `pos_embed.grad` show which positions are masked, and `unk_embed.grad` is the
    sum of the gradients there. It enters the system as one row that stands for all of them,

        [A_visible; dL/dE_unk]^T [Z_visible; z_unk] = b,

    and z_unk - E_unk is inverted for every masked position: the content that the masked patches
    have in common, not that of each patch.
    """

    engine: Literal["batched"] = "batched"
    april: April = field(default_factory=April, init=False, repr=False, compare=False)
    name: ClassVar[str] = "april_unk_aware"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "april_block"
    uploads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.engine != "batched":
            raise UserError(
                f"april_unk_aware runs in the batched engine only: expected engine 'batched', got "
                f"{self.engine!r}."
            )

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
        attacker = self.april.attacker(model)
        z, singular_values = attacker.embeddings(rows, update.grads[QKV])
        hidden = (table_grads[:, 1:] == 0).all(-1)
        masked_embedding = z[:, -1:] - model.unk_embed.detach().double()
        visible_embeddings = z[:, 1:-1] - model.table.detach().double()[:, 1:]
        embeddings = torch.where(hidden.unsqueeze(-1), masked_embedding, visible_embeddings)
        images = to_images(attacker.patches(embeddings), model.patch_size, len(view.pixels.mean))
        return Reconstruction(
            to_unit_range(view, images),
            mask=hidden,
            diagnostics=condition_and_rank(rows, update.dtype, singular_values)
            | {"zero_rows": (table_grads == 0).all(-1).sum(-1).double()},
        )
