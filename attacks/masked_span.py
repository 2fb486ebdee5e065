r"""What an attacker who knows MJP gets: the span of the masked patches, and the rest by a prior.

`equations.span` turns one upload, or several of one picture, into x_i = known_i + a_i B for every
patch, masked or not, at its true place: a shuffle among masked patches leaves their span as it is,
so the *order* of the masked patches is all that MJP hides, and the open part a is small. The
LayerNorm of block 0 closes one more direction (`equations.tokens`). `equations.completion`
fills what is left with the most probable picture.

One upload leaves about as many open directions as patches were masked; several leave as many as
patches that were masked every time. With none left the picture is exact, and it is the *plain* one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.equations.completion import FieldEnergy, complete, complete_patchwise
from attacks.equations.least_squares import condition_and_rank
from attacks.equations.noisy_span import most_probable
from attacks.equations.noisy_upload import noisy_upload
from attacks.equations.pictures import per_image, pictures
from attacks.equations.requirements import lacks_patch_system, needs_patch_system
from attacks.equations.span import Knowledge, UploadSpan, combine, upload_span
from attacks.equations.system import PATCH, error_of, gradient, is_disturbed, patch_system
from attacks.equations.tokens import QKV, TINY, lacks_tokens, refine, token_equations
from attacks.prior import find_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Reconstruction
from mjp_privacy.models import MJPVisionTransformer

WEIGHED = 5e-4
"""Error over size of the patch embedding's gradient from which on that of several uploads is
weighed. Below it their exact intersection is better, by 5 dB at 1e-4 and 1 dB at 3e-4 under MJP (on
photographs that no table shows): it knows which directions are open."""

COMPLETIONS = ("field", "patch", "none")


@dataclass(frozen=True)
class MaskedSpan:
    """One upload.

    prior       `fitted`, `stationary`, or the path of a fitted prior
    completion  `field`: patches joined across their borders; `patch`: each patch alone; `none`
    tokens      use block 0's equations too, where the upload holds its gradient
    """

    prior: str = "fitted"
    completion: Literal["field", "patch", "none"] = "field"
    tokens: bool = True
    name: ClassVar[str] = "masked_span"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.completion not in COMPLETIONS:
            raise UserError(
                f"{self.name}: completion is one of {', '.join(COMPLETIONS)}, got "
                f"{self.completion!r}."
            )

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        return (*needs_patch_system(model), QKV)

    def unsupported(self, view: AttackerView) -> str | None:
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        rounds = [self.spans(view, update) for update in view.updates]
        knowledge, patches = self.filled(view, rounds)
        wanted = [_wanted(view, k.hidden, x) for k, x in zip(knowledge, patches, strict=True)]
        facts = {
            **self.conditions(view),
            "open_directions": _open_directions(knowledge, self.weighs_noise(view)),
            "always_masked": torch.stack([k.hidden.sum() for k in knowledge]).double(),
        }
        return Reconstruction(
            pictures(view, torch.stack(wanted)),
            mask=per_image(view, torch.stack([span.hidden for span in rounds[0]])),
            diagnostics={name: per_image(view, fact) for name, fact in facts.items()},
        )

    def filled(
        self, view: AttackerView, rounds: Sequence[Sequence[UploadSpan]]
    ) -> tuple[list[Knowledge], list[Tensor]]:
        """What the uploads say of each picture, and its most probable patches (N, p)."""
        knowledge = [
            self.closed(view, index, combine(spans), spans)
            for index, spans in enumerate(zip(*rounds, strict=True))
        ]
        fill = self._filler(view)
        patches = [fill(one) for one in knowledge]
        weighs = self.weighs_noise(view)
        return knowledge, self._most_probable(view, patches, weighs) if any(weighs) else patches

    def weighs_noise(self, view: AttackerView) -> list[bool]:
        """Of each picture, whether the error of its uploads is known and large enough to weigh."""
        least = WEIGHED if len(view.updates) > 1 else 0.0
        weighs = torch.zeros(len(view.updates[0].grads[PATCH]), dtype=torch.bool)
        for update in filter(is_disturbed, view.updates):
            total = gradient(view, update, PATCH).flatten(1)
            size = total.square().mean(1).sqrt().clamp_min(TINY)
            weighs |= (error_of(update, PATCH) / size > least).cpu()
        return weighs.tolist()

    def _most_probable(
        self, view: AttackerView, exact: Sequence[Tensor], weighs: Sequence[bool]
    ) -> list[Tensor]:
        """Patches (N, p) by `equations.noisy_span`, begun at those that take the uploads as exact,
        which stay where errors are not weighed."""
        patch, pixels = view.model.patch_size, view.pixels
        prior = find_prior(self.prior, patch=patch, size=pixels.size)
        systems = [patch_system(view, update) for update in view.updates]
        mean, covariance = (part.to(systems[0].rows) for part in prior.patch(patch, pixels))
        field = FieldEnergy.of(prior, patch, pixels) if self.completion == "field" else None
        field = None if field is None else field.on(mean.device)
        patches = []
        for index, guess in enumerate(exact):
            if not weighs[index]:
                patches.append(guess)
                continue
            uploads = [
                noisy_upload(update, system, index, mean, covariance)
                for update, system in zip(view.updates, systems, strict=True)
            ]
            patches.append(most_probable(uploads, mean, covariance, field, guess))
        return patches

    def spans(self, view: AttackerView, update: ClientUpdate) -> list[UploadSpan]:
        """What one upload says of each of its pictures."""
        system = patch_system(view, update)
        return [upload_span(system, index) for index in range(len(system.hidden))]

    def closed(
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

    def conditions(self, view: AttackerView) -> dict[str, Tensor]:
        """cond and rank of the first upload's A."""
        rows = patch_system(view, view.updates[0]).rows
        return condition_and_rank(rows, view.updates[0].dtype)

    def _filler(self, view: AttackerView) -> Callable[[Knowledge], Tensor]:
        """Knowledge -> patches (N, p)."""
        if self.completion == "none":
            return lambda knowledge: knowledge.known
        patch, pixels = view.model.patch_size, view.pixels
        prior = find_prior(self.prior, patch=patch, size=pixels.size)
        if self.completion == "patch":
            mean, covariance = prior.patch(patch, pixels)
            return lambda knowledge: complete_patchwise(knowledge, mean, covariance)
        energy = FieldEnergy.of(prior, patch, pixels)
        return lambda knowledge: complete(knowledge, energy)


@dataclass(frozen=True)
class MultiRound(MaskedSpan):
    """Several uploads of the same pixels, each with its own mask and its own weights.

    Exact against the plain picture as soon as no patch was masked every time. It needs the same
    pixels in every round: flips, crops or mixup on the client break it.
    """

    uploads: int = 6  # type: ignore[misc]
    name: ClassVar[str] = "multi_round"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uploads < 1:
            raise UserError(f"{self.name}: uploads is 1 or more, got {self.uploads}.")


def _open_directions(knowledge: Sequence[Knowledge], weighs: Sequence[bool]) -> Tensor:
    """By picture; nothing to say where no direction is taken for known."""
    counts = torch.tensor([len(one.basis) for one in knowledge]).double()
    return counts.masked_fill(torch.tensor(weighs), torch.nan)


def _wanted(view: AttackerView, hidden: Tensor, patches: Tensor) -> Tensor:
    """The picture to be scored: plain, or as the client fed it. The order of masked patches is not
    in the gradient, so as fed each masked place gets their mean."""
    if view.against == "plain" or not hidden.any():
        return patches
    return torch.where(hidden.unsqueeze(-1), patches[hidden].mean(0), patches)
