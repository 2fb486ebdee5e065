"""The network to train, with random weights or a checkpoint's, and its loss."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.models import load_model
from mjp_privacy.models.families import build_other
from mjp_privacy.models.loading import outline_model, outline_spec
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.training.config import Initial, TrainingConfig, other_sizes
from mjp_privacy.training.segmentation.initial import check_unknown, fill_swin

TrainedNetwork: TypeAlias = MJPVisionTransformer
"""Or a `families.OtherNetwork`, which has all that training uses of it."""


def build_network(config: TrainingConfig) -> TrainedNetwork:
    """The network with initial weights drawn from the config's seed; of a segmentation, a ViT
    without its classifier.

    Rows of one seed start with equal weights in all tensors that they share. Models without
    position embeddings are an exception: they do not draw that table, so all later draws differ.
    """
    sizes = other_sizes(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("initial weights", config.seed))
        if sizes is not None:
            model = cast(TrainedNetwork, build_other(sizes, config.model.drop_path))
        else:
            model = _vit(config)
        if config.initial is not None and sizes is not None:
            fill_swin(model, config.initial.checkpoint)
        elif config.initial is not None:
            _fill(model, config.initial, config)
        elif config.positions_as_paper:
            nn.init.normal_(model.table)
            if model.unk_embed is not None:
                nn.init.normal_(model.unk_embed)
    return model


def _vit(config: TrainingConfig) -> MJPVisionTransformer:
    shape = config.model
    return MJPVisionTransformer(
        img_size=shape.img_size,
        patch_size=shape.patch_size,
        embed_dim=shape.embed_dim,
        depth=shape.depth,
        num_heads=shape.num_heads,
        num_classes=shape.num_classes if config.task == "classification" else 0,
        drop_path_rate=shape.drop_path,
        position_embedding="strict" if shape.position_embedding == "none" else "learned",
        unknown_embedding=shape.unknown_embedding,
        index_embedding=shape.index_embedding,
        dal=shape.dal,
        first_block=shape.first_block,
    )


def _fill(model: MJPVisionTransformer, initial: Initial, config: TrainingConfig) -> None:
    """Copy every tensor that the checkpoint has.

    A new E_unk starts at the mean position embedding; a new DAL regressor or index table stays
    random.
    """
    loaded = load_model(initial.model, **_arguments(initial, config))
    pretrained = dict(loaded.named_parameters())
    new = [name for name, _ in model.named_parameters() if name not in pretrained]
    if lacking := [name for name in new if not name.startswith(("dal_regressor", "index_embed"))]:
        raise UserError(
            f"{loaded.card.checkpoint.source} lacks {', '.join(lacking[:3])}, which training "
            "would have to start from. Give a checkpoint of the same architecture."
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in pretrained:
                parameter.copy_(pretrained[name])


def check_initial(config: TrainingConfig) -> None:
    """Raise where the weights to start from do not fit, as far as their names and shapes tell."""
    if config.initial is not None and config.family == "vit":
        arguments = _arguments(config.initial, config)
        outline_model(config.initial.model, whole=True, **arguments)
        if config.task == "segmentation":
            stated = {k: v for k, v in arguments.items() if not k.startswith("unknown")}
            spec, source = outline_spec(config.initial.model, **stated)
            check_unknown(source, bool(spec.unknown_embedding), config.model.unknown_embedding)


def _arguments(initial: Initial, config: TrainingConfig) -> dict[str, Any]:
    """How the weights to start from are loaded: as a model of the config's sizes; for a
    segmentation, whatever its classes are."""
    shape = config.model
    classes = ("num_classes",) if config.task == "classification" else ()
    sizes = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", *classes)
    return {
        **{name: getattr(shape, name) for name in (*sizes, "mean", "std")},
        "checkpoint": initial.checkpoint,
        "unknown_embedding": shape.unknown_embedding or None,
        "unknown_init": "mean_position",
    }


class Objective(nn.Module):
    """Model and loss in one forward pass, so that DDP and torch.compile see all of it."""

    def __init__(self, model: MJPVisionTransformer, config: TrainingConfig) -> None:
        super().__init__()
        self.model = model
        self.smoothing = config.recipe.label_smoothing
        self.normalize = config.jigsaw.dal_target == "normalized"

    def forward(
        self, images: Tensor, targets: Tensor, mask: Tensor, dal_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss, and (loss, cross-entropy, DAL, accuracy) detached, as one tensor (4,).

        targets: class indices (B,), or soft labels (B, K) from mixup; dal_weight: a scalar.
        """
        logits = self.model(images, mask).float()
        soft = targets.ndim == 2  # mixup has smoothed these labels already
        entropy = F.cross_entropy(logits, targets, label_smoothing=0 if soft else self.smoothing)
        loss, dal = entropy, torch.zeros_like(entropy)
        if self.model.dal_regressor is not None:
            with torch.autocast(images.device.type, enabled=False):
                dal = self.model.dal_loss(mask, normalize=self.normalize)
            loss = entropy + dal_weight * dal
        truth = targets.argmax(-1) if soft else targets
        accuracy = (logits.argmax(-1) == truth).float().mean()
        return loss, torch.stack((loss, entropy, dal, accuracy)).detach()
