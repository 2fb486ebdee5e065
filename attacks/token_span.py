"""The picture from two weight gradients, without the position table's.

Freezing the position embeddings, or keeping their gradient at home, leaves two things in the
upload: the row space of patch_embed.proj.weight.grad, which is the span of all patches, and block
0's equations (`equations.tokens`). Together they determine every patch where

    D - N - 2 >= N + 1     (equations a patch against unknowns),

and the rows beta + e_i are linearly independent. The first holds for ViT-B/16 and not for ViT-S/16;
the second for learned tables and not for the fixed sine table (sums of a row's and a column's
vector). Elsewhere the prior fills what stays open. Masked
patches are told by which embedding fits their place. Batch 1; the embeddings' values are public.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attacks.equations.span import Knowledge, UploadSpan, noise_edge
from attacks.equations.system import PATCH, error_of, gradient, missing
from attacks.equations.tokens import QKV, from_tokens_alone, lacks_tokens, token_equations
from attacks.masked_span import MultiRound
from mjp_privacy.interfaces import AttackerView, ClientUpdate
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class TokenSpan(MultiRound):
    """`uploads` of the same pixels; one is enough where the equations are."""

    uploads: int = 1  # type: ignore[misc]
    name: ClassVar[str] = "token_span"

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        return (PATCH, QKV)

    def unsupported(self, view: AttackerView) -> str | None:
        reason = missing(view, PATCH, QKV)
        return reason or next(filter(None, (lacks_tokens(view, u) for u in view.updates)), None)

    def spans(self, view: AttackerView, update: ClientUpdate) -> list[UploadSpan]:
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

    def weighs_noise(self, view: AttackerView) -> list[bool]:
        """Its equations are not weighed; noise that drowns them leaves directions open."""
        return [False] * len(view.updates[0].grads[PATCH])

    def closed(
        self, view: AttackerView, index: int, knowledge: Knowledge, spans: Sequence[UploadSpan]
    ) -> Knowledge:
        """They are in the spans already."""
        return knowledge

    def conditions(self, view: AttackerView) -> dict[str, Tensor]:
        return {}
