"""Fills the directions that uploads leave open with the most probable picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from attacks.budget import image
from attacks.equations.completion import (
    FieldEnergy,
    complete,
    complete_patchwise,
    field_energy,
    whole_picture,
)
from attacks.equations.noisy import most_probable, noisy_upload
from attacks.equations.patch_system import PatchSystem
from attacks.equations.pictures import per_image, pictures
from attacks.equations.span import Knowledge, UploadSpan
from attacks.prior import find_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Pixels, Reconstruction

Completion = Literal["field", "patch", "none"]
MOST = 40
"""Open directions up to which the picture of fewest steps is looked for, of several uploads alone:
with one upload it costs photographs 6 dB."""


@dataclass(frozen=True)
class Filling:
    """How open directions are filled.

    prior       `fitted`, `stationary`, or the path of a fitted prior
    completion  `field` joins patches across their borders, `patch` takes each patch alone, `none`
                leaves open directions at zero
    exact       with `field`, look for patches of whole grey levels too
    """

    prior: str
    completion: Completion
    exact: bool = False

    def patches(self, view: AttackerView, knowledge: Sequence[Knowledge]) -> list[Tensor]:
        """Normalised patches (N, p) of each picture."""
        fill = self._filler(view)
        patches = []
        for index, picture in enumerate(knowledge):
            with image(index):
                patches.append(fill(picture))
        return patches

    def _filler(self, view: AttackerView) -> Callable[[Knowledge], Tensor]:
        """The function that completes one picture, with the prior loaded once."""
        if self.completion == "none":
            return lambda knowledge: knowledge.known
        patch, pixels = view.model.patch_size, view.pixels
        if self.completion == "patch":
            prior = find_prior(self.prior, patch=patch, size=pixels.size)
            mean, covariance = prior.patch(patch, pixels)
            return lambda knowledge: complete_patchwise(knowledge, mean, covariance)
        energy = field_energy(self.prior, patch, pixels)
        return lambda knowledge: self._completed(knowledge, energy, pixels)

    def _completed(self, knowledge: Knowledge, energy: FieldEnergy, pixels: Pixels) -> Tensor:
        """Normalised patches (N, p), exact where they can be had so, else the most probable."""
        likely = complete(knowledge, energy)
        if not self.exact or not 0 < len(knowledge.basis) <= MOST:
            return likely
        return whole_picture(knowledge, likely, energy, pixels)

    def weighed(
        self,
        view: AttackerView,
        systems: Sequence[PatchSystem],
        exact: Sequence[Tensor],
        noisy: Sequence[bool],
    ) -> list[Tensor]:
        """The patches of `exact`, solved again with the uploads' errors weighed where `noisy`.

        systems holds one system per upload, exact what `patches` gave, noisy one bool per picture;
        see `noisy.most_probable`.
        """
        patch, pixels = view.model.patch_size, view.pixels
        prior = find_prior(self.prior, patch=patch, size=pixels.size)
        mean, covariance = (part.to(systems[0].rows) for part in prior.patch(patch, pixels))
        field = None
        if self.completion == "field":
            field = field_energy(self.prior, patch, pixels).on(mean.device)
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
    """Raise UserError unless an attack's option `completion` is `field`, `patch` or `none`."""
    if completion not in get_args(Completion):
        raise UserError(
            f"{attack}: completion is one of {', '.join(get_args(Completion))}; got {completion!r}."
        )


@dataclass(frozen=True)
class Solution:
    """What uploads determine of each of n pictures, and its most probable patches."""

    rounds: Sequence[Sequence[UploadSpan]]  # by upload, then by picture
    knowledge: Sequence[Knowledge]
    patches: Sequence[Tensor]  # (N, p) each, normalised
    noisy: Sequence[bool]  # whether errors were weighed, so that no direction is known exactly

    def reconstruction(
        self, view: AttackerView, facts: dict[str, Tensor] | None = None
    ) -> Reconstruction:
        """The pictures to be scored; `facts` are further diagnostics, one value per client step."""
        shown = [
            wanted(view, picture.hidden, patches)
            for picture, patches in zip(self.knowledge, self.patches, strict=True)
        ]
        diagnostics = {
            **(facts or {}),
            "open_directions": self._open_directions(),
            "always_masked": torch.stack([p.hidden.sum() for p in self.knowledge]).double(),
        }
        return Reconstruction(
            pictures(view, torch.stack(shown)),
            mask=per_image(view, torch.stack([span.hidden for span in self.rounds[0]])),
            diagnostics={name: per_image(view, values) for name, values in diagnostics.items()},
        )

    def _open_directions(self) -> Tensor:
        """How many directions each picture leaves open (n,); NaN where errors were weighed."""
        counts = torch.tensor([len(picture.basis) for picture in self.knowledge]).double()
        return counts.masked_fill(torch.tensor(self.noisy), torch.nan)


def wanted(view: AttackerView, hidden: Tensor, patches: Tensor) -> Tensor:
    """The patches of the picture to be scored, plain or as the client fed it. As fed, each masked
    place gets the mean of the masked patches, because their order is not in the gradient."""
    if view.against == "plain" or not hidden.any():
        return patches
    return torch.where(hidden.unsqueeze(-1), patches[hidden].mean(0), patches)
