"""What a loaded network says of itself: the facts that rows state, and how it takes images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mjp_privacy.models.checkpoints import CheckpointReport


@dataclass(frozen=True)
class ModelCard:
    """The facts about a loaded model that table rows state."""

    name: str
    architecture: str
    img_size: int
    resize: int | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    trained_gamma: float | None
    checkpoint: CheckpointReport
    norm_eps: float | None = None  # stated, with the activation, of a network other than timm's
    activation: str | None = None


class WithCard:
    """A network with the card that says where it came from and how images are normalised."""

    card: ModelCard

    def normalize(self, images: Tensor) -> Tensor:
        """Images in [0, 1] -> the normalised input of the network."""
        mean = _per_channel(self.card.mean, images)
        std = _per_channel(self.card.std, images)
        return (images - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse of `normalize`; values outside [0, 1] are not clipped."""
        mean = _per_channel(self.card.mean, x)
        std = _per_channel(self.card.std, x)
        return x * std + mean


def _per_channel(numbers: tuple[float, ...], like: Tensor) -> Tensor:
    """(C, 1, 1), made in the precision of `like`: float64 numbers must not pass through float32."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(-1, 1, 1)
