"""Small labelled images and small configs for the tests of mjp_privacy.training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from mjp_privacy.training.config import TrainingConfig, load_training, merged
from mjp_privacy.training.learner import Learner
from mjp_privacy.training.run_files import Journal, whole_lines

CLASSES, SIDE = 3, 28
FILES = {
    "augmentation": {"rand_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0},
    "data": {"store": "files"},
}
"""Changes of a config that keeps its images in files."""
PICTURES_AS_THEY_ARE = {
    "rand_augment": None,
    "mixup": 0,
    "cutmix": 0,
    "erasing": 0,
    "repeats": 1,
}
"""An augmentation that changes no colours and mixes nothing."""


LAST_LINE_LOST: Mapping[str, Callable[[bytes], bytes]] = {
    "its end flipped": lambda content: content[:-1] + b"\x0b",
    "cut": lambda content: content[:-20],
    "gone": lambda content: b"".join(content.splitlines(keepends=True)[:-1]),
}
"""What makes no line of the last one in a metrics.jsonl."""


def class_folders(root: Path, images: int = 12, classes: int = CLASSES, side: int = SIDE) -> Path:
    """Noisy squares whose colour is their class: red, green, blue."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        folder = root / f"class_{label}"
        folder.mkdir(parents=True)
        for number in range(images):
            pixels = rng.integers(0, 120, (side, side, 3))
            pixels[..., label % 3] += 130
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03d}.png")
    return root


def content(**changes: Any) -> dict[str, Any]:
    """Fields of a small MJP model's config: 16 patches, in memory, light augmentation."""
    fields: dict[str, Any] = {
        "name": "small",
        "model": {
            "img_size": SIDE,
            "patch_size": 7,
            "embed_dim": 16,
            "depth": 1,
            "num_heads": 2,
            "num_classes": CLASSES,
            "mean": [0.5, 0.5, 0.5],
            "std": [0.25, 0.25, 0.25],
            "drop_path": 0.2,
            "unknown_embedding": True,
            "dal": "nonlinear",
        },
        "recipe": {
            "epochs": 2,
            "batch": 6,
            "lr": 0.003,
            "warmup_epochs": 0.5,
            "precision": "float32",
        },
        "augmentation": {**PICTURES_AS_THEY_ARE, "crop_padding": 2},
        "jigsaw": {"shuffle": "patches", "gamma": 0.5},
        "data": {"store": "memory"},
        "log_every": 2,
        "checkpoint_minutes": 0,
    }
    return merged(fields, changes)


def small(**changes: Any) -> TrainingConfig:
    return load_training(content(**changes))


def curve(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if k != "timing"}
        for line in whole_lines(run / "metrics.jsonl")[0]
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of a finished training's model."""
    with safe_open(run / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> list[int]:
    """The process dies before this step, as with kill -9: nothing is saved on the way out. The
    numbers of the steps that were trained since."""
    original, steps = Learner.train_step, list[int]()

    def dying(self: Learner, at: int, *batch: torch.Tensor) -> torch.Tensor:
        if at == step:
            raise KeyboardInterrupt
        steps.append(at)
        return original(self, at, *batch)

    monkeypatch.setattr(Learner, "train_step", dying)
    return steps


def die_after_line(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process dies when the line of this step has been written."""
    original = Journal.write

    def dying(self: Journal, line: dict[str, Any]) -> None:
        original(self, line)
        if line["step"] == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "write", dying)
