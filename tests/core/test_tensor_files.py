"""Tensor files: the same content gives the same bytes, in every process."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mjp_privacy.models.tensor_files import save_tensors

TENSORS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([1, 2], dtype=torch.int64)}
METADATA = {f"key {number}": f'"ü\\{number}"\n' for number in range(12)}

SCRIPT = """
import sys; from pathlib import Path; import torch
from mjp_privacy.core.tensor_files import save_tensors
facts = {f"key {n}": str(n) for n in range(12)}
save_tensors(Path(sys.argv[1]), {"x": torch.ones(3)}, facts)
"""


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS, METADATA)
    loaded = load_file(path)
    assert all(loaded[name].equal(tensor) for name, tensor in TENSORS.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == METADATA
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_order_of_metadata_is_its_own(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    save_tensors(one, TENSORS, METADATA)
    save_tensors(other, TENSORS, dict(reversed(METADATA.items())))
    assert one.read_bytes() == other.read_bytes()


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        subprocess.run([sys.executable, "-c", SCRIPT, str(path)], check=True)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_file_without_metadata(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", TENSORS, {})
    assert set(load_file(tmp_path / "x.safetensors")) == {"a", "b"}


def test_slices_of_one_tensor_are_written_apart(tmp_path: Path) -> None:
    """Autograd returns the class token's gradient as a slice of the position table's."""
    whole = torch.arange(6.0).reshape(3, 2)
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"slice": whole[:1], "whole": whole, "same": whole}, {})
    loaded = load_file(path)
    assert torch.equal(loaded["slice"], whole[:1])
    assert torch.equal(loaded["whole"], whole)
    assert torch.equal(loaded["same"], whole)
