"""`mjp train` as processes: killed, several together, and in an environment that is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.training.processes import World, is_lost
from mjp_privacy.training.trainer import train
from tests.helpers.training import (
    PICTURES_AS_THEY_ARE,
    class_folders,
    content,
    curve,
    small,
    weights,
)

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
RUN: dict[str, Any] = {
    "cwd": ROOT,
    "env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    "timeout": 200,
}


def command(config: Path, data: Path, out: Path) -> list[str]:
    files = [str(config), "--data", str(data), "--out", str(out)]
    return ["-m", "mjp_privacy", "train", *files, "--device", "cpu", "--threads", "1"]


@pytest.mark.nightly
def test_kill_9_in_the_middle_ends_with_the_same_curve(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content(recipe={"epochs": 100})))
    for run in ("killed", "whole"):
        words = [sys.executable, *command(config, data, tmp_path / run)]
        if run == "killed":
            process = subprocess.Popen(words, cwd=ROOT)
            deadline = time.monotonic() + 120
            while len(curve(tmp_path / run)) < 30 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
            reached = curve(tmp_path / run)[-1]["step"]
            assert 60 <= reached < 600, "the run was killed in its middle"
        subprocess.run(words, check=True, capture_output=True, **RUN)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    before, after = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("used_for", "precision", "workers", "mask_per"),
    [("training", "float32", 1, "image"), ("validation", "bfloat16", 0, "batch")],
)
def test_an_error_of_one_process_ends_all_with_its_reason(
    tmp_path: Path, used_for: str, precision: str, workers: int, mask_per: str
) -> None:
    """A picture in one process's share is damaged: nobody waits for a process that has left, and
    the same command goes on when the picture is repaired, as one process does; without drop path,
    mixup and the like, which each process draws."""
    config = tmp_path / "config.yaml"
    fields = content(
        augmentation=PICTURES_AS_THEY_ARE,
        data={"store": "files"},
        model={"drop_path": 0},
        recipe={"precision": precision},
        jigsaw={"first_epoch": 0, "mask_per": mask_per},
        log_every=1,  # type: ignore[arg-type]
        checkpoint_minutes=0.0003,  # type: ignore[arg-type]  # due at other steps by each clock
    )
    config.write_text(yaml.safe_dump(fields))
    data, val = class_folders(tmp_path / "data"), class_folders(tmp_path / "val", images=7)
    picture = (data if used_for == "training" else val) / "class_0" / "003.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    options = [*command(config, data, tmp_path / "two"), "--val", str(val)]
    options += ["--workers", str(workers)]
    two = [sys.executable, *TORCHRUN, *options]
    failed = subprocess.run(two, capture_output=True, text=True, check=False, **RUN)
    assert failed.returncode == 1
    assert failed.stderr.count(f"{picture.name}: ") == 1
    picture.write_bytes(whole)
    subprocess.run(two, check=True, **RUN)
    options[options.index(str(tmp_path / "two"))] = str(tmp_path / "one")
    subprocess.run([sys.executable, *options], check=True, **RUN)
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
    words = [sys.executable, *TORCHRUN, str(script), waiting]
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True, **RUN)
    assert "1: a disk is full\n" in done.stdout
    assert "0: Process 0 of 2 waited for another one" in done.stdout


def test_only_what_a_lost_process_leaves_is_taken_for_one() -> None:
    world = World(torch.device("cpu"), 0, 2)
    lost = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert is_lost(RuntimeError(lost), world)
    assert not is_lost(UserError(lost), world)
    assert not is_lost(RuntimeError(lost), World(world.device))
    for own in ("Duplicate GPU detected", "Timed out waiting 1800000ms", "CUDA out of memory"):
        assert not is_lost(RuntimeError(own), world)


MIXED = {"recipe": {"batch": 9}, "augmentation": {"mixup": 0.8}}


@pytest.mark.parametrize(
    ("size", "place", "changes", "named"),
    [
        *((size, {}, {}, "WORLD_SIZE") for size in ("two", "0", "-2", "")),
        ("2", {}, {}, "torchrun"),
        ("2", {"RANK": "zero", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}, {}, "torchrun"),
        ("2", {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999999"}, {}, "torchrun"),
        ("2", {"LOCAL_RANK": "1", "device": "cuda"}, {}, "--nproc_per_node=1"),
        ("4", {}, {}, "--batch 4"),
        ("3", {}, MIXED, "--batch 6"),
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    device = place.get("device", "cpu")
    for name, value in {"WORLD_SIZE": size, **place}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        train(small(**changes), data=data, out=tmp_path / "run", device=device)
