"""What a run keeps: a checkpoint to go on from, and the model for others to use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mjp_privacy.errors import UserError
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.provenance import commit
from mjp_privacy.store import write_atomically
from mjp_privacy.training.config import TrainingConfig, plain

CHECKPOINT, MODEL = "checkpoint.pt", "model.safetensors"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Atomically: the previous checkpoint stays until the new one is whole."""
    _written(folder / CHECKPOINT, lambda path: torch.save(state, path))


def load_checkpoint(folder: Path, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """The state of an interrupted run of the same config and images; None where there is none."""
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
    before, now = json.loads(state["config"]), json.loads(identity["config"])
    if before != now:
        raise UserError(
            f"--out holds a run of another config: {_difference(before, now)}. Expected the same; "
            "give another --out."
        )
    if state["images"] != identity["images"]:
        raise UserError(
            "--out holds a run on other images or labels: expected those of --data as they were "
            "when it began. Give the same, or another --out."
        )
    return state


def export_model(
    folder: Path,
    model: MJPVisionTransformer,
    config: TrainingConfig,
    facts: dict[str, Any],
    *,
    half: bool = False,
    name: str = MODEL,
) -> Path:
    """The weights as safetensors, with what loading and reporting need as JSON in the metadata."""
    kind = torch.float16 if half else torch.float32
    tensors: dict[str, Tensor] = {
        key: value.detach().to("cpu", kind).contiguous() for key, value in model.named_parameters()
    }
    metadata = {k: json.dumps(v) for k, v in {**_metadata(config), **facts}.items()}
    path = folder / name
    _written(path, lambda temporary: save_file(tensors, temporary, metadata))
    return path


def _metadata(config: TrainingConfig) -> dict[str, Any]:
    shape = config.model
    shuffles = config.jigsaw.shuffle != "none"
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
        "trained_gamma": config.jigsaw.gamma if shuffles else 0.0,
        "position_init": "paper" if config.positions_as_paper else "controlled",
        "seed": config.seed,
        "recipe": plain(config),
        "commit": commit(),
    }


def _written(path: Path, write: Any) -> None:
    try:
        write_atomically(path, write)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch.save raises RuntimeError on a full disk
        raise UserError(
            f"Could not write {path.name} ({error}). The one written before is whole; make room "
            "on the disk and run the same command again."
        ) from error


def _difference(before: Any, now: Any, place: str = "") -> str:
    """The first field that differs, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{place}.{key}".strip("."))
    return f"{place} was {before!r} and is {now!r}"
