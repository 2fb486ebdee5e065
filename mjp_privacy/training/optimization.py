"""Optimiser and learning rate as in the paper's Table 7."""

from __future__ import annotations

import math

import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.training.config import TrainingConfig

POSITIONS = frozenset({"pos_embed", "unk_embed", "absolute_pos_embed"})


def build_optimizer(model: MJPVisionTransformer, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW. Biases, norms and embedding tables do not decay, except MJP's position embeddings if
    the config follows the paper's code."""
    spared = model.no_weight_decay()
    if config.positions_as_paper:
        spared = spared - POSITIONS
    groups = param_groups_weight_decay(
        model, config.recipe.weight_decay, no_weight_decay_list=spared
    )
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def learning_rate(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of a step: linear warm-up, then a cosine that is counted from step 0, as timm's."""
    recipe, top = config.recipe, config.lr
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        start = min(recipe.warmup_lr, top)
        return start + (top - start) * step / warmup
    total = recipe.epochs * steps_per_epoch
    end = min(recipe.min_lr, top)
    return end + (top - end) * (1 + math.cos(math.pi * step / total)) / 2


def dal_weight(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The weight of L_DAL in a step; under `rising_then_halving` it changes from epoch to epoch."""
    top = config.jigsaw.dal_lambda
    if config.jigsaw.dal_schedule == "constant":
        return top
    epoch, warmup = step // steps_per_epoch, round(config.warmup_epochs)
    if epoch < warmup:
        return top * epoch / max(warmup - 1, 1)
    cosine = math.cos(math.pi * (epoch - warmup) / (config.recipe.epochs - warmup))
    return top / 2 + top / 4 * (1 + cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all parameter groups this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clipped(parameters: list[nn.Parameter], largest: float | None) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `largest` (None: leave them as they are).

    Returns the norm before clipping, still on the device.
    """
    limit = math.inf if largest is None else largest
    return nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
