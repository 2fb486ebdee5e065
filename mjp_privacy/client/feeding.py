"""From photographs to what a client feeds its model in a step: augmented, then puzzled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mjp_privacy.client.augmentation import augmented
from mjp_privacy.client.config import ClientConfig, local_round
from mjp_privacy.client.puzzles import step_puzzles
from mjp_privacy.client.settings import SETTINGS
from mjp_privacy.interfaces import ClientInput


@dataclass(frozen=True)
class Feeding:
    """All that decides what is fed, but for the images; equal ones feed the same.

    It holds the whole client, so that it can be the key of what was made with it.
    """

    client: ClientConfig
    setting: str
    gamma: float
    patch_size: int
    seed: int

    def photographs(self, images: Tensor, image_ids: Sequence[str], round: int) -> Tensor:
        """Images (m, C, S, S) in [0, 1] as they enter a round, before any shuffle."""
        return augmented(images, image_ids, self.client.augment, round=round, seed=self.seed)

    def puzzled(
        self, photographs: Tensor, labels: Tensor, image_ids: Sequence[str], round: int
    ) -> ClientInput:
        """These photographs of a round as the setting and the client shuffle them."""
        drawn = {"patch_size": self.patch_size, "round": round, "seed": self.seed}
        setting = SETTINGS[self.setting]
        fed = setting.prepare(photographs, labels, image_ids, gamma=self.gamma, **drawn)
        return step_puzzles(fed, photographs, self.client, **drawn)

    def input(
        self, images: Tensor, labels: Tensor, image_ids: Sequence[str], round: int
    ) -> ClientInput:
        """What the model is fed of these images in a round."""
        photographs = self.photographs(images, image_ids, round)
        return self.puzzled(photographs, labels, image_ids, round)

    def rounds_of_steps(self, round: int) -> list[int]:
        """The number that each local step of a round is drawn for: the same images, augmented and
        puzzled anew."""
        return [local_round(round, step) for step in range(self.client.steps)]
