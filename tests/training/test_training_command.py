"""`mjp train` and `mjp curves` as commands and processes: killed, on several, with slips."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.training.processes import World, _is_lost, _own_gpu
from mjp_privacy.training.trainer import train
from tests.helpers.training import (
    PICTURES_AS_THEY_ARE,
    class_folders,
    content,
    curve,
    small,
    together,
    weights,
)

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
AS_IS = {"augmentation": PICTURES_AS_THEY_ARE, "data": {"store": "files"}}


def test_the_command_trains_a_row_and_says_what_is_wrong(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**content(), "rows": {"J": {}, "K": {"seed": 4}}}))
    where = [str(config), "--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["train", *where, "--row", "K", "--epochs", "1"]) == 0
    said, path = capsys.readouterr(), tmp_path / "run" / "model.safetensors"
    assert said.out == f"{path}\n"
    (line,) = (line for line in said.err.splitlines() if line.startswith("Next:"))
    assert line.startswith("Next: mjp attack own --weights")  # nothing was held out to evaluate on
    again = [*where[:-3], str(tmp_path / "preset"), "--device", "cpu", "--epochs", "1"]
    assert main(["train", *again, "--row", "K", "--preset", "authors_code"]) == 0
    assert capsys.readouterr().err.startswith(
        "preset authors_code: jigsaw.gamma 0.1, jigsaw.dal_schedule rising_then_halving, "
    )
    assert main(["train", *where]) == 2
    assert "expected --row NAME" in capsys.readouterr().err
    assert main(["train", *where, "--row", "K"]) == 2
    assert "recipe.epochs was 1 and is 2" in capsys.readouterr().err


def test_the_commands_that_follow_a_training_can_be_copied(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From folders whose names hold a blank, in ImageNet's layout."""
    files, out, config = tmp_path / "my pictures", tmp_path / "a run", tmp_path / "config.yaml"
    files.mkdir()
    data.rename(files / "test")
    shutil.copytree(files / "test", files / "train")
    config.write_text(yaml.safe_dump(content(recipe={"epochs": 1})))
    assert main(_command(config, files, out)[2:-2]) == 0
    lines = capsys.readouterr().err.splitlines()[-2:]
    evaluate, attack = (shlex.split(line.removeprefix("Next:")) for line in lines)
    assert attack[:3] == ["mjp", "attack", "own"]
    assert attack[attack.index("--images") + 1] == str(files / "test")
    assert main(evaluate[1:]) == 0
    assert "| Model |" in capsys.readouterr().out


def _command(config: Path, data: Path, out: Path) -> list[str]:
    files = [str(config), "--data", str(data), "--out", str(out)]
    return ["-m", "mjp_privacy", "train", *files, "--device", "cpu", "--threads", "1"]


@pytest.mark.nightly
def test_kill_9_in_the_middle_ends_with_the_same_curve(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content(recipe={"epochs": 100})))
    for run in ("killed", "whole"):
        command = [sys.executable, *_command(config, data, tmp_path / run)]
        if run == "killed":
            process = subprocess.Popen(command, cwd=ROOT)
            deadline = time.monotonic() + 120
            while len(curve(tmp_path / run)) < 30 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
            reached = curve(tmp_path / run)[-1]["step"]
            assert 60 <= reached < 600, "the run was killed in its middle"
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    before, after = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.nightly
@pytest.mark.parametrize("mask_per", ["batch", "image"])
def test_two_processes_lose_as_one_does(data: Path, tmp_path: Path, mask_per: str) -> None:
    """Same global batch, gloo; without drop path, mixup and the like, which each process draws."""
    config = small(
        model={"drop_path": 0},
        jigsaw={"mask_per": mask_per, "first_epoch": 0},
        recipe={"epochs": 6},
        log_every=1,
        checkpoint_minutes=0.0003,  # falls due at other steps by each process's clock
    )
    val = class_folders(tmp_path / "val", images=7)  # 21 in all: unequal shares
    files: dict[str, Any] = {"data": data, "val": val, "device": "cpu", "workers": 0}
    train(config, out=tmp_path / "one", **files)
    said = together(tmp_path / "said", 2, lambda: train(config, out=tmp_path / "two", **files))
    assert said == ["", ""]
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == len(two) == 36
    for line, other in zip(one, two, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], abs=1e-5)
        assert other["dal"] == pytest.approx(line["dal"], abs=1e-5)
    measured = [line["val_top1"] for line in one if "val_top1" in line]
    assert measured == [line["val_top1"] for line in two if "val_top1" in line]
    assert len(set(measured)) > 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("used_for", "precision", "workers"),
    [("training", "float32", 1), ("validation", "bfloat16", 0)],
)
def test_an_error_of_one_process_ends_all_with_its_reason(
    tmp_path: Path, used_for: str, precision: str, workers: int
) -> None:
    """A picture in one process's share is damaged: nobody waits for a process that has left, and
    the same command goes on when the picture is repaired, as one process does."""
    config = tmp_path / "config.yaml"
    small = {"model": {"drop_path": 0}, "recipe": {"precision": precision}, "log_every": 1}
    fields = content(**AS_IS, **small, jigsaw={"first_epoch": 0})
    config.write_text(yaml.safe_dump(fields))
    data, val = class_folders(tmp_path / "data"), class_folders(tmp_path / "val", images=7)
    picture = (data if used_for == "training" else val) / "class_0" / "003.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    options = [*_command(config, data, tmp_path / "two"), "--val", str(val)]
    options += ["--workers", str(workers)]
    two = [sys.executable, *TORCHRUN, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run: dict[str, Any] = {"cwd": ROOT, "env": environment, "timeout": 200}
    failed = subprocess.run(two, capture_output=True, text=True, check=False, **run)
    assert failed.returncode == 1
    assert failed.stderr.count(f"{picture.name}: ") == 1
    picture.write_bytes(whole)
    subprocess.run(two, check=True, **run)
    options[options.index(str(tmp_path / "two"))] = str(tmp_path / "one")
    subprocess.run([sys.executable, *options], check=True, **run)
    curves = [curve(tmp_path / name) for name in ("one", "two")]
    assert [line["step"] for line in curves[0]] == [line["step"] for line in curves[1]]
    within = 1e-5 if precision == "float32" else 5e-3  # half a batch's gradients are rounded
    for line, other in zip(*curves, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], abs=within)
    if precision == "float32":
        scores = [[line.get("val_top1") for line in lines] for lines in curves]
        assert scores[0] == scores[1]


