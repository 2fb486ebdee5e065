"""The device that tensors are computed on, and a clock that waits for it."""

from __future__ import annotations

import time

import torch

from mjp_privacy.core.errors import UserError


def pick_device(name: str) -> torch.device:
    """The device for `--device`: auto, cpu or cuda; auto takes CUDA where there is a GPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: expected auto, cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here. Use --device cpu or auto.")
    use_cuda = name != "cpu" and torch.cuda.is_available()
    if use_cuda:  # with TF32, float32 products would have a shorter mantissa than float32's
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    return torch.device("cuda" if use_cuda else "cpu")


def clock(device: torch.device) -> float:
    """The time in seconds, read after the device has finished all work it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
