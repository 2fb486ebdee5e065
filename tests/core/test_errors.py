"""Disks that do not take what is written: real ones, through every library that writes for us."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mjp_privacy.core.errors import (
    StorageError,
    UserError,
    format_error,
    storage_error,
    writing,
)
from mjp_privacy.core.files import check_disk, lock, output_folder, write_atomically, write_json

ROOM = 1 << 17  # bytes of the small disk, less than what each writer wants


def mounted(*options: str) -> bool:
    return subprocess.run(["mount", *options], capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 128 KiB."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    if not mounted("-t", "tmpfs", "-o", f"size={ROOM}", "small", str(place)):
        pytest.skip("this machine does not let a tmpfs be mounted")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


NOISE = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0))
WRITERS: dict[str, Callable[[Path], object]] = {
    "bytes": lambda path: path.write_bytes(bytes(1 << 20)),
    "safetensors": lambda path: save_file({"a": NOISE}, path),
    "torch": lambda path: torch.save({"a": NOISE}, path),
    "pyarrow": lambda path: pd.DataFrame({"a": NOISE.numpy()}).to_parquet(path),
    "Pillow": lambda path: Image.frombytes(
        "L", (512, 512), NOISE.numpy().tobytes()[: 1 << 18]
    ).save(path, "png"),
    "pandas' CSV": lambda path: pd.DataFrame({"a": NOISE.numpy()}).to_csv(path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_told_by_every_library_alike(disk: Path, writer: str) -> None:
    path = disk / "rows" / "a.file"
    with pytest.raises(StorageError, match=r"a\.file") as caught:
        write_atomically(path, WRITERS[writer])
    assert caught.value.errno == errno.ENOSPC
    del caught
    gc.collect()  # torch's writer holds its file open
    assert [name for name in disk.rglob("*") if name.is_file()] == []
    write_json(disk / "small.json", [1, 2])  # what was half written is gone again


@pytest.mark.parametrize("writer", WRITERS)
def test_a_limit_on_the_size_of_files_is_told(tmp_path: Path, writer: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        with pytest.raises(StorageError, match=r"a\.file"):
            write_atomically(tmp_path / "a.file", WRITERS[writer])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_disk_is_told(disk: Path) -> None:
    (disk / "run").mkdir()
    assert mounted("-o", "remount,ro", str(disk))
    for write in (
        lambda: write_json(disk / "run" / "a.json", {}),
        lambda: output_folder(disk / "new"),
        lambda: lock(disk / "run").__enter__(),
        lambda: check_disk(disk / "run"),
    ):
        with pytest.raises(StorageError) as caught:
            write()
        assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space"), 28),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 28),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), 28),
        (OSError("encoder error -2 when writing image file"), 28),
        (PermissionError(errno.EACCES, "Permission denied", "a"), errno.EACCES),
    ],
)
def test_libraries_words_are_understood(tmp_path: Path, error: Exception, number: int) -> None:
    with pytest.raises(StorageError, match=str(tmp_path)) as caught, writing(tmp_path / "a"):
        raise error
    assert caught.value.errno == number


@pytest.mark.parametrize(
    "error", [ValueError("5 rows"), RuntimeError("shapes differ"), UserError("no"), KeyError(1)]
)
def test_errors_of_other_kinds_pass(error: Exception) -> None:
    with pytest.raises(type(error)), writing(Path("a")):
        raise error
    assert storage_error(error) is None


# whose fault an error is ------------------------------------------------------------------------


def error_of(source: str, name: str) -> BaseException:
    try:
        exec(compile(source, name, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_place_is_the_innermost_line_that_is_no_librarys() -> None:
    inner = "import json\n\njson.loads('{')"
    assert format_error(error_of(inner, "/home/me/project/attacks/mine.py")).endswith(
        "(char 1) (attacks/mine.py:3)"
    )
    installed = "/x/lib/python3.11/site-packages/attacks/april.py"
    assert format_error(error_of("1 / 0", installed)).endswith("(attacks/april.py:1)")
    other = "/x/lib/python3.11/site-packages/numpy/core.py"
    assert "numpy" not in format_error(error_of("1 / 0", other))
