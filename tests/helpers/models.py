"""The tiny models of all tests, from one factory; their files, images and masks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

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
SMALL: dict[str, Any] = {**ARCHITECTURE, "mean": MEAN, "std": STD}
"""Narrower than its patches are long: its embedding cannot be inverted."""

PLANTED: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 96,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 10,
    "mean": (0.4, 0.5, 0.6),
    "std": (0.2, 0.25, 0.3),
}
"""Width 96 above patch length 48 and above 65 tokens: arithmetic limits no attack."""

State = dict[str, Tensor]
KNOWN: dict[str, Any] = {"num_heads": 3, "mean": MEAN, "std": STD}  # what a file does not say

Weights = Literal["drawn", "noisy", "conditioned"]


def tiny_model(
    shape: Mapping[str, Any] = SMALL,
    weights: Weights = "noisy",
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> LoadedModel:
    """An untrained ViT of this shape.

    weights  drawn: as an untrained model has them; noisy: with noise on every parameter, so that
             all of them matter; conditioned: matrices drawn so that A is well conditioned, which
             planted answers need
    """
    model = load_model(checkpoint="random", **{**shape, **changes}).to(dtype)
    generator = torch.Generator().manual_seed(1)
    change = {"drawn": None, "noisy": _add_noise, "conditioned": _condition}[weights]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if change is not None:
                change(model, name, parameter, generator)
    return model


def _noise(parameter: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def _add_noise(
    model: LoadedModel, name: str, parameter: Tensor, generator: torch.Generator
) -> None:
    if not (name == "pos_embed" and model.position_embedding == "exposed"):
        parameter += 0.1 * _noise(parameter, generator).to(parameter)


def _condition(
    model: LoadedModel, name: str, parameter: Tensor, generator: torch.Generator
) -> None:
    if name.endswith("weight") and parameter.ndim > 1:
        parameter.copy_(_noise(parameter, generator) / parameter[0].numel() ** 0.5)
    learned = name == "pos_embed" and model.position_embedding == "learned"
    if learned or name == "unk_embed":
        parameter.copy_(0.5 * _noise(parameter, generator))


def tiny(dtype: torch.dtype = torch.float64, **changes: Any) -> LoadedModel:
    """The 32×32 model with 16 patches that most tests use."""
    return tiny_model(dtype=dtype, **changes)


def planted_model(**changes: Any) -> LoadedModel:
    """The float64 model of planted answers."""
    return tiny_model(PLANTED, "conditioned", **changes)


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
