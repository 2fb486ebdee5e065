"""PyTorch's files from strangers: what they hold is bounded before it is read, and nothing runs."""

import contextlib
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind
from mjp_privacy.models.tensor_files import MOST_PICKLED, check_stored, read_torch_file

KIND = FileKind("weights", "Save them again.", 1 << 30)
STATE = {"a": torch.arange(6.0).view(2, 3), "b": {"c": [1, "two"]}}


def saved(path: Path, content: Any, *, old: bool = False) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return path


def rezipped(path: Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> Path:
    """The same entries, written by `change` into another zip."""
    changed = path.with_name("changed.pth")
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(changed, "w") as after:
        for entry in before.infolist():
            change(after, entry.filename, before.read(entry))
    return changed


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("old", [False, True])
def test_both_formats_come_back(tmp_path: Path, old: bool, own: bool) -> None:
    found = read_torch_file(saved(tmp_path / "w.pth", STATE, old=old), KIND, own=own)
    assert torch.equal(found["a"], STATE["a"])
    assert found["b"] == STATE["b"]


def test_large_tensors_of_the_older_format_are_no_names(tmp_path: Path) -> None:
    large = {"a": torch.ones(MOST_PICKLED // 4 + 10)}
    found = read_torch_file(saved(tmp_path / "w.pth", large, old=True), KIND)
    assert float(found["a"].sum()) == len(large["a"])


@pytest.mark.parametrize("old", [False, True])
def test_many_names_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    monkeypatch.setattr(torch_files, "MOST_PICKLED", 1 << 18)
    path = saved(tmp_path / "w.pth", {f"n{i}": i for i in range(50_000)}, old=old)
    with pytest.raises(UserError, match=r"MiB of names and settings .*, more than 0 MiB"):
        read_torch_file(path, KIND)


def test_a_compressed_entry_is_refused_unread(tmp_path: Path) -> None:
    def packed(after: zipfile.ZipFile, name: str, content: bytes) -> None:
        after.writestr(name, content, zipfile.ZIP_DEFLATED)

    bomb = saved(tmp_path / "w.pth", {"a": torch.zeros(10_000_000)})
    with pytest.raises(UserError, match=r"whose entry w/data.pkl is compressed"):
        read_torch_file(rezipped(bomb, packed), KIND, own=True)


def test_a_list_of_too_many_entries_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_files, "MOST_LISTED", 1 << 16)
    path = tmp_path / "w.pth"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(2_000):
            archive.writestr(f"w/data/{number:06d}", b"")
    with pytest.raises(UserError, match=r"a list of entries of \d+ MiB"):
        read_torch_file(path, KIND)


def test_a_changed_bit_of_ones_own_file_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"a": torch.zeros(1000)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged bytes in w/data/0"):
        read_torch_file(path, KIND, own=True)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(1).expand(10**12), r"the shape \(1000000000000,\), of which the file holds"),
        (torch.empty(3, device="meta"), "not plain numbers"),
        (torch.zeros(2, 2).to_sparse(), "a tensor of torch.sparse_coo on cpu, not plain numbers"),
        (
            torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8),
            "not plain numbers",
        ),
    ],
)
def test_numbers_that_are_not_in_the_file_are_refused(
    tmp_path: Path, tensor: torch.Tensor, said: str
) -> None:
    path = saved(tmp_path / "w.pth", {"a": tensor})
    with pytest.raises(UserError, match=rf"w.pth.*{said}|w.pth: .*cannot be read"):
        check_stored(read_torch_file(path, KIND), path, KIND)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, Path.touch])
def test_what_is_no_file_of_weights(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"w.pth: expected weights; got .*Save them again"):
        read_torch_file(tmp_path / "w.pth", KIND)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("old", [False, True])
def test_damage_anywhere_is_a_sentence(tmp_path: Path, old: bool, own: bool) -> None:
    path = saved(tmp_path / "w.pth", STATE, old=old)
    good, draw = path.read_bytes(), random.Random(0)
    for _ in range(60):
        path.write_bytes(good[: draw.randrange(len(good))])
        with pytest.raises(UserError, match=r"w.pth"):
            read_torch_file(path, KIND, own=own)
        changed = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(UserError):
            read_torch_file(path, KIND, own=own)
