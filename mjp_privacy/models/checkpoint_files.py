"""Weights from a file or from timm's hub, without trusting them.

Files are safetensors, or PyTorch's read with weights_only: nothing in them is executed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name

PYTORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar")
NESTED_KEYS = ("model", "state_dict", "module")
PREFIXED = re.compile(r"((?:model\.|module\.|_orig_mod\.)*)patch_embed\.proj\.weight")
TIMM_PREFIX = "timm:"
PACKAGED_PREFIX = "packaged:"
PACKAGED_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "zoo"


class _Settings:
    """Stands in for the settings object that the authors' trainer saves beside the weights.

    It makes an OrderedDict, for torch fills no other mapping from a file it does not trust.
    """

    def __new__(cls) -> OrderedDict[str, Any]:  # type: ignore[misc]
        return OrderedDict()


@dataclass(frozen=True)
class WeightFile:
    """Tensors by name as they stand in the file, wrappers removed."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()  # what lay beside the weights: optimizer, config, ...


def read_weight_file(source: str | Path) -> WeightFile:
    """A file, or `packaged:NAME` for one of the small models that come with this package."""
    path = _located(source)
    if not path.is_file():
        raise UserError(
            f"No checkpoint at {path}: expected a .safetensors, .pth or .pt file. "
            "Check the path given to --weights or `checkpoint:`."
        )
    content: Mapping[str, Any]
    metadata: dict[str, str] = {}
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        content, metadata = _read_safetensors(path)
    elif suffix in PYTORCH_SUFFIXES:
        content = _read_pytorch(path)
    else:
        raise UserError(
            f"Cannot read {path.name}: expected .safetensors, .pth or .pt, got "
            f"{path.suffix or 'no suffix'!r}. Rename it if it is one of these, or convert it."
        )
    tensors, beside = _unwrap(content)
    if not tensors:
        raise UserError(
            f"{path.name} holds no weights: expected tensors by name, got "
            f"{', '.join(beside[:6]) or 'an empty file'}. Save model.state_dict() and give that."
        )
    return WeightFile(path, file_sha256(path), tensors, metadata, beside)


def read_metadata(source: str | Path) -> dict[str, str]:
    """What a safetensors file says of itself; nothing for any other kind."""
    path = _located(source)
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return {}
    return _read_safetensors(path)[1]


def _located(source: str | Path) -> Path:
    name = str(source)
    if not name.startswith(PACKAGED_PREFIX):
        return Path(source)
    name = name.removeprefix(PACKAGED_PREFIX)
    known = sorted(path.stem for path in PACKAGED_FOLDER.glob("*.safetensors"))
    if name not in known:
        raise unknown_name("packaged checkpoint", name, known)
    return PACKAGED_FOLDER / f"{name}.safetensors"


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
    except Exception as error:
        # A damaged or foreign file fails inside the unpickler in any way (struct, unicode, index
        # errors, ...); each means the same here.
        raise UserError(
            f"{path.name} cannot be read as plain weights ({_reason(error)}). Expected a file "
            "made by torch.save of tensors. If you trust it, save its state_dict alone, better as "
            ".safetensors, and give that."
        ) from error
    if not isinstance(content, Mapping):
        raise UserError(
            f"{path.name}: expected a dictionary of tensors, got {type(content).__name__}. "
            "Save model.state_dict(), not the model."
        )
    return content


def _reason(error: Exception) -> str:
    """The line of torch's long message that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line]
    return (telling or lines or [type(error).__name__])[0][:200]


def _unwrap(content: Mapping[Any, Any]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights inside `model`, `state_dict` or a `model.` prefix, and what lay beside them."""
    beside: list[str] = []
    for _ in NESTED_KEYS:
        key = next((k for k in NESTED_KEYS if isinstance(content.get(k), Mapping)), None)
        if key is not None:
            beside += [str(name) for name in content if name != key]
            content = content[key]
    found = {str(name): value for name, value in content.items()}
    wrappers = next((match[1] for match in map(PREFIXED.fullmatch, found) if match), "")
    beside += [name for name in found if not name.startswith(wrappers)]
    found = {n.removeprefix(wrappers): v for n, v in found.items() if n.startswith(wrappers)}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    beside += [name for name in found if name not in tensors]
    return tensors, tuple(sorted(beside))


def download_timm(name: str) -> WeightFile:
    """The pretrained weights of a timm model, cached by timm where it keeps them."""
    import timm

    try:
        state = timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:
        # A download fails in many ways (hub, requests, httpx, OSError); each means the same here.
        raise UserError(
            f"timm could not download {name} ({type(error).__name__}). On a machine with a network "
            "it is fetched by itself; else give the file: --weights PATH or --weights NAME=PATH."
        ) from error
    return WeightFile(Path(name), _tensors_sha256(state), dict(state))


def _tensors_sha256(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].contiguous().numpy().tobytes())
    return digest.hexdigest()
