"""From photographs to what a client feeds its model in a step: augmented, then shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mjp_privacy.client.augmentation import augmented
from mjp_privacy.client.config import ClientConfig, local_round
from mjp_privacy.client.puzzles import step_puzzles
from mjp_privacy.client.settings import SETTINGS
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import ClientInput


@dataclass(frozen=True)
class Feeding:
    """Everything except the images that decides what a model is fed.

    Two equal ones turn the same images into the same input. It holds the whole client
    configuration, so that inputs, gradients and weights can be stored under it as a key.
    """

    client: ClientConfig
    setting: str
    gamma: float
    patch_size: int
    seed: int

    def photographs(self, images: Tensor, image_ids: Sequence[str], round: int) -> Tensor:
        """Images (m, C, S, S) in [0, 1] as they enter a round: augmented, not yet shuffled."""
        return augmented(images, image_ids, self.client.augment, round=round, seed=self.seed)

    def puzzled(
        self, photographs: Tensor, labels: Tensor, image_ids: Sequence[str], round: int
    ) -> ClientInput:
        """These photographs of a round, shuffled as the setting and the client ask for it."""
        shared = {"patch_size": self.patch_size, "round": round, "seed": self.seed}
        setting = SETTINGS[self.setting]
        fed = setting.prepare(photographs, labels, image_ids, gamma=self.gamma, **shared)
        return step_puzzles(fed, photographs, self.client, **shared)

    def input(
        self, images: Tensor, labels: Tensor, image_ids: Sequence[str], round: int
    ) -> ClientInput:
        """What the model is fed for these images in a round: augmented, then shuffled."""
        photographs = self.photographs(images, image_ids, round)
        return self.puzzled(photographs, labels, image_ids, round)

    def order(self, image_ids: Sequence[str], round: int) -> Tensor:
        """Which image stands at each place of a round's batches: all in their own order, but for a
        client that shuffles its images before every round after the first."""
        places = torch.arange(len(image_ids))
        if self.client.partners == "fixed" or round == 0:
            return places
        named = (self.seed, len(image_ids), image_ids[0], round)
        return torch.randperm(len(image_ids), generator=torch_generator("partners", *named))

    def rounds_of_steps(self, round: int) -> list[int]:
        """For each local step of a round, the number to give as `round` to `input`.

        All steps use the same images; each augments and shuffles them anew.
        """
        return [local_round(round, step) for step in range(self.client.steps)]
