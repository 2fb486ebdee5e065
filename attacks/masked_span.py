r"""An attack that knows MJP: it solves for the span of the masked patches; a prior does the rest.

`equations.span` turns one upload, or several of one picture, into x_i = known_i + a_i B for every
patch, masked or not, at its true place: shuffling the masked patches does not change their span,
so their *order* is all that MJP hides, and the open part a is small. The LayerNorm of block 0
determines one more direction (`equations.tokens`). `equations.completion` fills what is left with
the most probable picture.

One upload (`masked_span`) leaves about as many open directions as patches were masked; several
(`multi_round`) leave as many as there are patches that were masked every time. With no open
direction left the picture is exact, and it is the *plain* one.

The picture from two weight gradients, without the gradient of the position table.

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
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from attacks.equations import PATCH, QKV, TABLE, UNKNOWN
from attacks.equations.filling import Completion, Filling, Solution, check_completion
from attacks.equations.least_squares import condition_and_rank
from attacks.equations.patch_system import (
    PatchSystem,
    check_uploads,
    error_of,
    gradient,
    is_disturbed,
    lacks_gradients,
    lacks_patch_system,
    needs_patch_system,
    patch_system,
)
from attacks.equations.sent_gradients import shows_its_rows
from attacks.equations.span import Knowledge, UploadSpan, combine, noise_edge, upload_span
from attacks.equations.tokens import TINY, from_tokens_alone, lacks_tokens, refine, token_equations
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer

WEIGHED = 5e-4
"""Relative error of the patch embedding's gradient above which the errors of several uploads are
weighed. Below it the exact intersection of their spans is better, by 5 dB at 1e-4 and 1 dB at 3e-4
under MJP (on photographs that appear in no results table): it knows which directions are open."""
WEIGHED_TOTAL = 5e-3
"""The same for one upload and for several where the rows are known exactly and only the patch
embedding's gradient has an error, as under autocast. bf16 rounds by 1.7e-3, where the exact
solution with its doubtful directions open was better on most of the few pictures that were
compared, in a fiftieth of the time."""


@dataclass(frozen=True)
class MaskedSpan:
    """The span of one upload.

    prior       `fitted`, `stationary`, or the path of a fitted prior
    completion  how open directions are filled: `field` joins patches across their borders, `patch`
                takes each patch alone, `none` leaves zeros
    tokens      use block 0's equations too, where the upload holds its gradient
    """

    prior: str = "fitted"
    completion: Completion = "field"
    tokens: bool = True
    uploads: int = field(default=1, init=False)
    name: ClassVar[str] = "masked_span"
    traits: ClassVar[tuple[str, ...]] = ("masks", "noise", "public photographs")
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"

    def __post_init__(self) -> None:
        check_completion(self.name, self.completion)
        check_uploads(self.name, self.uploads)

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding and block 0's qkv weights."""
        return (*needs_patch_system(model), QKV, UNKNOWN)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the uploads give no linear system for the patches, or None."""
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The most probable picture given the uploads' equations."""
        systems = [patch_system(view, update) for update in view.updates]
        facts = condition_and_rank(systems[0].rows, view.updates[0].dtype)
        return self.solve(view, systems).reconstruction(view, facts)

    def solve(self, view: AttackerView, systems: Sequence[PatchSystem]) -> Solution:
        """What the uploads determine, and the most probable patches; one system per upload."""
        rounds = [
            [upload_span(system, index, error=error) for index, error in enumerate(errors)]
            for system, errors in zip(systems, self._errors(view, systems), strict=True)
        ]
        knowledge = [
            self._with_tokens(view, index, combine(spans), spans)
            for index, spans in enumerate(zip(*rounds, strict=True))
        ]
        filling = Filling(self.prior, self.completion, exact=len(systems) > 1)
        patches = filling.patches(view, knowledge)
        noisy = self._weighs_errors(view)
        if any(noisy):
            patches = filling.weighed(view, systems, patches, noisy)
        return Solution(rounds, knowledge, patches, noisy)

    def _errors(self, view: AttackerView, systems: Sequence[PatchSystem]) -> list[list[float]]:
        """By upload and picture, the known error of an entry of G - A^T X; a normalised pixel is
        about 1."""
        errors = []
        for update, system in zip(view.updates, systems, strict=True):
            of_rows = error_of(update, TABLE).square() * system.rows.shape[1]
            errors.append((error_of(update, PATCH).square() + of_rows).sqrt().tolist())
        return errors

    def _weighs_errors(self, view: AttackerView) -> list[bool]:
        """For each picture, whether the error of its uploads is known and large enough to weigh."""
        several = WEIGHED if len(view.updates) > 1 else 0.0
        weighs = torch.zeros(len(view.updates[0].grads[PATCH]), dtype=torch.bool)
        for update in filter(is_disturbed, view.updates):
            total = gradient(view, update, PATCH).flatten(1)
            size = total.square().mean(1).sqrt().clamp_min(TINY)
            least = WEIGHED_TOTAL if shows_its_rows(update) else several
            weighs |= (error_of(update, PATCH) / size > least).cpu()
        return weighs.tolist()

    def _with_tokens(
        self, view: AttackerView, index: int, knowledge: Knowledge, spans: Sequence[UploadSpan]
    ) -> Knowledge:
        """Add block 0's equations of every upload. They apply to directions that are still open
        only, because they are less exact than the spans: used first, before the uploads were
        combined, they took six uploads of a picture from 90 to 65 dB."""
        if not self.tokens or not len(knowledge.basis):
            return knowledge
        refined = UploadSpan(knowledge.basis, knowledge.known, knowledge.hidden)
        for update, span in zip(view.updates, spans, strict=True):
            if lacks_tokens(view, update) is None:
                equations = token_equations(view, update, index)
                refined = refine(replace(refined, hidden=span.hidden), equations)
        return Knowledge(refined.complement, refined.basis, knowledge.hidden)


@dataclass(frozen=True)
class MultiRound(MaskedSpan):
    """The spans of several uploads of the same pixels with different masks: they intersect.

    uploads  how many; the plain picture is exact as soon as no patch was masked in all of them. The
             pixels must be the same every time: flips, crops or mixup on the client break it. The
             weights may differ.
    """

    uploads: Annotated[int, Field(ge=1, le=10_000)] = 6
    name: ClassVar[str] = "multi_round"


# without the table's gradient ---------------------------------------------------------------------


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
    traits: ClassVar[tuple[str, ...]] = ("masks", "public photographs")
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
