"""Small federations on generated images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mjp_privacy.federation.config import FederationConfig, load_federation
from mjp_privacy.federation.rounds import federate
from mjp_privacy.federation.task import Task
from tests.helpers.training import CLASSES, class_folders

SIDE = 32  # LPIPS needs 31 pixels

MODEL: dict[str, Any] = {
    "img_size": SIDE,
    "patch_size": 8,
    "embed_dim": 40,
    "depth": 1,
    "num_heads": 2,
    "num_classes": CLASSES,
    "mean": [0.4, 0.5, 0.6],
    "std": [0.25, 0.25, 0.3],
}
MJP: dict[str, Any] = {**MODEL, "unknown_embedding": True}


def content(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "small",
        "rounds": 4,
        "model": MODEL,
        "clients": {"number": 4, "per_round": 2},
        "client": {"batch": 3},
        "server": {"optimizer": "sgd", "lr": 0.1},
        "record": {"rounds": [1], "images": 2, "probes": [{"uploads": 2}]},
        "evaluate_every": 2,
    }
    return fields | changes


def config(**changes: Any) -> FederationConfig:
    return load_federation(content(**changes))


def images(root: Path) -> Path:
    return root if root.exists() else class_folders(root, images=8, side=SIDE)


def task(root: Path, **changes: Any) -> Task:
    return Task(config(**changes), images(root / "data"), images(root / "val"))


def run(root: Path, out: str = "out", **changes: Any) -> Path:
    data, val = images(root / "data"), images(root / "val")
    federate(config(**changes), data, root / out, val)
    return root / out


def small_federation(**changes: Any) -> FederationConfig:
    """Three MJP clients with two images each, all in every round; two probes in round 1."""
    fields: dict[str, Any] = {
        "rounds": 3,
        "model": {**MJP, "img_size": 28, "patch_size": 7, "embed_dim": 16, "dal": "nonlinear"},
        "clients": {"number": 3, "per_round": 3},
        "client": {"batch": 2, "dal": True, "plain_share": 0.5},
        "gamma": 0.27,
        "record": {"rounds": [1], "images": 2},
        "train_images": 24,
    }
    return config(**fields | changes)


def federated_images(root: Path) -> Path:
    return class_folders(root, images=8)


def assert_close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Tensors of the same names, equal but for the order in which they were summed."""
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=1e-6)
