"""What made the numbers: versions, commit, machine. Facts about software, no paths."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGES = ("mjp-privacy", "torch", "timm", "breaching", "lpips", "scikit-image", "numpy", "pillow")


def provenance(device: torch.device) -> dict[str, str | int]:
    facts: dict[str, str | int] = {name: version(name) for name in PACKAGES}
    facts["python"] = platform.python_version()
    facts["commit"] = _commit()
    facts["device"] = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    )
    facts["threads"] = torch.get_num_threads()
    return facts


def _commit() -> str:
    """The checkout's commit, with '+' where files differ; '' outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return described.stdout.strip() if described.returncode == 0 else ""
