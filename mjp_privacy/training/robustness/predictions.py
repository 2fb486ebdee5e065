"""A model's answer to each of many images, and how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch

from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing
from mjp_privacy.models import LoadedModel

BATCH = 128


@torch.no_grad()
def answers(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    prepare: Preprocessing,
    *,
    classes: Sequence[int] | None = None,
    progress: Callable[[int], object] = lambda done: None,
    unreadable: Callable[[ImageError], object] = lambda error: None,
) -> pd.DataFrame:
    """A row for each image: image_id, label, status, correct, confidence.

    classes     restrict the answer to these: the others' logits are left out before the softmax,
                and `confidence` is the largest of what remains
    progress    called after each batch with the number of its images
    unreadable  called with the reason of each image that cannot be read

    Images are fed as they are: nothing is shuffled or masked. An image that cannot be read has the
    status `failed`.
    """
    among = list(range(model.card.num_classes)) if classes is None else list(classes)
    rows: list[dict[str, object]] = []
    for start in range(0, len(records), BATCH):
        readable, pictures = [], []
        for record in records[start : start + BATCH]:
            try:
                pictures.append(prepare(source.decode(record, min_side=model.patch_size)))
                readable.append(record)
            except ImageError as error:
                unreadable(error)
                rows.append(_row(record, "failed", np.nan, np.nan))
        if readable:
            images = torch.stack(pictures).to(model.like)
            logits = model(model.normalize(images))[:, among].cpu()
            sure, best = logits.double().softmax(-1).max(-1)  # in float32 many would be 1 alike
            for record, share, place in zip(readable, sure.tolist(), best.tolist(), strict=True):
                rows.append(_row(record, "ok", float(among[place] == record.label), share))
        progress(len(records[start : start + BATCH]))
    return pd.DataFrame(rows)


def _row(record: ImageRecord, status: str, correct: float, confidence: float) -> dict[str, object]:
    return {
        "image_id": record.image_id,
        "label": record.label,
        "status": status,
        "correct": correct,
        "confidence": confidence,
    }
