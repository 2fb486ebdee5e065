"""What learns in a segmentation: all but network, loss and scores is `training.learner`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.training.learner import Learner, Validation
from mjp_privacy.training.segmentation.network import PixelObjective, build_segmentation
from mjp_privacy.training.segmentation.scores import MEASURES, areas, measured
from mjp_privacy.training.segmentation.windows import predicted


class SegmentationLearner(Learner):
    """A network with a head for every pixel; it keeps mIoU where a classifier keeps top-1."""

    measure = "val_miou"

    def _network(self) -> Any:
        return build_segmentation(self.config)

    def _objective(self) -> nn.Module:
        return PixelObjective(self.model, self.config)

    @torch.no_grad()
    def validated(self, batches: Validation) -> dict[str, float]:
        """mIoU, mAcc and aAcc of whole pictures, in percent; then training can go on."""
        network, shape = self.trained.eval(), self.config.model
        total = torch.zeros(3, shape.num_classes, dtype=torch.float64, device=self.world.device)
        for pictures, labels in batches.in_order(1):
            for picture, truth in zip(pictures, labels, strict=True):
                with self.products, self._autocast():
                    answer = predicted(network, picture, shape.img_size, truth.shape)
                total += areas(answer, truth, shape.num_classes)
        counts: Tensor = self.world.mean(total)
        self.objective.train()
        if not counts.any():
            raise UserError(
                "--data: no pixel of the validation pictures has a label, so nothing can be "
                "scored. Expected label maps with classes from 1; mend or remove this split."
            )
        values = measured(counts.cpu().numpy()).tolist()
        return {f"val_{name}": round(x, 4) for name, x in zip(MEASURES, values, strict=True)}
