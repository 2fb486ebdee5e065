"""With what software and machine a run's numbers were made: versions, commit, device; no paths."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import TypeAdapter

from mjp_privacy.core.machine import commit
from mjp_privacy.core.sealed import BLANK, write_sealed_text
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.store import RunStore

FILE_NAME = re.compile(r"[^A-Za-z0-9_-]")  # what an experiment's name may hold and a file's not
PACKAGES = ("mjp-privacy", "torch", "timm", "breaching", "lpips", "scikit-image", "numpy", "pillow")


def provenance(device: torch.device, threads: int) -> dict[str, str | int]:
    """Versions of the packages, the commit, the device and the CPU threads of each process."""
    facts: dict[str, str | int] = {name: version(name) for name in PACKAGES}
    facts["python"] = platform.python_version()
    facts["commit"] = commit()
    facts["device"] = _name(device)
    facts["threads"] = threads
    return facts


def _name(device: torch.device) -> str:
    """The model of a GPU, or a CPU's kind; workers elsewhere may have a GPU where none is here."""
    if device.type != "cuda":
        return platform.machine()
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "cuda"


def write_provenance(
    store: RunStore, experiment: Experiment, made_with: dict[str, str | int]
) -> None:
    """Write RUN/experiment.yaml, the complete experiment and the provenance of this command; and
    RUN/experiments/NAME.yaml, since a folder may be filled by several experiments."""
    content = {"experiment": _plain(experiment), "made_with": made_with}
    text = f"# {BLANK}\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}"
    name = FILE_NAME.sub("_", experiment.name)
    for path in (store.root / "experiment.yaml", store.root / "experiments" / f"{name}.yaml"):
        write_sealed_text(path, text)


def _plain(experiment: Experiment) -> dict[str, Any]:
    """The experiment's fields for YAML: tuples as lists, checkpoints without their folder."""
    content: dict[str, Any] = TypeAdapter(Experiment).dump_python(experiment, mode="json")
    for model in content["models"].values():
        if model["checkpoint"]:
            model["checkpoint"] = Path(model["checkpoint"]).name
    return content
