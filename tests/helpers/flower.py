"""A small federation on generated images."""

from pathlib import Path
from typing import Any

from mjp_privacy.federation.config import FederationConfig, load_federation
from tests.helpers.federations import MJP
from tests.helpers.training import SIDE, class_folders

SMALLER = {"img_size": SIDE, "patch_size": 7, "embed_dim": 16}
MODEL = {**MJP, **SMALLER, "dal": "nonlinear"}


def small_federation(**changes: Any) -> FederationConfig:
    """Three MJP clients with two images each, all in every round; two probes in round 1."""
    fields: dict[str, Any] = {
        "name": "small",
        "rounds": 3,
        "model": MODEL,
        "clients": {"number": 3, "per_round": 3},
        "client": {"batch": 2, "dal": True, "plain_share": 0.5},
        "gamma": 0.27,
        "record": {"rounds": [1], "images": 2},
        "evaluate_every": 2,
        "train_images": 24,
    }
    return load_federation({**fields, **changes})


def federated_images(root: Path) -> Path:
    return class_folders(root, images=8)
