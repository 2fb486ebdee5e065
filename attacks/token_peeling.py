r"""Every patch of an upload from block 0's gradients, masked or not, with or without positions.

`equations.token_peeling` takes tokens out of the gradients of block 0's layers one after another;
`equations.token_patches` solves each one's few equations for its patch and finds its place. Neither
the position table's gradient, a prior, labels nor whole pixel values are needed, and masked patches
are as exact as others. Their order is not in the gradient: borders tell it (`jigsaw`), or, without
a table, attention (`equations.patch_order`). Attention tells the pictures of a batch apart, too.

Where the client sends no gradient of the patch embedding, patches with fewer values than the
embedding is wide stay exact; of larger ones the embedding is known, and the prior says the rest.

It needs B (N + 1) < D tokens that gradients show above their rounding: those of trained networks,
and of networks that pool all tokens. A last block's show the class token alone. Where tokens are
missing, the prior fills their patches. `certain` says which pictures their layers' inputs verify,
as they were fed; with masked patches it is never said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.budget import image
from attacks.equations.layers import client_model
from attacks.equations.patch_system import pictures_of
from attacks.equations.token_batches import BatchTokens
from attacks.equations.token_patches import (
    StepPicture,
    StepTokens,
    lacks_equations,
    lacks_tokens,
    needs_tokens,
)
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class TokenPeeling(Usual):
    """All tokens of a step by block 0's equations.

    prior  of the patches that are not found: `fitted`, `stationary`, or the path of a fitted prior
    """

    prior: str = "fitted"
    name: ClassVar[str] = "token_peeling"
    traits: ClassVar[tuple[str, ...]] = ("masks", "batches", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> tuple[str, ...]:
        """Gradients of block 0's layers behind its attention; where they are sent, of the patch
        embedding and, to verify, of the first blocks' linear layers."""
        return needs_tokens(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why no token can be found in the upload, or None."""
        return lacks_tokens(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures of every step."""
        update = view.updates[0]
        model = client_model(view, update).double()
        if why := lacks_equations(model, update.batch):
            places = range(update.steps_in_all * update.batch)
            return Reconstruction(None, inapplicable=dict.fromkeys(places, why))
        of_step = StepTokens if update.batch == 1 else BatchTokens
        found = list[StepPicture]()
        for step in range(update.steps_in_all):
            with image(step * update.batch, update.batch):
                found += of_step(view, update, step, model, self.prior).pictures()
        images = [self._shown(view, one) for one in found]
        known = [one.token >= 0 for one in found]
        masks = view.model.unk_embed is not None and view.model.pos_embed is not None
        orders = torch.stack([one.order for one in found]) if masks else None
        return Reconstruction(
            pictures_of(view, torch.stack(images)),
            mask=torch.stack([one.hidden for one in found]) if masks else None,
            permutation=orders if view.against == "plain" else None,
            diagnostics={
                "certain": torch.tensor([one.is_verified for one in found]).double(),
                "outside": torch.tensor([one.outside for one in found]).double(),
                "patches_found": torch.stack(known).double().mean(1),
                "token_misfit": torch.tensor([one.misfit for one in found]).double(),
            },
        )

    @staticmethod
    def _shown(view: AttackerView, found: StepPicture) -> Tensor:
        """The patches; the mean of masked ones in their places, where the picture as fed is wanted:
        their order there is not in the gradient."""
        masked = view.model.unk_embed is not None and bool(found.hidden.any())
        if view.against == "plain" or not masked:
            return found.patches
        patches = found.patches.clone()
        patches[found.hidden] = patches[found.hidden].mean(0)
        return patches
