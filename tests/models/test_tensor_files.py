"""Tensors in files from strangers: bounded before they are read, and nothing in them runs."""

import json
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mjp_privacy.core.errors import BadFile, NoFile
from mjp_privacy.core.read import FileKind
from mjp_privacy.models import tensor_files
from mjp_privacy.models.tensor_files import (
    BLANK_DIGEST,
    FLOATS,
    MOST_PICKLED,
    TensorFile,
    check_digest,
    check_stored,
    read_torch_file,
    save_tensors,
    write_with_digest,
)
from tests.inputs.tensors import HEADER_CHANGES, file_of, header_of, with_header

WEIGHTS = FileKind("weights", "Copy them again.", 1 << 30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}
    save_file(tensors, tmp_path / "w.safetensors", {"heads": "3", "bad": "{"})
    return tmp_path / "w.safetensors"


def refused(path: Path) -> str:
    with pytest.raises(BadFile) as raised:
        TensorFile(path, WEIGHTS)
    text = str(raised.value)
    assert text.startswith(str(path))
    assert "\x1b" not in text
    assert len(text) < 800
    return text


def test_a_sound_file(path: Path) -> None:
    file = TensorFile(path, WEIGHTS)
    assert (file.names, file.dtypes) == (["a", "b"], {"a": "F32", "b": "I64"})
    assert file.shapes == {"a": (2, 3), "b": (4,)}
    assert (file.metadata_value("heads"), file.metadata_value("none")) == (3, None)
    assert torch.equal(file.tensors(["a"])["a"], torch.arange(6.0).reshape(2, 3))
    assert set(file.tensors(finite=True)) == {"a", "b"}
    with pytest.raises(BadFile, match=r"w\.safetensors"):
        file.metadata_value("bad")
    with pytest.raises(BadFile, match=r"w\.safetensors, b: .*I64"):
        TensorFile(path, WEIGHTS, FLOATS)
    with pytest.raises(NoFile):
        TensorFile(path.with_name("none"), WEIGHTS)
    for number in (float("nan"), float("inf"), -float("inf")):
        save_file({"a": torch.tensor([1.0, number, 2.0]), "b": torch.ones(2)}, path)
        assert "a" in TensorFile(path, WEIGHTS).tensors()
        with pytest.raises(BadFile, match=r", a: .*1 of 3"):
            TensorFile(path, WEIGHTS).tensors(finite=True)


ALLOWED = ("a further field", "a name with escapes", "metadata of 10^5 names", "10^5 empty tensors")


@pytest.mark.parametrize("change", [name for name in HEADER_CHANGES if name not in ALLOWED])
def test_a_header_that_lies(path: Path, change: str) -> None:
    with_header(HEADER_CHANGES[change])(path)
    refused(path)


def overlapping(content: bytes) -> bytes:
    """Two tensors of the same bytes."""
    header, data = header_of(content)
    name, other = sorted(("a", "b"), key=lambda n: header[n]["data_offsets"][0])
    begin, end = header[name]["data_offsets"]
    return file_of({**header, other: header[name]}, data[: end - begin])


