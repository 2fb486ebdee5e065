"""Runs whose disk is full or whose folder is taken away: exit 74, and the same command goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mjp_privacy.experiment.messages import message_of

from mjp_privacy.cli import main
from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.experiment import save
from mjp_privacy.experiment.engines.worker import do_task
from mjp_privacy.experiment.job import Job, Task
from mjp_privacy.federation import campaign as campaigns
from tests.helpers import federations
from tests.helpers.runs import attack, one_cell, photographs, same_results

CONFIG = one_cell(attacks=[{"name": "april"}, {"name": "patch_gradient"}])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"), 6)


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    attack(images, out, CONFIG)
    return out


def command(images: Path, out: Path, folder: Path) -> int:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    words = ["attack", config, "--images", images, "--out", out, "--device", "cpu"]
    return main([str(word) for word in words])


def after_blocks(
    number: int, happens: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have something happen once so many blocks of a run were written."""
    write, written = save.write_block, []

    def write_and_count(*arguments: Any) -> None:
        write(*arguments)
        written.append(arguments)
        if len(written) == number:
            happens()

    monkeypatch.setattr(save, "write_block", write_and_count)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 320 KiB, too small for the run."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=320k", "small", str(place)]
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a small disk needs root")
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let a tmpfs be mounted")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_run_on_a_full_disk_goes_on_where_there_is_space(
    images: Path,
    undisturbed: Path,
    disk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (disk / "other").write_bytes(bytes(130 << 10))
    assert command(images, disk / "run", tmp_path) == 74
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {disk}/run/")
    assert last.endswith(
        " cannot be written (no space left on device). Free some space; then the same command "
        "goes on from here"
    )
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    assert command(images, disk / "run", tmp_path) == 0
    same_results(undisturbed, disk / "run")


def test_a_disk_that_becomes_read_only(
    images: Path,
    undisturbed: Path,
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)

    def read_only() -> None:  # `-l` also where the lock's file is open for writing
        shutil.move(disk / "run", disk / "kept")
        (disk / "run").symlink_to("/proc/self/fdinfo")  # where nobody may write

    with monkeypatch.context() as patch:
        after_blocks(2, read_only, patch)
        assert command(images, disk / "run", tmp_path) == 74
    (disk / "run").unlink()
    shutil.move(disk / "kept", disk / "run")
    assert command(images, disk / "run", tmp_path) == 0
    same_results(undisturbed, disk / "run")


def test_a_run_whose_folder_is_deleted_ends_with_74_and_starts_anew(
    images: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    for blocks in (1, 4):  # in its middle, and after its last block
        with monkeypatch.context() as patch:
            after_blocks(blocks, lambda: shutil.rmtree(run), patch)
            assert command(images, run, tmp_path) == 74
        assert not run.exists()
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"error: {run} was deleted or replaced while the command worked in it, and with it "
            "what was done there. Leave the folder where it is while a command works in it; then "
            "the same command goes on from here"
        )
    assert command(images, run, tmp_path) == 0
    same_results(undisturbed, run)


def test_a_run_whose_rows_are_deleted_says_so(
    images: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        after_blocks(2, lambda: shutil.rmtree(run / "rows"), patch)
        assert command(images, run, tmp_path) == 74
    said = "error: 2 file(s) of rows were deleted while the command worked, such as "
    assert said in capsys.readouterr().err
    assert command(images, run, tmp_path) == 0
    same_results(undisturbed, run)


def test_a_worker_tells_a_disk_from_a_fault(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mjp_privacy.experiment.config_files import load_experiment

    chosen = tuple(f"{number}.png" for number in range(6))
    root, here = str(tmp_path / "run"), str(tmp_path)
    experiment = load_experiment(CONFIG)
    job = Job(root, experiment, "cpu", 1, False, here, images=str(images), chosen=chosen)
    for block, (error, words, number) in enumerate(
        [
            (StorageError.of("RUN/rows/a", 28), "RUN/rows/a cannot be written (no space", 28),
            (MemoryError("9 PiB"), "memory ran out (9 PiB)", 0),
            (UserError("Expected\na shared disk."), "Expected a shared disk.", 0),
            (TypeError("a bug"), "Traceback (most recent call last)", 0),
        ]
    ):

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        job.write()
        monkeypatch.chdir(here)  # where a task leads its worker, and this test comes back from
        monkeypatch.setattr("mjp_privacy.experiment.engines.worker.work_block", fails)
        do_task(str(job.path), 0, block % 2, attempt=block + 1)
        [file] = job.path.parent.glob(f"*.{Task(0, block % 2, block + 1).attempt}.1.jsonl")
        ended = message_of(file.read_text().splitlines()[-1])
        assert words in ended.error
        assert ended.storage == number


def test_a_federation_whose_folder_is_deleted_between_training_and_attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, data = tmp_path / "out", federations.images(tmp_path / "data")
    config = federations.config(attacks=[{"name": "patch_gradient"}])

    def gone(*_: object, **__: object) -> None:
        shutil.rmtree(out)
        raise UserError("no uploads there")

    monkeypatch.setattr(campaigns, "attack_uploads", gone)
    with pytest.raises(StorageError, match="was deleted or replaced while the command worked"):
        campaigns.campaign(config, data, out)
