"""Tiny models, their files, images and masks for the tests of models and clients."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.models import LoadedModel, load_model

SIZE, PATCH, DIM, CLASSES, PATCHES = 32, 8, 24, 5, 16
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ARCHITECTURE: dict[str, Any] = {
    "img_size": SIZE,
    "patch_size": PATCH,
    "embed_dim": DIM,
    "depth": 2,
    "num_heads": 3,
    "num_classes": CLASSES,
}


State = dict[str, Tensor]
KNOWN: dict[str, Any] = {"num_heads": 3, "mean": MEAN, "std": STD}  # what a file does not say


def tiny(dtype: torch.dtype = torch.float64, **changes: Any) -> LoadedModel:
    """An untrained ViT of 32×32 pixels and 16 patches, with weights large enough to matter."""
    fields = {**ARCHITECTURE, "mean": MEAN, "std": STD, **changes}
    model = load_model(checkpoint="random", **fields).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not (name == "pos_embed" and model.position_embedding == "exposed"):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += 0.1 * noise.to(parameter)
    return model


def some_images(number: int, size: int = SIZE) -> Tensor:
    """(number, 3, size, size) in [0, 1], float64."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(number, 3, size, size, generator=generator, dtype=torch.float64)


def some_labels(number: int) -> Tensor:
    return torch.arange(number) % CLASSES


def some_masks(number: int) -> Tensor:
    """(number, 16) bool, five patches masked in each row."""
    generator = torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(PATCHES, generator=generator) for _ in range(number)])
    return order < 5


def state_of(**changes: Any) -> State:
    return {
        name: p.detach().clone() for name, p in tiny(torch.float32, **changes).state_dict().items()
    }


def saved(tmp_path: Path, content: Any, name: str = "weights.pth") -> Path:
    path = tmp_path / name
    torch.save(content, path)
    return path
