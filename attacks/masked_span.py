r"""What an attacker who knows MJP gets: the span of the masked patches, and the rest by a prior.

`equations.span` turns one upload, or several of one picture, into x_i = known_i + a_i B for every
patch, masked or not, at its true place: a shuffle among masked patches leaves their span as it is,
so the *order* of the masked patches is all that MJP hides, and the open part a is small. The
LayerNorm of block 0 closes one more direction (`equations.tokens`). `equations.completion` fills
what is left with the most probable picture.

One upload (`masked_span`) leaves about as many open directions as patches were masked; several
(`multi_round`) leave as many as patches that were masked every time. With none left the picture is
exact, and it is the *plain* one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from attacks.equations.filling import Completion, Filling, Solution, check_completion
from attacks.equations.least_squares import condition_and_rank
from attacks.equations.names import PATCH, QKV
from attacks.equations.requirements import lacks_patch_system, needs_patch_system
from attacks.equations.span import Knowledge, UploadSpan, combine, upload_span
from attacks.equations.system import (
    PatchSystem,
    error_of,
    gradient,
    is_disturbed,
    patch_system,
)
from attacks.equations.tokens import TINY, lacks_tokens, refine, token_equations
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer

WEIGHED = 5e-4
"""Error over size of the patch embedding's gradient from which on that of several uploads is
weighed. Below it their exact intersection is better, by 5 dB at 1e-4 and 1 dB at 3e-4 under MJP (on
photographs that no table shows): it knows which directions are open."""


@dataclass(frozen=True)
class MaskedSpan:
    """Uploads of the same pixels, each with its own mask and its own weights.

    prior       `fitted`, `stationary`, or the path of a fitted prior
    completion  `field`: patches joined across their borders; `patch`: each patch alone; `none`
    tokens      use block 0's equations too, where the upload holds its gradient
    uploads     exact against the plain picture as soon as no patch was masked in all of them. The
                pixels must be the same every time: flips, crops or mixup on the client break it.
    """

    prior: str = "fitted"
    completion: Completion = "field"
    tokens: bool = True
    uploads: int = 1
    name: str = "masked_span"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"

    def __post_init__(self) -> None:
        check_completion(self.name, self.completion)
        if self.uploads < 1:
            raise UserError(f"{self.name}: uploads is 1 or more, got {self.uploads}.")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        return (*needs_patch_system(model), QKV)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        systems = [patch_system(view, update) for update in view.updates]
        facts = condition_and_rank(systems[0].rows, view.updates[0].dtype)
        return self.solve(view, systems).reconstruction(view, facts)

    def solve(self, view: AttackerView, systems: Sequence[PatchSystem]) -> Solution:
        """What the uploads say, and the most probable patches. systems: one an upload."""
        rounds = [
            [upload_span(system, index) for index in range(len(system.hidden))]
            for system in systems
        ]
        knowledge = [
            self._with_tokens(view, index, combine(spans), spans)
            for index, spans in enumerate(zip(*rounds, strict=True))
        ]
        filling = Filling(self.prior, self.completion)
        patches = filling.patches(view, knowledge)
        noisy = self._weighs_errors(view)
        if any(noisy):
            patches = filling.weighed(view, systems, patches, noisy)
        return Solution(rounds, knowledge, patches, noisy)

    def _weighs_errors(self, view: AttackerView) -> list[bool]:
        """Of each picture, whether the error of its uploads is known and large enough to weigh."""
        least = WEIGHED if len(view.updates) > 1 else 0.0
        weighs = torch.zeros(len(view.updates[0].grads[PATCH]), dtype=torch.bool)
        for update in filter(is_disturbed, view.updates):
            total = gradient(view, update, PATCH).flatten(1)
            size = total.square().mean(1).sqrt().clamp_min(TINY)
            weighs |= (error_of(update, PATCH) / size > least).cpu()
        return weighs.tolist()

    def _with_tokens(
        self, view: AttackerView, index: int, knowledge: Knowledge, spans: Sequence[UploadSpan]
    ) -> Knowledge:
        """With block 0's equations of every upload, on the directions that are still open: they
        are less exact than the spans."""
        if not self.tokens or not len(knowledge.basis):
            return knowledge
        left = UploadSpan(knowledge.basis, knowledge.known, knowledge.hidden)
        for update, span in zip(view.updates, spans, strict=True):
            if lacks_tokens(view, update) is None:
                equations = token_equations(view, update, index)
                left = refine(replace(left, hidden=span.hidden), equations)
        return Knowledge(left.complement, left.basis, knowledge.hidden)