HUGE = {"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "five bytes": lambda content: content[:5],
    "a length of 2^64": lambda content: b"\xff" * 8 + content[8:],
    "more": lambda content: content + b"more",
    "overlap": overlapping,
    **{
        str(header)[:20]: lambda content, header=header: file_of(header, b"")
        for header in ("[]", "[" * 100_000, '{"a": 1, "a": 2}', '{"a": NaN}', HUGE)
    },
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_bytes(path: Path, damage: str) -> None:
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    tracemalloc.start()
    refused(path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20  # not what a header claims
    tracemalloc.stop()


# what is written ----------------------------------------------------------------------------------


def test_slices_of_one_tensor_are_written_apart_and_metadata_in_order(tmp_path: Path) -> None:
    """Autograd returns the class token's gradient as a slice of the position table's."""
    whole, path = torch.arange(6.0).reshape(3, 2), tmp_path / "x.safetensors"
    metadata = {"ü": '"\\\n"', **{f"key {n}": str(n) for n in range(12)}}
    save_tensors(path, {"slice": whole[:1], "whole": whole, "same": whole}, metadata)
    loaded = load_file(path)
    assert torch.equal(loaded["slice"], whole[:1])
    assert torch.equal(loaded["same"], whole)
    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata
    assert list(header_of(path.read_bytes())[0]["__metadata__"]) == sorted(metadata)


NAME = "mjp-seal:" + "0" * 64
"""An image's name that looks like the place of a digest."""
JSON = json.dumps({"seal": BLANK_DIGEST, "cells": [NAME, "ü"]})
WRITERS: dict[str, Callable[[Path], object]] = {
    "tensors": lambda path: save_tensors(
        path, {"x": torch.rand(4, 5)}, {"ids": json.dumps([NAME])}, digest=True
    ),
    "fields": lambda path: write_with_digest(path, lambda file: file.write_text(JSON)),
    "lines": lambda path: write_with_digest(
        path, lambda file: file.write_text(f"# {BLANK_DIGEST}\na: {NAME}\n")
    ),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_any_changed_bit_is_noticed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    WRITERS[kind](path)
    check_digest(path, WEIGHTS, needed=True)
    content, draws = path.read_bytes(), random.Random(1)
    changes = [content[:7], content[:-1], content + b"\n", content * 2]
    for at in draws.sample(range(8 * len(content)), 200):
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        changes.append(bytes(flipped))
    for number, changed in enumerate(changes):
        other = tmp_path / f"changed {number}"
        other.write_bytes(changed)
        with pytest.raises(BadFile, match=other.name):
            check_digest(other, WEIGHTS, needed=True)


def test_a_file_that_is_cut_off_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"a": torch.arange(6.0)}, {})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadFile, match="cut off"):
        TensorFile(path, WEIGHTS)


# PyTorch's format ---------------------------------------------------------------------------------

STATE = {"a": torch.arange(6.0).view(2, 3), "b": {"c": [1, "two"]}}
BOTH = pytest.mark.parametrize("old", [False, True])


def saved(path: Path, content: Any, *, old: bool = False) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return path


@BOTH
def test_both_formats_come_back_and_names_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    for own in (False, True):
        found = read_torch_file(saved(tmp_path / "w.pth", STATE, old=old), WEIGHTS, own=own)
        assert torch.equal(found["a"], STATE["a"])
        assert found["b"] == STATE["b"]
    large = {"a": torch.ones(MOST_PICKLED // 4 + 10)}
    found = read_torch_file(saved(tmp_path / "w.pth", large, old=old), WEIGHTS)
    assert float(found["a"].sum()) == len(large["a"])
    monkeypatch.setattr(tensor_files, "MOST_PICKLED", 1 << 18)
    path = saved(tmp_path / "w.pth", {f"n{i}": i for i in range(50_000)}, old=old)
    with pytest.raises(BadFile, match="names and settings"):
        read_torch_file(path, WEIGHTS)


def test_a_zip_that_changed_or_is_none_of_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, packed = saved(tmp_path / "w.pth", {"a": torch.zeros(1000)}), tmp_path / "packed.pth"
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(packed, "w") as after:
        for entry in before.infolist():
            after.writestr(entry.filename, before.read(entry), zipfile.ZIP_DEFLATED)
    content, claims = bytearray(path.read_bytes()), tmp_path / "claims.pth"
    first = content.index(b"PK\x01\x02")
    claims.write_bytes(content[: first + 24] + b"\xff\xff\xff\x0f" + content[first + 28 :])
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    for damaged, named in ((path, r"w/data/0"), (packed, r"packed\.pth"), (claims, "larger")):
        with pytest.raises(BadFile, match=named):
            read_torch_file(damaged, WEIGHTS, own=True)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadFile, match=r"w\.pth"):
        read_torch_file(path, WEIGHTS)
    monkeypatch.setattr(tensor_files, "MOST_LISTED", 1 << 10)
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(200):
            archive.writestr(f"w/data/{number:06d}", b"")
    with pytest.raises(BadFile, match=r"packed\.pth"):
        read_torch_file(packed, WEIGHTS)


def test_numbers_that_are_not_in_the_file_are_refused(tmp_path: Path) -> None:
    for tensor in (
        torch.zeros(1).expand(10**12),
        torch.empty(3, device="meta"),
        torch.zeros(2, 2).to_sparse(),
        torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8),
    ):
        path = saved(tmp_path / "w.pth", {"a": tensor})
        with pytest.raises(BadFile, match=r"w\.pth"):
            check_stored(read_torch_file(path, WEIGHTS), path, WEIGHTS)
