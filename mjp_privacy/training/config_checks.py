"""What the fields of a training config must have in common."""

from __future__ import annotations

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.sizes import check_parameters
from mjp_privacy.training.config import TrainingConfig, other_sizes
from mjp_privacy.training.segmentation.settings import check_segmentation


def _check_family(config: TrainingConfig, where: str) -> None:
    """Raise a UserError unless the fields of another network than a ViT fit it."""
    model, family = config.model, config.family
    if (family == "vit") != (config.stages is None):
        raise UserError(
            f"{where}: stages are the blocks in each stage of a swin or resnet: expected them "
            f"there and nowhere else, got family {family} and stages {config.stages}."
        )
    if (sizes := other_sizes(config)) is None:
        return
    sizes.check(where)
    initial = config.initial and config.task == "classification"
    if initial or model.index_embedding or model.first_block != "intact":
        raise UserError(
            f"{where}: a {family} that classifies starts from nothing and has the blocks that it "
            "is published with; expected no initial, index_embedding: false and first_block: "
            "intact."
        )


def check_config(config: TrainingConfig, where: str) -> None:
    """Raise a UserError if fields contradict each other; `where` they stand."""
    model, jigsaw = config.model, config.jigsaw
    _check_family(config, where)
    check_segmentation(config, where)
    without = model.position_embedding == "none"
    if without and (model.unknown_embedding or model.dal != "none" or jigsaw.position_confound):
        raise UserError(
            f"{where}: a model without position embeddings has none to mask, to localize or to "
            "start differently; expected unknown_embedding: false, dal: none, position_confound: "
            "false."
        )
    if model.img_size % model.patch_size or model.embed_dim % model.num_heads:
        raise UserError(
            f"{where}: expected img_size divisible by patch_size and embed_dim by num_heads, got "
            f"{model.img_size}/{model.patch_size} and {model.embed_dim}/{model.num_heads}."
        )
    for field, epoch in (
        ("warmup_epochs", config.warmup_epochs),
        ("first_epoch", config.first_epoch),
    ):
        if not 0 <= epoch <= config.recipe.epochs:
            raise UserError(
                f"{where}, {field}: expected 0 to epochs ({config.recipe.epochs}), got {epoch}."
            )
    if config.data.store == "memory" and config.augmentation.rand_augment:
        raise UserError(
            f"{where}: data.store memory augments whole batches by crop and flip; expected "
            "augmentation.rand_augment: null, or data.store: files."
        )
    if config.data.store == "memory" and config.augmentation.erasing:
        raise UserError(f"{where}: data.store memory has no erasing; expected erasing: 0.")
    check_parameters(
        where,
        img_size=model.img_size,
        patch_size=model.patch_size,
        embed_dim=model.embed_dim,
        depth=model.depth,
        num_classes=model.num_classes,
    )
