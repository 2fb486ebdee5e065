"""Disks that do not take what is written: real ones, through every library that writes for us."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mjp_privacy.core.errors import StorageError, UserError, storage_error, writing
from mjp_privacy.core.files import (
    check_disk,
    lock,
    output_file,
    output_folder,
    watch_folder,
    working_in,
    write_atomically,
    write_json,
)

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
        "RGB", (512, 512), NOISE.numpy().tobytes()[: 512 * 512 * 3]
    ).save(path, "png"),
    "pandas' CSV": lambda path: pd.DataFrame({"a": NOISE.numpy()}).to_csv(path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_told_by_every_library_alike(disk: Path, writer: str) -> None:
    path = disk / "rows" / "a.file"
    with pytest.raises(StorageError, match=r"a\.file cannot be written \(no space left on dev"):
        write_atomically(path, WRITERS[writer])
    assert [name for name in disk.rglob("*") if name.is_file()] == []
    write_json(disk / "small.json", [1, 2])  # what was half written is gone again


@pytest.mark.parametrize("writer", WRITERS)
def test_a_limit_on_the_size_of_files_is_told(tmp_path: Path, writer: str) -> None:
    said = r"a\.file cannot be written \((file too large|input/output error)\)\. "
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        with pytest.raises(StorageError, match=said):
            write_atomically(tmp_path / "a.file", WRITERS[writer])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_disk_is_told(disk: Path) -> None:
    (disk / "run").mkdir()
    assert mounted("-o", "remount,ro", str(disk))
    with pytest.raises(StorageError, match=r"a\.json cannot be written \(read-only file system"):
        write_json(disk / "run" / "a.json", {})
    with pytest.raises(StorageError, match=r"--out .*new cannot be written \(read-only"):
        output_folder(disk / "new")
    with pytest.raises(StorageError, match=r"\.lock cannot be written \(read-only"):
        lock(disk / "run").__enter__()
    with pytest.raises(StorageError, match=r"cannot be written \(read-only"):
        output_file(disk / "run" / "scores.csv")


def test_somebody_elses_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "run" / ".lock"))

    monkeypatch.setattr(os, "open", refused)  # root may write everywhere
    with pytest.raises(StorageError, match=r"\.lock cannot be written \(permission denied\)\. Get"):
        lock(tmp_path / "run").__enter__()


def test_errors_of_other_kinds_pass() -> None:
    for error in (
        ValueError("5 rows"),
        RuntimeError("shapes differ"),
        UserError("no"),
        KeyError(1),
    ):
        with pytest.raises(type(error)), writing(Path("a")):
            raise error
        assert storage_error(error) is None


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space"), 28),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 28),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), 5),
        (OSError("encoder error -2 when writing image file"), 5),
    ],
)
def test_libraries_words_are_understood(tmp_path: Path, error: Exception, number: int) -> None:
    with pytest.raises(StorageError) as caught, writing(tmp_path / "a"):
        raise error
    assert caught.value.errno == number


# a folder that is taken away ----------------------------------------------------------------------


def taken_away(run: Path) -> None:
    shutil.rmtree(run)


def replaced(run: Path) -> None:
    run.rename(run.with_name("moved"))
    with lock(run):
        pass


def emptied(run: Path) -> None:
    (run / ".lock").unlink()


@pytest.mark.parametrize("what_happens", [taken_away, replaced, emptied])
def test_nothing_is_written_into_a_folder_that_is_not_the_same(
    tmp_path: Path, what_happens: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    said = r"run was deleted or replaced while the command worked in it, and with it what was done"
    with ExitStack() as stack:
        stack.enter_context(lock(run))
        write_json(run / "rows" / "0.json", [])
        what_happens(run)
        with pytest.raises(StorageError, match=said):
            write_json(run / "rows" / "1.json", [])
        with pytest.raises(StorageError, match=said):  # also where nothing is written any more
            stack.close()
    assert not (run / "rows" / "1.json").exists()


def test_a_folder_that_is_gone_at_the_end_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="was deleted or replaced"), lock(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
    report = tmp_path / "report"
    report.mkdir()
    with pytest.raises(StorageError, match="was deleted or replaced"), working_in(report):
        report.rmdir()


def test_a_workers_folder_must_stay_too(tmp_path: Path) -> None:
    with lock(tmp_path / "run"):
        pass
    watch_folder(tmp_path / "run")
    write_json(tmp_path / "run" / "a.json", [])
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageError, match="was deleted or replaced"):
        write_json(tmp_path / "run" / "b.json", [])
    assert not (tmp_path / "run").exists()


def test_files_missing_in_a_folder_that_is_worked_in_were_taken_away(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"log\.jsonl cannot be written"), lock(tmp_path / "r"):
        (tmp_path / "r" / "log.jsonl").open()


def test_an_error_without_a_name_is_told_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"/run cannot be written \(no space"):  # noqa: SIM117
        with lock(tmp_path / "run"):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_is_tried_before_work_begins(tmp_path: Path, disk: Path) -> None:
    assert output_file(tmp_path / "new" / "scores.csv") == tmp_path / "new" / "scores.csv"
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(
        UserError, match=r"--out .*new: expected a file, got a folder\. Give a name"
    ):
        output_file(tmp_path / "new")
    (disk / "filled").write_bytes(bytes(ROOM - 8192))
    with pytest.raises(StorageError, match="no space left"):
        check_disk(disk)
