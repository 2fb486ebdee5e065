"""The directions that uploads leave open, filled with the most probable picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from attacks.equations.completion import FieldEnergy, complete, complete_patchwise
from attacks.equations.noisy_span import most_probable
from attacks.equations.noisy_upload import noisy_upload
from attacks.equations.pictures import per_image, pictures
from attacks.equations.span import Knowledge, UploadSpan
from attacks.equations.system import PatchSystem
from attacks.prior import find_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Reconstruction

Completion = Literal["field", "patch", "none"]


@dataclass(frozen=True)
class Filling:
    """How open directions are filled: `field` joins patches across their borders, `patch` takes
    each alone, `none` leaves them at zero; `prior` says what pictures look like."""

    prior: str
    completion: Completion

    def patches(self, view: AttackerView, knowledge: Sequence[Knowledge]) -> list[Tensor]:
        """Normalised patches (N, p) of each picture."""
        fill = self._filler(view)
        return [fill(one) for one in knowledge]

    def _filler(self, view: AttackerView) -> Callable[[Knowledge], Tensor]:
        if self.completion == "none":
            return lambda knowledge: knowledge.known
        patch, pixels = view.model.patch_size, view.pixels
        prior = find_prior(self.prior, patch=patch, size=pixels.size)
        if self.completion == "patch":
            mean, covariance = prior.patch(patch, pixels)
            return lambda knowledge: complete_patchwise(knowledge, mean, covariance)
        energy = FieldEnergy.of(prior, patch, pixels)
        return lambda knowledge: complete(knowledge, energy)

    def weighed(
        self,
        view: AttackerView,
        systems: Sequence[PatchSystem],
        exact: Sequence[Tensor],
        noisy: Sequence[bool],
    ) -> list[Tensor]:
        """The same patches, of `noisy` pictures with the uploads' errors weighed
        (`equations.noisy_span`). systems: one an upload; exact: what `patches` gave."""
        patch, pixels = view.model.patch_size, view.pixels
        prior = find_prior(self.prior, patch=patch, size=pixels.size)
        mean, covariance = (part.to(systems[0].rows) for part in prior.patch(patch, pixels))
        field = None
        if self.completion == "field":
            field = FieldEnergy.of(prior, patch, pixels).on(mean.device)
        patches = []
        for index, guess in enumerate(exact):
            if not noisy[index]:
                patches.append(guess)
                continue
            uploads = [
                noisy_upload(update, system, index, mean, covariance)
                for update, system in zip(view.updates, systems, strict=True)
            ]
            patches.append(most_probable(uploads, mean, covariance, field, guess))
        return patches


def check_completion(attack: str, completion: str) -> None:
    """Raise unless an attack's option `completion` is one of the three."""
    if completion not in get_args(Completion):
        raise UserError(
            f"{attack}: completion is one of {', '.join(get_args(Completion))}, got {completion!r}."
        )


@dataclass(frozen=True)
class Solution:
    """What uploads say of each of n pictures, and its most probable patches."""

    rounds: Sequence[Sequence[UploadSpan]]  # by upload, then by picture
    knowledge: Sequence[Knowledge]
    patches: Sequence[Tensor]  # (N, p) each, normalised
    noisy: Sequence[bool]  # whether errors were weighed, so that no direction counts as known

    def reconstruction(
        self, view: AttackerView, facts: dict[str, Tensor] | None = None
    ) -> Reconstruction:
        """The pictures that the view asks for. facts: further diagnostics, one value a step."""
        wanted = [
            _wanted(view, one.hidden, x)
            for one, x in zip(self.knowledge, self.patches, strict=True)
        ]
        beside = {
            **(facts or {}),
            "open_directions": self._open_directions(),
            "always_masked": torch.stack([one.hidden.sum() for one in self.knowledge]).double(),
        }
        return Reconstruction(
            pictures(view, torch.stack(wanted)),
            mask=per_image(view, torch.stack([span.hidden for span in self.rounds[0]])),
            diagnostics={name: per_image(view, values) for name, values in beside.items()},
        )

    def _open_directions(self) -> Tensor:
        """(n,) how many; NaN where no direction is taken for known."""
        counts = torch.tensor([len(one.basis) for one in self.knowledge]).double()
        return counts.masked_fill(torch.tensor(self.noisy), torch.nan)


def _wanted(view: AttackerView, hidden: Tensor, patches: Tensor) -> Tensor:
    """The picture to be scored: plain, or as the client fed it. The order of masked patches is not
    in the gradient, so as fed each masked place gets their mean."""
    if view.against == "plain" or not hidden.any():
        return patches
    return torch.where(hidden.unsqueeze(-1), patches[hidden].mean(0), patches)
