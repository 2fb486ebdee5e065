"""Where tensors are computed."""

from __future__ import annotations

import time

import torch

from mjp_privacy.core.errors import UserError


def pick_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: expected auto, cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here. Use --device cpu or auto.")
    use_cuda = name != "cpu" and torch.cuda.is_available()
    if use_cuda:  # float32 must mean float32
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    return torch.device("cuda" if use_cuda else "cpu")


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
