"""The paper's Table 9 as printed, and when it may stand beside our figures."""

from __future__ import annotations

from dataclasses import dataclass

from mjp_privacy.training.config import TrainingConfig

VALIDATION_PICTURES, CLASSES, SIDE = 2000, 150, 512
"""Of ADE20K."""
SWIN_TINY = (4, 96, 3, (2, 2, 6, 2))
"""Patch side, width and heads of the first stage, blocks of the stages."""


@dataclass(frozen=True)
class PublishedSegmentation:
    """One printed row, in percent: UPerNet on a Swin-T that was trained on ImageNet-1K."""

    model: str
    miou: float
    macc: float


PLAIN = PublishedSegmentation("Swin-T", 43.87, 55.22)
MJP = PublishedSegmentation("Swin-T + MJP", 44.03, 55.50)
CAVEAT = (
    "The paper's figures are of UPerNet on Swin-T at 512. Ours is UPerNet-style: other norms, no "
    "auxiliary head, a cosine schedule, sliding windows where MMSegmentation's UPerNet for Swin-T "
    "takes whole pictures; the authors' repository has no code for this table, so what they did "
    "beyond the text is not known."
)


def counterpart(config: TrainingConfig, pictures: int) -> PublishedSegmentation | None:
    """The printed row of a model scored on so many pictures; None unless it is the paper's model,
    fine-tuned from weights, on all of ADE20K's validation pictures."""
    model = config.model
    sizes = (model.patch_size, model.embed_dim, model.num_heads, config.stages)
    papers = config.family == "swin" and sizes == SWIN_TINY and config.segmentation.head != "linear"
    at_papers = (model.img_size, model.num_classes, pictures) == (
        SIDE,
        CLASSES,
        VALIDATION_PICTURES,
    )
    if not papers or not at_papers or config.initial is None:
        return None
    return MJP if model.unknown_embedding else PLAIN
