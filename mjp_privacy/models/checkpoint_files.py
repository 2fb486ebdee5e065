"""Reading weight files without trusting them: safetensors, or PyTorch files by weights_only."""

from __future__ import annotations

import argparse
import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.errors import UserError

PYTORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar")
NESTED_KEYS = ("model", "state_dict", "module")


class _Settings(dict[str, Any]):
    """Stands in for the settings object that the authors' trainer saves beside the weights."""


@dataclass(frozen=True)
class WeightFile:
    """Tensors by name as they stand in the file, wrappers removed."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()  # what lay beside the weights: optimizer, config, ...


def read_weight_file(path: str | Path) -> WeightFile:
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"No checkpoint at {path}: expected a .safetensors, .pth or .pt file. "
            "Check the path given to --weights or `checkpoint:`."
        )
    content: Mapping[str, Any]
    metadata: dict[str, str] = {}
    if path.suffix == ".safetensors":
        content, metadata = _read_safetensors(path)
    elif path.suffix in PYTORCH_SUFFIXES:
        content = _read_pytorch(path)
    else:
        raise UserError(
            f"Cannot read {path.name}: expected .safetensors, .pth or .pt, got "
            f"{path.suffix or 'no suffix'!r}. Rename it if it is one of these, or convert it."
        )
    tensors, beside = _unwrap(content)
    if not tensors:
        raise UserError(f"{path.name} holds no weights: expected tensors by name, got {beside}.")
    return WeightFile(path, file_sha256(path), tensors, metadata, beside)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path.name} is no readable safetensors file ({error}). Copy or download it again."
        ) from error


def _read_pytorch(path: Path) -> Mapping[str, Any]:
    # The trainers of MJP and DeiT save their settings beside the weights; both are plain
    # containers and are read as such. Every other class is refused, and nothing is executed.
    allowed = [(_Settings, "yacs.config.CfgNode"), argparse.Namespace]
    try:
        with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"{path.name} cannot be read as plain weights ({reason[:200]}). Expected a file "
            "made by torch.save of tensors. If you trust it, save its state_dict alone, better as "
            ".safetensors, and give that."
        ) from error
    if not isinstance(content, Mapping):
        raise UserError(
            f"{path.name}: expected a dictionary of tensors, got {type(content).__name__}. "
            "Save model.state_dict(), not the model."
        )
    return content


def _unwrap(content: Mapping[str, Any]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights inside `model`, `state_dict` or a flat `model.` prefix, and what lay beside."""
    beside: list[str] = []
    for key in NESTED_KEYS:
        if isinstance(content.get(key), Mapping):
            beside += [name for name in content if name != key]
            content = content[key]
    for prefix in ("model.", "module."):
        if any(name.startswith(f"{prefix}patch_embed.") for name in content):
            beside += [name for name in content if not name.startswith(prefix)]
            content = {
                name.removeprefix(prefix): value
                for name, value in content.items()
                if name.startswith(prefix)
            }
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    beside += [name for name in content if name not in tensors]
    return tensors, tuple(sorted(beside))
