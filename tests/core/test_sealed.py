"""Sealed files: whole as they were written, and no changed bit stays unnoticed."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically, write_with_digest
from mjp_privacy.core.read import BLANK_DIGEST, FileKind, check_digest
from mjp_privacy.core.sealed import (
    had_seal,
    read_seal,
    read_sealed_json,
    write_sealed_json,
    write_sealed_text,
    written_seal,
)
from mjp_privacy.experiment.block_file import named_pictures, write_block
from mjp_privacy.models.tensor_files import save_tensors

KIND = FileKind("a sealed file", "Make it again.")

NAME = "mjp-seal:" + "0" * 64
"""An image's name that looks like an empty seal."""


def tensors(path: Path) -> None:
    save_tensors(path, {"x": torch.rand(4, 5)}, {"ids": json.dumps([NAME])}, digest=True)


def rows(path: Path) -> None:
    write_block(path, pd.DataFrame({"image_id": [NAME, "b"], "value": [1.0, 2.0]}), {3: "ab" * 32})


def fields(path: Path) -> None:
    write_sealed_json(path, {"cells": [NAME, "ü"]})


def text(path: Path) -> None:
    write_sealed_text(path, f"# {BLANK_DIGEST}\na: {NAME}\n")


WRITERS = (tensors, rows, fields, text)


@pytest.mark.parametrize("write", WRITERS)
def test_any_changed_bit_is_noticed(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    write(path)
    assert read_seal(path).whole
    assert written_seal(path) == read_seal(path).digest
    content, draws = path.read_bytes(), random.Random(1)
    for at in draws.sample(range(8 * len(content)), 300):
        changed = bytearray(content)
        changed[at // 8] ^= 1 << at % 8
        other = tmp_path / f"changed {at}"  # a name of its own: what was read is remembered
        other.write_bytes(changed)
        assert not read_seal(other).whole, at


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_that_is_cut_off_or_grown_is_noticed(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    for at, changed in enumerate((b"", content[:7], content[:-1], content + b"\n", content * 2)):
        path = tmp_path / str(at)
        path.write_bytes(changed)
        assert not read_seal(path).whole


def test_other_programs_read_them_as_before(tmp_path: Path) -> None:
    for name, write in zip(("t", "r", "f", "y"), WRITERS, strict=True):
        write(tmp_path / name)
    assert load_file(tmp_path / "t")["x"].shape == (4, 5)
    assert pd.read_parquet(tmp_path / "r")["image_id"].tolist() == [NAME, "b"]
    assert named_pictures(tmp_path / "r") == {3: "ab" * 32}
    assert json.loads((tmp_path / "f").read_text())["cells"] == [NAME, "ü"]
    assert read_sealed_json(tmp_path / "f", KIND, needed=True) == {"cells": [NAME, "ü"]}


def test_a_name_that_looks_like_a_seal_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(ValueError, match="has no place for a seal"):
        write_with_digest(path, lambda temporary: temporary.write_text(json.dumps([f'"{NAME}"'])))
    assert not path.exists()


def test_the_error_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_sealed_json(path, {"a": 1})
    check_digest(path, KIND)
    path.write_text(path.read_text().replace('"a": 1', '"a": 2'))
    with pytest.raises(
        UserError, match=r"x\.json: expected a sealed file; got a file that change.*M"
    ):
        check_digest(path, KIND, needed=False)
    path.write_text('{"a": 1}')
    check_digest(path, KIND, needed=False)
    with pytest.raises(UserError, match=r"got a file without a seal.*Make it again"):
        check_digest(path, KIND)


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        rows(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
@pytest.mark.parametrize("write", WRITERS)
def test_who_may_read_is_what_the_umask_says(
    tmp_path: Path, write: Callable[[Path], None], mask: int
) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_a_lasting_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        names = {entry.stat().st_ino: entry.name for entry in os.scandir(tmp_path)}
        brought.append(names.get(os.fstat(handle).st_ino, "the folder"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    write_atomically(tmp_path / "x", lambda temporary: temporary.write_text("1"), durable=True)
    assert [name[:3] for name in brought] == [".x.", "the"]
    write_atomically(tmp_path / "y", lambda temporary: temporary.write_text("1"))
    assert len(brought) == 2


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="got a named pipe"):
        check_digest(pipe, KIND)
    for read in (written_seal, had_seal, read_seal):
        with pytest.raises(OSError, match="seek"):  # at once, though nobody writes
            read(pipe)
