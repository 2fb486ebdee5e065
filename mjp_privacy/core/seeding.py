"""Derived seeds: every random choice is seeded by names and numbers, none by global state."""

import hashlib
import json

import torch


def derive_seed(*parts: str | int | float) -> int:
    """A 63-bit seed from its parts, such as derive_seed("jigsaw", 0, "cat.png").

    It is the same on every machine and Python version.
    """
    # NumPy's scalars have another repr than Python's, np.int64(3), and must give the same seed.
    plain = [part.item() if hasattr(part, "item") else part for part in parts]
    text = json.dumps([repr(part) for part in plain])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_generator(*parts: str | int | float) -> torch.Generator:
    """A CPU generator seeded from its parts."""
    return torch.Generator().manual_seed(derive_seed(*parts))
