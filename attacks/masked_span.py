r"""What an attacker who knows MJP gets: the span of the masked patches, and the rest by a prior.

`attacks.span` turns one upload, or several of one picture, into x_i = known_i + a_i B for every
patch, masked or not, at its true place: a shuffle among masked patches leaves their span as it is,
so the *order* of the masked patches is all that MJP hides, and the open part a is small.
`attacks.completion` fills it with the most probable picture.

One upload leaves as many open directions as patches were masked; several leave as many as patches
that were masked every time. With none left the picture is exact, and it is the *plain* picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.completion import FieldEnergy, complete, complete_patchwise
from attacks.linear_algebra import condition_and_rank
from attacks.patch_gradient import lacks_patch_system, needs_patch_system
from attacks.patch_system import PatchSystem, patch_system
from attacks.pictures import per_image, pictures
from attacks.prior import find_prior
from attacks.span import Knowledge, combine, upload_span
from mjp_privacy.errors import UserError
from mjp_privacy.interfaces import AttackerView, Reconstruction
from mjp_privacy.models import MJPVisionTransformer

COMPLETIONS = ("field", "patch", "none")


@dataclass(frozen=True)
class MaskedSpan:
    """One upload.

    prior       `fitted`, `stationary`, or the path of a fitted prior
    completion  `field`: patches joined across their borders; `patch`: each patch alone; `none`
    """

    prior: str = "fitted"
    completion: Literal["field", "patch", "none"] = "field"
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
        return needs_patch_system(model)

    def unsupported(self, view: AttackerView) -> str | None:
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        systems = [patch_system(view, update) for update in view.updates]
        fill = self._filler(view)
        patches, open_directions, always = [], [], []
        for index in range(len(systems[0].hidden)):
            knowledge = combine([upload_span(system, index) for system in systems])
            filled = fill(knowledge)
            if view.against == "input":
                filled = _as_fed(filled, knowledge.hidden)
            patches.append(filled)
            open_directions.append(len(knowledge.basis))
            always.append(int(knowledge.hidden.sum()))
        facts = _facts(view, systems[0])
        facts["open_directions"] = torch.tensor(open_directions).double()
        facts["always_masked"] = torch.tensor(always).double()
        return Reconstruction(
            pictures(view, torch.stack(patches)),
            mask=per_image(view, systems[0].hidden),
            diagnostics={name: per_image(view, fact) for name, fact in facts.items()},
        )

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
            raise UserError(f"multi_round: uploads is 1 or more, got {self.uploads}.")


def _as_fed(patches: Tensor, hidden: Tensor) -> Tensor:
    """The picture as the client fed it: the order of masked patches is not in the gradient, so
    each masked place gets their mean."""
    if not hidden.any():
        return patches
    return torch.where(hidden.unsqueeze(-1), patches[hidden].mean(0), patches)


def _facts(view: AttackerView, system: PatchSystem) -> dict[str, Tensor]:
    return condition_and_rank(system.rows, view.updates[0].dtype)
