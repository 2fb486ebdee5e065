"""Reads weights from a file or downloads timm's, without executing anything in them.

Files are safetensors, or PyTorch's own format read with weights_only. They come from strangers, so
everything in them is checked before it is used: by `core.read` what every file must be, by
`unwrapped` and `checkpoints` what names and tensors of weights must be.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.text import shown
from mjp_privacy.models.layouts import LAYOUTS, TIMM, Layout, recognised
from mjp_privacy.models.tensor_files import (
    MOST_AXES,
    MOST_NAME,
    TensorFile,
    check_digest,
    check_finite,
    check_stored,
    read_torch_file,
)

CHECKPOINT = FileKind(
    "the weights of a Vision Transformer, as .safetensors, .pth or .pt",
    "Check the path, or copy or download it again; if you trust it, save its state_dict alone, "
    "better as .safetensors, and give that.",
    64 << 30,
)
SEGMENTS = '"segmentation"'
"""The task in the metadata of a segmentation that this package trained; there all is JSON."""
PYTORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar")
IN_FOLDERS = (
    *("model.safetensors", "open_clip_model.safetensors"),
    *("pytorch_model.bin", "open_clip_pytorch_model.bin"),
)
"""The weights in a folder as timm, transformers and open_clip save one; the first that is there."""
CONFIG = "config.json"
JSON_FILES: Mapping[str, tuple[str, ...]] = {
    "timm": (CONFIG,),
    "open_clip": ("open_clip_config.json",),
    **dict.fromkeys(("hf_vit", "hf_deit", "hf_clip"), (CONFIG, "preprocessor_config.json")),
}
"""What these libraries save beside them, by layout (`models.checkpoints`)."""
HUB_PREFIX = "hf-hub:"
HUB_SECONDS = 5.0  # in which it has to answer
ONE_AT_A_TIME = Lock()
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
        in_folder = self.path.name in IN_FOLDERS
        return shown(Path(*self.path.parts[-2:]) if in_folder else self.path.name)

    @property
    def layout(self) -> Layout:
        """How its tensors are named; names that fit no layout count as timm's, and are refused."""
        return recognised(self.tensors, TIMM)


def read_weight_file(source: str | Path, *, shapes_only: bool = False) -> WeightFile:
    """Read a file, or `packaged:NAME`: one of the small models that come with this package.

    shapes_only  the tensors are on torch's meta device, with shapes and without values, and there
                 is no sha256: quick, for values are not read. Else NaN and infinity are refused.
    """
    path = located(source)
    CHECKPOINT.check(path)
    suffix = path.suffix.lower()
    content: Mapping[Any, Any]
    metadata: dict[str, str] = {}
    if suffix == ".safetensors":
        file = TensorFile(path, CHECKPOINT)
        metadata, content = file.metadata, file.tensors()
        if not shapes_only:  # what this package trained has a digest
            check_digest(path, CHECKPOINT)
        if metadata.get("task") == SEGMENTS:  # others' files name tasks too, in words of theirs
            raise UserError(
                f"{shown(path.name)} holds a network for {SEGMENTS}: expected a classifier. "
                "Measure it with `mjp evaluate --ade20k DIR`, or give the weights that its "
                "training started from."
            )
    elif suffix in PYTORCH_SUFFIXES:
        # The trainers of MJP and DeiT save their settings beside the weights. These two classes are
        # read as plain containers; every other class is refused, and nothing is executed.
        allowed = [(_Settings, "yacs.config.CfgNode"), argparse.Namespace]
        content = read_torch_file(path, CHECKPOINT, allowed)
        if not isinstance(content, Mapping):
            raise CHECKPOINT.refusal(path, f"a {shown(type(content).__name__, 60)}")
    else:
        raise CHECKPOINT.refusal(path, f"a name that ends with {shown(path.suffix) or 'nothing'}")
    tensors, beside = unwrapped(content, path)
    if suffix in PYTORCH_SUFFIXES:
        check_stored(tensors, path, CHECKPOINT)
    if not tensors:
        raise CHECKPOINT.refusal(path, shown(", ".join(beside[:6])) or "an empty file")
    if shapes_only:
        tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
        return WeightFile(path, "", tensors, metadata, beside)
    check_finite(tensors, path, CHECKPOINT)
    return WeightFile(path, file_sha256(path), tensors, metadata, beside)


