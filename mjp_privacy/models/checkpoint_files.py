"""Reads weights from a file or downloads timm's, without executing anything in them.

Files are safetensors, or PyTorch's own format read with weights_only.
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
from mjp_privacy.models.layouts import LAYOUTS

PYTORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar")
NESTED_KEYS = ("model", "state_dict", "module")
PREFIX = re.compile(r"(?:model\.|module\.|_orig_mod\.)*")
ANCHOR = "patch_embed.proj.weight"  # every ViT has it, in its layout's words
IN_FOLDERS = (
    *("model.safetensors", "open_clip_model.safetensors"),
    *("pytorch_model.bin", "open_clip_pytorch_model.bin"),
)
"""The weights in a folder as timm, transformers and open_clip save one; the first that is there."""
TIMM_PREFIX = "timm:"
PACKAGED_PREFIX = "packaged:"
PACKAGED_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "zoo"


class _Settings:
    """Stands in for the settings object that the authors' trainer saves beside the weights.

    Creating one gives an OrderedDict, the only mapping that torch fills under weights_only.
    """

    def __new__(cls) -> OrderedDict[str, Any]:  # type: ignore[misc]
        return OrderedDict()


@dataclass(frozen=True)
class WeightFile:
    """The tensors of a file by name, without wrappers such as `model` or a `module.` prefix."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()  # other entries of the file: optimizer, config, ...

    @property
    def shown(self) -> str:
        """What messages call it: its name, after its folder's where all weights have that name."""
        return str(Path(*self.path.parts[-2:])) if self.path.name in IN_FOLDERS else self.path.name


def read_weight_file(source: str | Path, *, shapes_only: bool = False) -> WeightFile:
    """Read a file, or `packaged:NAME`: one of the small models that come with this package.

    shapes_only  the tensors are on torch's meta device, with shapes and without values, and there
                 is no sha256: quick for safetensors, of which only the header is read
    """
    path = located(source)
    check_is_there(source, "--weights or `checkpoint:`")
    content: Mapping[str, Any]
    metadata: dict[str, str] = {}
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        content, metadata = _read_safetensors(path, shapes_only)
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
    if shapes_only:
        tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
        return WeightFile(path, "", tensors, metadata, beside)
    return WeightFile(path, file_sha256(path), tensors, metadata, beside)


def check_is_there(source: str | Path, option: str) -> None:
    """Raise a UserError unless there is a file of weights; option: where the path was given."""
    path = located(source)
    if not path.is_file():
        raise UserError(
            f"No checkpoint at {path}: expected a .safetensors, .pth or .pt file. "
            f"Check the path given to {option}."
        )


def read_metadata(source: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty for any other kind of file and for none."""
    path = located(source)
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return {}
    return _read_safetensors(path, shapes_only=True)[1]


def located(source: str | Path) -> Path:
    """The file of a path, of a folder as libraries save one, or of `packaged:NAME`; a wrong NAME
    suggests the nearest one."""
    name = str(source)
    if not name.startswith(PACKAGED_PREFIX):
        path = Path(source)
        inside = (path / file for file in IN_FOLDERS)
        return next((file for file in inside if file.is_file()), path)
    name = name.removeprefix(PACKAGED_PREFIX)
    packaged = sorted(path.stem for path in PACKAGED_FOLDER.glob("*.safetensors"))
    if name not in packaged:
        raise unknown_name("packaged checkpoint", name, packaged)
    return PACKAGED_FOLDER / f"{name}.safetensors"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_safetensors(path: Path, shapes_only: bool) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            if shapes_only:
                shapes = {name: file.get_slice(name).get_shape() for name in names}
                tensors = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
            else:
                tensors = {name: file.get_tensor(name) for name in names}
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path.name} is not a readable safetensors file ({error}). Copy or download it again."
        ) from error


def _read_pytorch(path: Path) -> Mapping[str, Any]:
    # The trainers of MJP and DeiT save their settings beside the weights. These two classes are
    # read as plain containers; every other class is refused, and nothing is executed.
    allowed = [(_Settings, "yacs.config.CfgNode"), argparse.Namespace]
    try:
        with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged or foreign file makes the unpickler raise errors of many classes (struct,
        # unicode, index, ...); they all mean that it cannot be read.
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
    """The line of torch's long message that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line]
    return (telling or lines or [type(error).__name__])[0][:200]


def _unwrap(content: Mapping[Any, Any]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights inside `model`, `state_dict` or a `model.` prefix, and names of the rest."""
    beside: list[str] = []
    for _ in NESTED_KEYS:
        key = next((k for k in NESTED_KEYS if isinstance(content.get(k), Mapping)), None)
        if key is not None:
            beside += [str(name) for name in content if name != key]
            content = content[key]
    entries = {str(name): value for name, value in content.items()}
    prefix = next((prefix for prefix in map(_prefix, entries) if prefix is not None), "")
    beside += [name for name in entries if not name.startswith(prefix)]
    entries = {n.removeprefix(prefix): v for n, v in entries.items() if n.startswith(prefix)}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    beside += [name for name in entries if name not in tensors]
    return tensors, tuple(sorted(beside))


def _prefix(name: str) -> str | None:
    """What stands before the patch embedding's weight, in any layout; None for other names."""
    prefix = PREFIX.match(name)[0]  # type: ignore[index]
    bare = name.removeprefix(prefix)
    return prefix if any(ANCHOR in layout.own_names(bare) for layout in LAYOUTS) else None


def download_timm(name: str) -> WeightFile:
    """The pretrained weights of a timm model; timm keeps them in its own cache."""
    import timm

    try:
        state = timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:
        # A download fails with errors of many classes (hub, requests, httpx, OSError).
        raise UserError(
            f"timm could not download {name} ({type(error).__name__}). With a network connection "
            "it is downloaded automatically; without one give the file: --weights PATH or "
            "--weights NAME=PATH."
        ) from error
    return WeightFile(Path(name), tensors_sha256(state), dict(state))


def tensors_sha256(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].contiguous().numpy().tobytes())
    return digest.hexdigest()
