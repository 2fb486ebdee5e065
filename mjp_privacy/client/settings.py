"""Settings a, b, c of the paper: what the client feeds its model, and what is scored.

a  phi(grad M(x),  x )    plain image,    scored against the plain image
b  phi(grad M(x~), x~)    shuffled image, scored against the shuffled image
c  phi(grad M(x~), x )    shuffled image, scored against the plain image
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mjp_privacy.core.registry import Registry
from mjp_privacy.interfaces import ClientInput, Setting, Truth
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches


@dataclass(frozen=True)
class PaperSetting:
    """Whether the client shuffles by MJP, and which image a reconstruction is compared with."""

    name: str
    shuffles: bool
    against: Literal["input", "plain"]

    def prepare(
        self,
        images: Tensor,
        labels: Tensor,
        image_ids: Sequence[str],
        *,
        patch_size: int,
        gamma: float,
        round: int,
        seed: int,
    ) -> ClientInput:
        """What the client feeds: the images as they are, or each shuffled by its own puzzle."""
        if not self.shuffles:
            return ClientInput(images, labels, tuple(image_ids))
        grid = images.shape[-1] // patch_size
        mask, permutation = draw_masks(image_ids, grid=grid, gamma=gamma, round=round, seed=seed)
        shuffled = shuffle_patches(images, permutation, patch_size)
        return ClientInput(shuffled, labels, tuple(image_ids), mask, permutation)

    def target(self, truth: Truth, inputs: ClientInput) -> Tensor:
        """The images (m, C, H, W) that reconstructions are compared with."""
        return inputs.images if self.against == "input" else truth.images


SETTINGS: Registry[Setting] = Registry("setting")
SETTINGS.register("a", PaperSetting("a", shuffles=False, against="plain"))
SETTINGS.register("b", PaperSetting("b", shuffles=True, against="input"))
SETTINGS.register("c", PaperSetting("c", shuffles=True, against="plain"))
