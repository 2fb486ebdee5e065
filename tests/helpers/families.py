"""Small Swins and ResNets, and checkpoints of them as `mjp train` writes them."""

from pathlib import Path
from typing import Any

import torch

from mjp_privacy.models.loading import OtherNetwork, build_other
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.training.config import TrainingConfig, load_training
from mjp_privacy.training.learner import build_network
from mjp_privacy.training.run_files import export_model
from tests.helpers.training import content

SIDE, PATCH, GRID, CLASSES = 32, 4, 8, 10


def sizes(family: Any, **changes: Any) -> Sizes:
    """A network of two stages for pictures of 32 pixels: 8×8 patches of 4×4."""
    fields = {"stages": (1, 1), "num_heads": 2 if family == "swin" else 1, **changes}
    return Sizes(family, SIDE, PATCH, embed_dim=16, num_classes=CLASSES, **fields)


def network(family: Any, seed: int = 0, **changes: Any) -> OtherNetwork:
    """The same, with random weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_other(sizes(family, **changes)).eval()


MJP_SWIN: dict[str, Any] = {"positions": True, "unknown_embedding": True, "dal": "nonlinear"}


def family_content(family: str, **model: Any) -> dict[str, Any]:
    """Fields of a config: a Swin with MJP, or a ResNet on shuffled patches."""
    bare = {"position_embedding": "none", "unknown_embedding": False, "dal": "none"}
    fields = {"patch_size": PATCH, "num_heads": 2, **(bare if family == "resnet" else {}), **model}
    return content(model=fields) | {"family": family, "stages": [1, 1]}


def family_config(family: str, **model: Any) -> TrainingConfig:
    return load_training(family_content(family, **model))


def checkpoint(folder: Path, family: str, **model: Any) -> Path:
    """The file of an untrained network of ten classes, for pictures of 32 pixels."""
    config = family_config(family, **{"img_size": SIDE, "num_classes": CLASSES, **model})
    untrained = build_network(config)
    folder.mkdir(parents=True, exist_ok=True)
    return export_model(folder, untrained, config, {})
