"""Recorded uploads of a small plain federation, and ways to spoil and to attack them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.models.tensor_files import DIGEST_KEY
from mjp_privacy.uploads import check
from mjp_privacy.uploads.folder import upload_names
from mjp_privacy.uploads.record import Upload
from tests.helpers.runs import rows

NAME = "b1s1_r00001_000_at00001"
"""One of the four uploads: the first image in the first of two rounds."""

ATTACKS: dict[str, Any] = {
    "name": "attacks",
    "attacks": [
        {"name": "grey"},
        {"name": "patch_gradient"},
        {"name": "april"},
        {"name": "multi_round", "options": {"uploads": 2, "prior": "stationary"}},
        {"name": "multi_round", "label": "three", "options": {"uploads": 3}},
    ],
}
ONE: dict[str, Any] = {"attacks": [{"name": "patch_gradient"}]}


def load_uploads(folder: Path) -> list[Upload]:
    """Every upload of a folder, sorted by name; all headers are sound."""
    return [Upload.load(folder / f"{name}.json") for name in upload_names(folder)]


def copied(recorded: Path, place: Path) -> Path:
    """A copy of the uploads to spoil."""
    shutil.copytree(recorded, place)
    return place


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file over; a second call turns it back."""
    content = bytearray(path.read_bytes())
    bit %= 8 * len(content)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def edit(folder: Path, name: str = NAME, **changes: Any) -> None:
    """Change fields of one header, which then has no seal."""
    path = folder / f"{name}.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if name != "seal"}))


def edit_all(folder: Path, **changes: Any) -> None:
    """Change fields of every header."""
    for path in folder.glob("*.json"):
        edit(folder, path.stem, **changes)


def change(path: Path, altered: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Write a safetensors file again with other tensors and the same metadata, but for its seal."""
    with safe_open(path, "pt") as file:
        metadata = {k: v for k, v in (file.metadata() or {}).items() if k != DIGEST_KEY}
    save_file(dict(altered(load_file(path))), path, metadata or None)


def change_upload(
    folder: Path, altered: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> None:
    """Write the tensors of one upload again, altered."""
    change(folder / f"{NAME}.safetensors", altered)


def change_truth(
    folder: Path, altered: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> None:
    """Write the private images of one upload again, altered."""
    change(folder / "truth" / f"{NAME}.safetensors", altered)


def as_float64(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in double precision."""
    return {name: tensor.to(torch.float64) for name, tensor in tensors.items()}


def attacked(folder: Path, **changes: Any) -> Any:
    """The summary of a run, its rows of standard PSNR with the attack's title, and all rows."""
    out = folder.parent / "run"
    summary = attack_uploads(load_experiment(ATTACKS | changes), folder, out, device="cpu")
    found = rows(out).assign(title=lambda table: table["attack"])
    return summary, found[(found["metric"] == "psnr") & (found["variant"] == "standard")], found


def check_uploads(folder: Path) -> tuple[str, bool]:
    """The printed report on a folder of uploads, and whether every one can be attacked."""
    checked = check.check_uploads(folder)
    return checked.text(), checked.usable
