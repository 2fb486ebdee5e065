"""Small segmentation configs and pictures with label maps for the tests."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mjp_privacy.training.config import TrainingConfig, load_training, merged
from tests.helpers.training import PICTURES_AS_THEY_ARE

CLASSES = 3


def content(**changes: Any) -> dict[str, Any]:
    """Fields of a small segmentation's config: crops of 16 px, 16 patches, four blocks."""
    fields: dict[str, Any] = {
        "name": "small",
        "task": "segmentation",
        "model": {
            "img_size": 16,
            "patch_size": 4,
            "embed_dim": 16,
            "depth": 4,
            "num_heads": 2,
            "num_classes": CLASSES,
            "mean": [0.5, 0.5, 0.5],
            "std": [0.25, 0.25, 0.25],
            "drop_path": 0,
        },
        "recipe": {
            "epochs": 2,
            "batch": 4,
            "lr": 0.003,
            "warmup_epochs": 0.5,
            "precision": "float32",
            "label_smoothing": 0.0,
        },
        "augmentation": dict(PICTURES_AS_THEY_ARE),
        "segmentation": {"head": "linear", "channels": 16},
        "jigsaw": {"position_init": "controlled"},
        "log_every": 2,
        "checkpoint_minutes": 0,
    }
    return merged(fields, changes)


def small(**changes: Any) -> TrainingConfig:
    return load_training(content(**changes))


SWIN = {
    "family": "swin",
    "stages": [1, 1],
    "model": {"position_embedding": "learned", "embed_dim": 8, "num_heads": 2},
}
"""Changes that make the small network a Swin."""


def pair_folder(root: Path, training: int = 8, validation: int = 3) -> Path:
    """Pictures of two halves in the colours of their classes, in ADE20K's layout; row 0 has no
    label."""
    rng = np.random.default_rng(0)
    for split, number in (("training", training), ("validation", validation)):
        for place in range(number):
            height, width = rng.integers(18, 30, 2)
            labels = np.zeros((height, width), np.uint8)
            left, right = rng.integers(1, CLASSES + 1, 2)
            labels[1:, : width // 2], labels[1:, width // 2 :] = left, right
            pixels = rng.integers(0, 80, (height, width, 3))
            for label in range(1, CLASSES + 1):
                pixels[labels == label, label - 1] += 150
            save_pair(root, f"{split}/{place:03d}", pixels.astype(np.uint8), labels)
    return root


def save_pair(root: Path, name: str, pixels: Any, labels: Any) -> None:
    """Write a picture and its label map: save_pair(root, "training/000", …)."""
    for kind, array, suffix in (("images", pixels, "jpg"), ("annotations", labels, "png")):
        path = root / kind / f"{name}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path, **({"quality": 95} if suffix == "jpg" else {}))
