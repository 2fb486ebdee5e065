"""Accuracy of a model, and how much shuffling its input changes its answer, as the paper measures:

    Diff. Norm.   ‖[CLS](x) − [CLS](x̃)‖₂ after the last norm, the classifier's input
    Consistency   whether argmax F(x) = argmax F(x̃)

x̃ is x with a share γ of its patches shuffled; a model with an unknown embedding gets their mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.data import ImageError, ImageRecord, ImageSource
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches
from mjp_privacy.training.protocols import Protocol

BATCH = 128


@torch.no_grad()
def measure(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    protocol: Protocol,
    *,
    seed: int = 0,
    progress: Callable[[int], object] = lambda done: None,
) -> pd.DataFrame:
    """A row for each image and γ; an image that cannot be read has rows with the reason.

    progress: called after each batch with the number of its images
    """
    prepare = protocol.preparation(model)
    rows: list[dict[str, object]] = []
    for start in range(0, len(records), BATCH):
        readable, images = [], []
        for record in records[start : start + BATCH]:
            try:
                images.append(prepare(source.decode(record, min_side=model.patch_size)))
                readable.append(record)
            except ImageError as error:
                rows += [_failed(record, gamma, error.reason) for gamma in protocol.gammas]
        if readable:
            rows += _measured(model, readable, torch.stack(images), protocol, seed)
        progress(len(records[start : start + BATCH]))
    return pd.DataFrame(rows)


def embedding_condition(model: LoadedModel) -> float:
    """cond(W) of the patch embedding: how much inverting it amplifies errors; NaN without one."""
    if model.family == "resnet":
        return math.nan
    weight = model.patch_embed.proj.weight.detach().flatten(1).double()
    return float(torch.linalg.cond(weight))


def _measured(
    model: LoadedModel,
    records: Sequence[ImageRecord],
    images: Tensor,
    protocol: Protocol,
    seed: int,
) -> list[dict[str, object]]:
    each = protocol.mask_per == "image"
    ids = [record.image_id for record in (records if each else records[:1])]
    logits, embedding = _outputs(model, images, None)
    predicted = logits.argmax(-1).tolist()
    best = logits.topk(min(5, logits.shape[-1])).indices.tolist()
    rows: list[dict[str, object]] = []
    for gamma in protocol.gammas:
        drawn = draw_masks(ids, grid=model.grid, gamma=gamma, round=0, seed=seed)
        mask, permutation = (one.expand(len(records), -1) for one in drawn)
        shuffled = shuffle_patches(images, permutation, model.patch_size)
        shuffled_logits, shuffled_embedding = _outputs(model, shuffled, mask)
        distance = (embedding - shuffled_embedding).norm(dim=-1).tolist()
        predicted_shuffled = shuffled_logits.argmax(-1).tolist()
        masked = mask.sum(-1).tolist()
        for place, record in enumerate(records):
            label, plain, jumbled = record.label, predicted[place], predicted_shuffled[place]
            labelled = label is not None
            values = {
                "top1": float(plain == label) if labelled else None,
                "top5": float(label in best[place]) if labelled else None,
                "top1_shuffled": float(jumbled == label) if labelled else None,
                "diff_norm": distance[place],
                "consistency": float(plain == jumbled),
            }
            rows.append(
                {
                    "image_id": record.image_id,
                    "group": record.group,
                    "label": label,
                    "gamma": gamma,
                    "status": "ok",
                    "reason": "",
                    "predicted": plain,
                    "predicted_shuffled": jumbled,
                    **{name: values[name] for name in protocol.measures},
                    "masked_patches": masked[place],
                }
            )
    return rows


def _outputs(model: LoadedModel, images: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits and the [CLS] embedding, or what the classifier reads in its place, on the CPU."""
    like = model.like
    on_device = None if mask is None else mask.to(like.device)
    features = model.forward_features(model.normalize(images.to(like)), on_device)
    return model.forward_head(features).cpu(), features[:, 0].cpu()


def _failed(record: ImageRecord, gamma: float, reason: str) -> dict[str, object]:
    return {
        "image_id": record.image_id,
        "group": record.group,
        "label": record.label,
        "gamma": gamma,
        "status": "failed",
        "reason": reason,
    }
