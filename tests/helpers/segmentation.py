"""Small segmentation configs and pictures with label maps for the tests."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mjp_privacy.training.config import TrainingConfig, load_training, merged
from tests.helpers import training

CLASSES = training.CLASSES


def content(**changes: Any) -> dict[str, Any]:
    """Fields of a small segmentation's config: crops of 16 px, 16 patches, four blocks."""
    plain = {"unknown_embedding": False, "dal": "none"}
    fields = training.content(
        task="segmentation",
        model={"img_size": 16, "patch_size": 4, "depth": 4, "drop_path": 0, **plain},
        recipe={"batch": 4, "label_smoothing": 0.0},
        augmentation={"crop_padding": 4},
        segmentation={"head": "linear", "channels": 16},
        jigsaw={"shuffle": "none", "gamma": 0.03, "position_init": "controlled"},
        data={"store": "files"},
    )
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
