"""The files a run keeps: a checkpoint to continue from, and the finished model for others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.tensor_files import save_tensors
from mjp_privacy.core.version import commit
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.training.config import TrainingConfig, plain
from mjp_privacy.training.processes import World

IDENTITY = {
    "images": "training images or labels (--data)",
    "validation": "validation images or labels (--val)",
    "initial": "weights to start from (--initial)",
}
"""The parts of a run's identity besides its config, as error messages call them."""

CHECKPOINT, MODEL = "checkpoint.pt", "model.safetensors"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write checkpoint.pt; the previous one stays until the new one is complete."""
    with _disk_errors_told(folder / CHECKPOINT):
        write_atomically(folder / CHECKPOINT, lambda path: torch.save(state, path))


def load_checkpoint(folder: Path, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """The state of the run in this folder, or None if there is none.

    A run of another config or other images is an error.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path.name} in --out cannot be read ({type(error).__name__}). Expected the "
            "checkpoint of an earlier run; give another --out, or remove the file to start anew."
        ) from error
    if not {*identity, "step", "model", "optimizer"} <= set(state):
        raise UserError(
            f"{path.name} in --out is no checkpoint of this trainer. Expected an empty folder or "
            "the folder of an earlier run; give another --out."
        )
    before, now = json.loads(state["config"]), json.loads(identity["config"])
    if before != now:
        raise UserError(
            f"--out holds a run of another config: {difference(before, now)}. Expected the same "
            "config; give another --out."
        )
    for key, what in IDENTITY.items():
        if state[key] != identity[key]:
            raise UserError(
                f"--out holds a run with other {what} than this command: expected those that it "
                "began with. Give the same, or another --out."
            )
    return state


def made_with(world: World) -> dict[str, Any]:
    """Software and machine of this process; on a CPU the number of threads changes results."""
    return {
        "commit": commit(),
        "torch": str(torch.__version__),
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "processes": world.size,
    }


def export_model(
    folder: Path,
    model: MJPVisionTransformer,
    config: TrainingConfig,
    facts: dict[str, Any],
    *,
    half: bool = False,
    name: str = MODEL,
) -> Path:
    """Write the weights as safetensors; their metadata holds all that `load_model` needs as JSON.

    facts  further metadata
    half   store float16
    """
    kind = torch.float16 if half else torch.float32
    tensors: dict[str, Tensor] = {
        key: value.detach().to("cpu", kind).contiguous() for key, value in model.named_parameters()
    }
    metadata = {k: json.dumps(v) for k, v in {**_metadata(config), **facts}.items()}
    path = folder / name
    with _disk_errors_told(path):
        save_tensors(path, tensors, metadata)
    return path


def _metadata(config: TrainingConfig) -> dict[str, Any]:
    shape = config.model
    positions = "N(0, 1)" if config.positions_as_paper else "N(0, 0.02²)"
    memory = config.data.store == "memory"
    return {
        "name": config.name,
        "arch": f"vit d{shape.embed_dim} l{shape.depth} h{shape.num_heads} p{shape.patch_size}",
        "img_size": shape.img_size,
        "resize": shape.img_size if memory else None,
        "num_heads": shape.num_heads,
        "num_classes": shape.num_classes,
        "mean": shape.mean,
        "std": shape.std,
        "position_embedding": "exposed" if shape.position_embedding == "none" else "learned",
        "first_block": shape.first_block,
        "trained_gamma": _trained_gamma(config),
        "position_start": "initial" if config.initial else positions,
        "position_decay": config.positions_as_paper,
        "seed": config.seed,
        "recipe": plain(config),
    }


def _trained_gamma(config: TrainingConfig) -> float | None:
    """The shuffle ratio; None where it says nothing: SPP shuffles all, a checkpoint had its own."""
    if config.jigsaw.shuffle == "patches":
        return config.jigsaw.gamma
    return None if config.jigsaw.shuffle != "none" or config.initial else 0.0


@contextmanager
def _disk_errors_told(path: Path) -> Iterator[None]:
    """torch.save raises RuntimeError on a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"Could not write {path.name} ({error}). The previous one is intact; free some space "
            "on the disk and run the same command again."
        ) from error


def difference(before: Any, now: Any, place: str = "") -> str:
    """The first field that differs, with both values: "recipe.lr was 0.1 and is 0.2"."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                return difference(before.get(key), now.get(key), f"{place}.{key}".strip("."))
    return f"{place} was {before!r} and is {now!r}"
