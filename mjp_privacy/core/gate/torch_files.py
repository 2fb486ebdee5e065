"""PyTorch's own file format, read without executing anything in it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from mjp_privacy.core.gate.file_kind import FileKind


def read_torch_file(path: Path, kind: FileKind, allowed: Collection[Any] = ()) -> Any:
    """What torch.save wrote: plain containers, numbers, texts and tensors on the CPU.

    allowed: classes that are read as such, as torch.serialization.safe_globals takes them
    """
    import torch

    kind.check(path)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged or foreign file makes the unpickler raise errors of many classes (struct,
        # unicode, index, ...); they all mean that it cannot be read.
        raise kind.refusal(
            path, f"what cannot be read as plain weights ({_said(error)})"
        ) from error


def _said(error: Exception) -> str:
    """The line of torch's long message that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line]
    return (telling or lines or [type(error).__name__])[0][:200]
