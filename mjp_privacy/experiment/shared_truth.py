"""What the scores of a block's cells have in common: references, bounds, the model's predictions.

Each is computed once for equal images, whatever the cells' clients, attacks and precisions are.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mjp_privacy.client.gradients import predict
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.diagnostics import Scene, bounds
from mjp_privacy.experiment.source import BlockUploads
from mjp_privacy.experiment.variants import Block0
from mjp_privacy.metrics import References, prepare
from mjp_privacy.models import LoadedModel

BLOCKS0: dict[str, Block0] = {"intact": "intact", "altered": "april_block"}
"""The variants of `top1` in a row, and block 0 of the model that makes each prediction."""


def references(uploads: BlockUploads, target: Tensor, device: torch.device) -> References:
    """The images that reconstructions are compared with, prepared for every metric."""
    known: References = uploads.memo.recent(
        "references", uploads.memo.content(target), partial(prepare, target, device=device)
    )
    return known


def limits(
    uploads: BlockUploads, cell: Cell, model: LoadedModel, scene: Scene
) -> dict[str, Tensor]:
    """`bounds` of the cell's setting on these images."""
    memo, inputs, target = uploads.memo, scene.inputs, scene.target
    key = ("bounds", cell.setting, memo.content(inputs.images), memo.content(target))
    known: dict[str, Tensor] = memo.once(key, partial(bounds, cell, model, inputs, target))
    return known


def accuracy(
    uploads: BlockUploads, cell: Cell, scene: Scene, labelled: bool
) -> dict[str, Tensor | None]:
    """Whether the intact and the altered model classify each input correctly, (m,) each; None
    if an image of the block has no true label. Only a plain ViT has a block 0 to alter."""
    is_vit = scene.view.model.family == "vit"
    kinds = {variant: kind for variant, kind in BLOCKS0.items() if is_vit or kind == "intact"}
    if not labelled:
        return dict.fromkeys(kinds)
    memo, inputs = uploads.memo, scene.inputs
    seen = memo.content(inputs.images), memo.content(inputs.mask)
    correct: dict[str, Tensor | None] = {}
    for variant, block0 in kinds.items():
        predicted = memo.once(
            ("prediction", block0, cell.client.positions, *seen),
            partial(predict, uploads.accuracy_model(cell, block0), inputs.images, inputs.mask),
        )
        correct[variant] = predicted == inputs.labels
    return correct
