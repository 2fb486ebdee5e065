"""The network that gives every pixel a class, and its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mjp_privacy.core.machine import derive_seed
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.network import build_network
from mjp_privacy.training.segmentation.features import features, maps_of
from mjp_privacy.training.segmentation.heads import LinearHead, PyramidHead, resized

UNLABELLED = -1
"""What 0 of a label map becomes: such a pixel has no part in loss and scores."""


class SegmentationNetwork(nn.Module):
    """A ViT or Swin of this package under `backbone`, and a head on its maps of features."""

    def __init__(self, backbone: Any, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.backbone.head = nn.Identity()  # what classified whole pictures

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised images (B, 3, S, S) -> logits (B, K, S, S) in float32."""
        logits: Tensor = self.head(features(self.backbone, images, mask))
        return resized(logits.float(), images.shape[-2:])

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay: tables of the backbone."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def build_segmentation(config: TrainingConfig) -> SegmentationNetwork:
    """The network with its initial weights: the backbone's from the config's `initial`, if there is
    one, and the head's from its seed."""
    backbone, maps = build_network(config), maps_of(config)
    classes, settings = config.model.num_classes, config.segmentation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("initial head", config.seed))
        head: nn.Module = (
            LinearHead(maps, classes)
            if settings.head == "linear"
            else PyramidHead(maps, classes, settings.channels)
        )
    return SegmentationNetwork(backbone, head)


class PixelObjective(nn.Module):
    """Network and loss in one forward pass, with what `training.network.Objective` takes and gives.

    There is no L_DAL; its weight has no part. Of several processes each one's mean counts alike.
    """

    def __init__(self, model: SegmentationNetwork, config: TrainingConfig) -> None:
        super().__init__()
        self.model, self.smoothing = model, config.recipe.label_smoothing

    def forward(
        self, images: Tensor, labels: Tensor, mask: Tensor, dal_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of the labelled pixels, and (loss, cross-entropy, 0, share of labelled
        pixels that are right) detached, as one tensor (4,).

        labels: (B, S, S), 0 where a pixel has no label, else 1 + its class
        """
        logits = self.model(images, mask).movedim(1, -1).flatten(0, 2)
        classes = labels.flatten().long() - 1
        number = (classes != UNLABELLED).sum().clamp(min=1)
        loss = (
            F.cross_entropy(
                logits,
                classes,
                ignore_index=UNLABELLED,
                label_smoothing=self.smoothing,
                reduction="sum",
            )
            / number
        )
        right = (logits.argmax(-1) == classes).sum() / number
        return loss, torch.stack((loss, loss, torch.zeros_like(loss), right)).detach()
