"""`mjp train` as several processes: what each says, and in an environment that is none."""

from __future__ import annotations

import os
import subprocess
import sys
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
)

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]


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
    )
    clocks = {"log_every": 1, "checkpoint_minutes": 0.0003}  # due at other steps by each clock
    config.write_text(yaml.safe_dump(fields | clocks))
    data, val = class_folders(tmp_path / "data"), class_folders(tmp_path / "val", images=7)
    picture = (data if used_for == "training" else val) / "class_0" / "003.png"
    whole = picture.read_bytes()

    def run(out: str, *launcher: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, *launcher, "-m", "mjp_privacy", "train", str(config)]
        words += ["--data", str(data), "--val", str(val), "--out", str(tmp_path / out)]
        words += ["--device", "cpu", "--threads", "1", "--workers", str(workers)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            words, cwd=ROOT, env=env, timeout=200, capture_output=True, text=True, check=False
        )

    picture.write_bytes(whole[: len(whole) // 2])
    failed = run("two", *TORCHRUN)
    assert failed.returncode == 1
    assert failed.stderr.count(f"{picture.name}: ") == 1
    picture.write_bytes(whole)
    assert run("two", *TORCHRUN).returncode == run("one").returncode == 0
    one, two = (curve(tmp_path / name) for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    within = 1e-5 if precision == "float32" else 5e-3  # half a batch's gradients are rounded
    for line, other in zip(one, two, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], abs=within)
        if precision == "float32":
            assert line.get("val_top1") == other.get("val_top1")


def test_only_what_a_lost_process_leaves_is_taken_for_one() -> None:
    world = World(torch.device("cpu"), 0, 2)
    lost = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert is_lost(RuntimeError(lost), world)
    assert not is_lost(UserError(lost), world)
    assert not is_lost(RuntimeError(lost), World(world.device))
    for own in ("Duplicate GPU detected", "Timed out waiting 1800000ms", "CUDA out of memory"):
        assert not is_lost(RuntimeError(own), world)


MIXED = {"recipe": {"batch": 9}, "augmentation": {"mixup": 0.8}}
HERE = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("place", "changes", "named"),
    [
        ({"WORLD_SIZE": "two"}, {}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, {}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, {}, "torchrun"),
        ({"WORLD_SIZE": "2", **HERE, "RANK": "zero"}, {}, "torchrun"),
        ({"WORLD_SIZE": "2", **HERE, "MASTER_PORT": "99999999"}, {}, "torchrun"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "device": "cuda"}, {}, "--nproc_per_node=1"),
        ({"WORLD_SIZE": "4"}, {}, "--batch 4"),
        ({"WORLD_SIZE": "3"}, MIXED, "--batch 6"),
    ],
)
def test_an_environment_that_torchrun_does_not_make_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
    data: Path,
    tmp_path: Path,
    place: dict[str, str],
    changes: dict[str, Any],
    named: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("LOCAL_RANK", *HERE):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        train(small(**changes), data=data, out=tmp_path / "run", device=place.get("device", "cpu"))