ENDS = """
import sys, time
import torch
import torch.distributed as dist
from mjp_privacy.core.errors import UserError
from mjp_privacy.training.processes import joined

try:
    with joined("cpu", 2) as world:
        world.wait()
        if not world.first:
            dist.all_reduce(torch.ones(1), async_op=True)  # nobody will join it
            raise UserError("a disk is full")
        if sys.argv[1] == "within":
            world.mean(torch.ones(1))
            world.mean(torch.ones(1))
except UserError as error:
    print(f"{world.rank}: {error}", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("waiting", ["within", "at the end"])
def test_a_process_that_waits_for_one_that_has_ended_says_so(tmp_path: Path, waiting: str) -> None:
    """Wherever it waits; and the one that raised does not wait for what it has under way."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    run = [sys.executable, *TORCHRUN, str(script), waiting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        run, check=False, env=environment, timeout=100, stdout=subprocess.PIPE, text=True
    )
    assert "1: a disk is full\n" in done.stdout
    assert "0: Process 0 of 2 waited for another one, which has ended" in done.stdout


def test_other_errors_of_the_libraries_are_a_processs_own() -> None:
    world = World(torch.device("cpu"), 0, 2)
    assert _is_lost(
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), world
    )
    for error in (
        RuntimeError("NCCL error: Duplicate GPU detected : rank 0 and rank 1"),
        RuntimeError("gloo: Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("CUDA out of memory"),
        UserError("Connection closed by peer"),
    ):
        assert not _is_lost(error, world)
    assert not _is_lost(RuntimeError("Connection closed by peer"), World(world.device))


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"got 1 and a process number 1.*--nproc_per_node=1"):
        _own_gpu(1)


NUMBER = r"whole number of at least 1 .* variable WORLD_SIZE"
MEET = r"meet the other processes of the 2 .*Start them with"
MIXED = {"recipe": {"batch": 9}, "augmentation": {"mixup": 0.8}}


@pytest.mark.parametrize(
    ("size", "place", "changes", "named"),
    [
        *((size, {}, {}, NUMBER) for size in ("two", "0", "-2", "1" * 5000, "\u0662", "")),
        ("2", {}, {}, MEET),
        ("2", {"RANK": "0"}, {}, MEET),
        ("2", {"RANK": "zero", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}, {}, MEET),
        ("2", {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999999"}, {}, MEET),
        ("4", {}, {}, r"4 processes can share equally, got 6.*--batch 4"),
        ("3", {}, MIXED, r"an even number each, for mixup, got 9.*--batch 6"),
    ],
)
def test_an_environment_that_torchrun_does_not_make_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
    data: Path,
    tmp_path: Path,
    size: str,
    place: dict[str, str],
    changes: dict[str, Any],
    named: str,
) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": size, **place}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        train(small(**changes), data=data, out=tmp_path / "run", device="cpu")
