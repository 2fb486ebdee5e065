"""Files are complete or absent, whoever writes into a folder, and what killed writers left goes."""

import errno
import gc
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mjp_privacy.core import files
from mjp_privacy.core.errors import BadFile, StorageError, UserError, format_error, writing
from mjp_privacy.core.files import (
    append_json_line,
    is_locked,
    lock,
    output_file,
    output_folder,
    sweep,
    watch_folder,
    working_in,
    write_atomically,
    write_json,
)
from mjp_privacy.core.read import FileKind, json_lines, read_json_lines

LINES = FileKind("lines of JSON", "Delete them.")


def test_which_temporary_files_are_swept(tmp_path: Path) -> None:
    """Those of processes of this machine that are gone, and old ones of others."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    goes = {
        f".x.parquet.{ended.pid}@elsewhere.tmp": False,  # for a day
        f".old.parquet.{ended.pid}@elsewhere.tmp": True,
        f".x.parquet.{os.getpid()}@{files.HOST}.tmp": False,
        f".x.parquet.{ended.pid}@{files.HOST}.tmp": True,
        ".x.tmp": False,
        ".notes.v2.tmp": False,
        "x.1@a.tmp": False,
    }
    for name in goes:
        (tmp_path / name).touch()
    yesterday = time.time() - files.DAY - 60
    os.utime(tmp_path / f".old.parquet.{ended.pid}@elsewhere.tmp", (yesterday, yesterday))
    folder = tmp_path / f".y.{ended.pid}@{files.HOST}.tmp"
    folder.mkdir()
    sweep(tmp_path)
    assert {name: not (tmp_path / name).exists() for name in goes} == goes
    assert folder.is_dir()


def test_a_durable_file_is_on_the_disk_before_it_has_its_name_and_read_as_the_umask_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        files, "fsync", lambda path: brought.append((path.name, (tmp_path / "x").exists()))
    )

    def write(path: Path) -> None:
        path.unlink()
        path.touch(0o600)  # as safetensors does

    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "x", write, durable=True)
    finally:
        os.umask(before)
    [(temporary, early), folder] = brought
    assert (temporary.startswith(".x."), early, folder) == (True, False, (tmp_path.name, True))
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_only_one_command_works_in_a_folder(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with lock(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(UserError, match=str(tmp_path)):
            lock(tmp_path).__enter__()
    assert not is_locked(tmp_path)


# a folder that is taken away ---------------------------------------------------------------------


def replaced(run: Path) -> None:
    run.rename(run.with_name("moved"))
    with lock(run):
        pass


@pytest.mark.parametrize(
    "what_happens", [shutil.rmtree, replaced, lambda run: (run / ".lock").unlink()]
)
def test_nothing_is_written_into_a_folder_that_is_not_the_same(
    tmp_path: Path, what_happens: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_folders", {})
    run = tmp_path / "run"
    with ExitStack() as stack:
        stack.enter_context(lock(run))
        write_json(run / "rows" / "0.json", [])
        what_happens(run)
        with pytest.raises(StorageError, match="run"):
            write_json(run / "rows" / "1.json", [])
        with pytest.raises(StorageError, match="run"):  # also where nothing is written any more
            stack.close()
    assert not (run / "rows" / "1.json").exists()
    assert files.working_folders() == ()
    (tmp_path / "report").mkdir()
    with pytest.raises(StorageError, match="report"), working_in(tmp_path / "report"):
        (tmp_path / "report").rmdir()
    worker = tmp_path / "elsewhere" / "worker"
    with lock(worker):
        pass
    watch_folder(worker)  # a worker does without a lock
    what_happens(worker)
    with pytest.raises(StorageError, match="worker"):
        write_json(worker / "b.json", [])


def test_an_output_is_tried_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_file(tmp_path / "new" / "scores.csv") == tmp_path / "new" / "scores.csv"
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(UserError, match="new"):
        output_file(tmp_path / "new")
    (tmp_path / "file").touch()
    for place in ("file/inside", "http://127.0.0.1:1/x", "s3://bucket/run", "file:///tmp/x"):
        with pytest.raises(UserError, match="--out"):
            output_folder(Path(place))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]
    assert output_folder(Path("run:1/x")).is_dir()


# lines of JSON -----------------------------------------------------------------------------------

RECORDS = [{"stage": f"s {number}", "seconds": number / 7} for number in range(20)]


def test_lines_come_back_and_no_changed_bit_is_taken_for_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for fields in RECORDS:
        append_json_line(path, fields)
    content = path.read_bytes()
    assert read_json_lines(path, LINES) == RECORDS
    assert json.loads(content.splitlines()[0])["stage"] == "s 0"
    for at in random.Random(2).sample(range(8 * len(content)), 300):
        changed = bytearray(content)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        objects, damaged = json_lines(path, LINES)
        assert damaged or changed[-1:] != b"\n", at
        assert all(fields in RECORDS for fields in objects)
        assert len(objects) >= len(RECORDS) - 2
    path.write_bytes(content.replace(b"s 19", b"s 18"))
    with pytest.raises(BadFile, match="line 20"):
        read_json_lines(path, LINES)


def test_what_a_kill_left_of_a_line_goes_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for known in ([], RECORDS[:1]):
        path.unlink(missing_ok=True)
        for fields in known:
            append_json_line(path, fields)
        with path.open("ab") as file:
            file.write(b'{"stage": "half')
        append_json_line(path, RECORDS[1])
        assert json_lines(path, LINES) == ([*known, RECORDS[1]], [])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="pipe"):  # nobody waits for a reader
        append_json_line(tmp_path / "pipe", {})


# disks that do not take what is written -----------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 128 KiB."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "small", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let a tmpfs be mounted")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_is_told_by_every_library_alike(disk: Path) -> None:
    noise = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0))
    frame, pixels = pd.DataFrame({"a": noise.numpy()}), noise.numpy().tobytes()[: 1 << 18]
    writers: list[Callable[[Path], object]] = [
        lambda path: save_file({"a": noise}, path),
        lambda path: torch.save({"a": noise}, path),
        frame.to_parquet,
        frame.to_csv,
        lambda path: Image.frombytes("L", (512, 512), pixels).save(path, "png"),
    ]
    for write in writers:
        with pytest.raises(StorageError, match=r"a\.file") as caught:
            write_atomically(disk / "rows" / "a.file", write)
        assert caught.value.errno == errno.ENOSPC
        del caught
        gc.collect()  # torch's writer holds its file open
        assert [name for name in disk.rglob("*") if name.is_file()] == []


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space"), 28),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), 28),
        (OSError("encoder error -2 when writing image file"), 28),
        (OSError(errno.EFBIG, "File too large", "a"), errno.EFBIG),
        *((error, 0) for error in (RuntimeError("x"), UserError("no"))),
    ],
)
def test_libraries_words_are_understood(tmp_path: Path, error: Exception, number: int) -> None:
    with pytest.raises(type(error) if not number else StorageError) as caught:  # noqa: SIM117
        with writing(tmp_path / "a"):
            raise error
    assert not number or getattr(caught.value, "errno", 0) == number


# whose fault an error is ------------------------------------------------------------------------


def test_the_place_is_the_innermost_line_that_is_no_librarys() -> None:
    source = "import json\n\njson.loads('{')"
    with pytest.raises(ValueError, match="Expecting") as caught:
        exec(compile(source, "/home/me/attacks/mine.py", "exec"), {})
    assert " (attacks/mine.py:3)" in format_error(caught.value)