def read_metadata(source: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty for any other kind of file and for none."""
    path = located(source)
    if path.suffix.lower() != ".safetensors" or not is_there(path):
        return {}
    return TensorFile(path, CHECKPOINT).metadata


def located(source: str | Path) -> Path:
    """The file of a path, of a folder as libraries save one, of `hf-hub:ORG/MODEL`, which is
    downloaded, or of `packaged:NAME`; a wrong NAME suggests the nearest one."""
    name = str(source)
    if name.startswith(HUB_PREFIX):
        return from_hub(name.removeprefix(HUB_PREFIX))
    if not name.startswith(PACKAGED_PREFIX):
        path = Path(source)
        inside = (path / file for file in IN_FOLDERS)
        return next((file for file in inside if is_there(file)), path)
    name = name.removeprefix(PACKAGED_PREFIX)
    packaged = sorted(path.stem for path in PACKAGED_FOLDER.glob("*.safetensors"))
    if name not in packaged:
        raise unknown_name("packaged checkpoint", shown(name, 100), packaged)
    return PACKAGED_FOLDER / f"{name}.safetensors"


@contextmanager
def _asking_once() -> Iterator[None]:
    """Where the hub does not answer, its client looks in its cache alone: else it asks six times
    for every file, which takes a minute and twenty lines. That is a switch of the whole process:
    one thread after another."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    with ONE_AT_A_TIME:
        before = constants.HF_HUB_OFFLINE
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
        except Exception:  # of many classes: the hub's, httpx's, OSError
            constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


@lru_cache
@_asking_once()
def from_hub(repository: str) -> Path:
    """The weights of a repository of Hugging Face's hub, in the hub's own cache; what a library
    saved beside them lies in the same folder."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for name in dict.fromkeys((*chain(*JSON_FILES.values()), *IN_FOLDERS)):
        try:
            file = Path(hf_hub_download(repository, name))
        except Exception as error:  # of many classes: the hub's, httpx's, OSError
            absent = isinstance(error, EntryNotFoundError)
            elsewhere = constants.HF_HUB_OFFLINE and name is not IN_FOLDERS[-1]  # perhaps cached
            if absent and (elsewhere or not isinstance(error, LocalEntryNotFoundError)):
                continue
            raise UserError(
                f"{HUB_PREFIX}{shown(repository, 100)} could not be downloaded "
                f"({type(error).__name__}). Expected ORG/MODEL and a network connection; without "
                "one give a folder that holds config.json and model.safetensors."
            ) from error
        if name in IN_FOLDERS:
            return file
    raise UserError(
        f"{HUB_PREFIX}{shown(repository, 100)} holds no weights: expected one of "
        f"{', '.join(IN_FOLDERS)}. Give another repository."
    )


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    return CHECKPOINT.sha256(path)


@_asking_once()
def download_timm(name: str) -> WeightFile:
    """The pretrained weights of a timm model; timm keeps them in its own cache."""
    import timm

    try:
        state = timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:
        # A download fails with errors of many classes (hub, requests, httpx, OSError).
        raise UserError(
            f"timm could not download {shown(name, 100)} ({type(error).__name__}). With a network "
            "connection it is downloaded automatically; without one give the file: --weights PATH "
            "or --weights NAME=PATH."
        ) from error
    return WeightFile(Path(name), tensors_sha256(state), dict(state))


def tensors_sha256(state: dict[str, Tensor]) -> str:
    """The SHA-256 of names and values, in hexadecimal."""
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].contiguous().numpy().tobytes())
    return digest.hexdigest()


NESTED_KEYS = ("model", "state_dict", "module")
PREFIX = re.compile(r"(?:model\.|module\.|_orig_mod\.)*")
ANCHOR = "patch_embed.proj.weight"  # every ViT has it, in its layout's words
MOST_TENSORS = 10_000  # the largest Vision Transformers have one or two thousand
MOST_NUMBER = 10**9  # of an entry that has a number for its name


def unwrapped(content: Mapping[Any, Any], path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights of a file by their bare names, and the names of all else that it holds."""
    beside: list[str] = []
    for _ in NESTED_KEYS:
        key = next((k for k in NESTED_KEYS if isinstance(content.get(k), Mapping)), None)
        if key is not None:
            beside += [_name_of(name) for name in content if name != key]
            content = content[key]
    if len(content) > MOST_TENSORS:
        raise CHECKPOINT.refusal(path, f"{len(content)} entries, more than {MOST_TENSORS}")
    entries = {_name_of(name): value for name, value in content.items()}
    if len(entries) < len(content):
        raise CHECKPOINT.refusal(path, "several entries of one name")
    prefix = next((prefix for prefix in map(_prefix, entries) if prefix is not None), "")
    beside += [name for name in entries if not name.startswith(prefix)]
    entries = {n.removeprefix(prefix): v for n, v in entries.items() if n.startswith(prefix)}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    beside += [name for name in entries if name not in tensors]
    for name, tensor in tensors.items():
        if tensor.ndim > MOST_AXES:
            raise CHECKPOINT.refusal(path, f"a tensor of {tensor.ndim} axes", name)
    return tensors, tuple(sorted(beside))


def _name_of(key: object) -> str:
    """An entry's name; of a key that is no name, its kind."""
    if isinstance(key, str):
        return shown(key, MOST_NAME)
    return str(key) if isinstance(key, int) and abs(key) < MOST_NUMBER else type(key).__name__


@lru_cache(maxsize=MOST_TENSORS)  # a run opens the same file several times
def _prefix(name: str) -> str | None:
    """What stands before the patch embedding's weight, in any layout; None for other names."""
    prefix = PREFIX.match(name)[0]  # type: ignore[index]
    bare = name.removeprefix(prefix)
    return prefix if any(ANCHOR in layout.own_names(bare) for layout in LAYOUTS) else None
