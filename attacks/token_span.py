"""The picture from two weight gradients, without the gradient of the position table.

A client that freezes the position embeddings, or does not upload their gradient, still uploads two
things: the row space of patch_embed.proj.weight.grad, which is the span of all patches, and block
0's equations (`equations.tokens`). Together they determine every patch where

    D - N - 2 >= N + 1     (equations per patch against unknowns per patch),

and the rows beta + e_i are linearly independent. The first holds for ViT-B/16 and not for ViT-S/16;
the second for learned tables and not for the fixed sine table (sums of a row's and a column's
vector). Elsewhere the prior fills what stays open. A patch is taken for masked where E_unk fits
block 0's equations and its own position embedding does not. Needs batch 1 and the values of the
embeddings, which are public.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from attacks.equations.filling import Completion, Filling, Solution, check_completion
from attacks.equations.names import PATCH, QKV
from attacks.equations.patch_system import error_of, gradient
from attacks.equations.requirements import check_uploads, lacks_gradients
from attacks.equations.span import UploadSpan, combine, noise_edge
from attacks.equations.tokens import from_tokens_alone, lacks_tokens, token_equations
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class TokenSpan:
    """Block 0's equations in the span of the patches.

    prior, completion  as in `masked_span`
    uploads            of the same pixels; one is enough where its equations determine the patches
    """

    prior: str = "fitted"
    completion: Completion = "field"
    uploads: Annotated[int, Field(ge=1, le=10_000)] = 1
    name: ClassVar[str] = "token_span"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"

    def __post_init__(self) -> None:
        check_completion(self.name, self.completion)
        check_uploads(self.name, self.uploads)

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the patch embedding and of block 0's qkv weights."""
        return (PATCH, QKV)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why an upload lacks a gradient or has no equations of block 0, or None."""
        refusals = (lacks_tokens(view, update) for update in view.updates)
        return lacks_gradients(view, PATCH, QKV) or next(filter(None, refusals), None)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The most probable picture given block 0's equations of every upload."""
        rounds = [_spans(view, update) for update in view.updates]
        knowledge = [combine(spans) for spans in zip(*rounds, strict=True)]
        patches = Filling(self.prior, self.completion).patches(view, knowledge)
        # Errors are not weighed: equations that noise drowns are dropped, so directions stay open.
        noisy = [False] * len(knowledge)
        return Solution(rounds, knowledge, patches, noisy).reconstruction(view)


def _spans(view: AttackerView, update: ClientUpdate) -> list[UploadSpan]:
    """What one upload says about each of its pictures."""
    total = gradient(view, update, PATCH).flatten(2)
    error = error_of(update, PATCH)
    return [
        from_tokens_alone(
            rows,
            token_equations(view, update, index),
            noise_edge(float(error[index]), *rows.shape),
        )
        for index, rows in enumerate(total)
    ]
