"""`mjp train` as several processes: what each says, and in an environment that is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.training.batches import World
from mjp_privacy.training.trainer import is_lost, train
from tests.helpers.training import (
    PICTURES_AS_THEY_ARE,
    class_folders,
    content,
    curve,
    small,
)

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]


def trained(
    fields: dict[str, Any], out: Path, *words: object, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """`mjp train` of a config with these fields, each process with one thread."""
    config = out.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(fields))
    argv = [sys.executable, *launcher, "-m", "mjp_privacy", "train", config, "--out", out, *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    alone = ["--device", "cpu", "--threads", "1"]
    return subprocess.run(
        [*map(str, argv), *alone], cwd=ROOT, env=env, timeout=200, capture_output=True, text=True
    )


def assert_alike(one: Path, two: Path, within: dict[str, float]) -> None:
    """The curves of two trainings, each number as near as it is said."""
    for name, bound in {"step": 0, **within}.items():
        here, there = ([line[name] for line in curve(run) if name in line] for run in (one, two))
        assert there == pytest.approx(here, abs=bound)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("used_for", "precision", "workers"),
    [("training", "float32", 1), ("validation", "bfloat16", 0)],
)
def test_an_error_of_one_process_ends_all_with_its_reason(
    tmp_path: Path, used_for: str, precision: str, workers: int
) -> None:
    """A picture in one process's share is damaged: nobody waits for a process that has left, and
    the same command goes on when the picture is repaired, as one process does; without drop path,
    mixup and the like, which each process draws."""
    fields = content(
        augmentation=PICTURES_AS_THEY_ARE,
        data={"store": "files"},
        model={"drop_path": 0},
        recipe={"precision": precision},
        jigsaw={"first_epoch": 0},
    )
    fields |= {"log_every": 1, "checkpoint_minutes": 0.0003}  # due at other steps by each clock
    data, val = class_folders(tmp_path / "data"), class_folders(tmp_path / "val", images=7)
    picture = (data if used_for == "training" else val) / "class_0" / "003.png"
    whole, one, two = picture.read_bytes(), tmp_path / "one", tmp_path / "two"
    words = ("--data", data, "--val", val, "--workers", workers)
    picture.write_bytes(whole[: len(whole) // 2])
    failed = trained(fields, two, *words, launcher=TORCHRUN)
    assert failed.returncode == 1
    assert failed.stderr.count(f"{picture.name}: ") == 1
    picture.write_bytes(whole)
    assert trained(fields, two, *words, launcher=TORCHRUN).returncode == 0
    assert trained(fields, one, *words).returncode == 0
    exact = precision == "float32"  # else half a batch's gradients are rounded
    assert_alike(one, two, {"loss": 1e-5, "val_top1": 0} if exact else {"loss": 5e-3})


def test_only_what_a_lost_process_leaves_is_taken_for_one() -> None:
    world, lost = World(torch.device("cpu"), 0, 2), "tcp/pair.cc:547] Connection closed by peer"
    assert is_lost(RuntimeError(lost), world)
    assert not is_lost(UserError(lost), world)
    assert not is_lost(RuntimeError(lost), World(world.device))
    assert not is_lost(RuntimeError("Duplicate GPU detected"), world)


MIXED = {"recipe": {"batch": 9}, "augmentation": {"mixup": 0.8}}
HERE = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


def test_an_environment_that_torchrun_does_not_make_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    two = {"WORLD_SIZE": "2"}
    cases: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"WORLD_SIZE": "0"}, {}, "WORLD_SIZE"),
        (two, {}, "torchrun"),
        (two | HERE | {"MASTER_PORT": "99999999"}, {}, "torchrun"),
        (two | {"LOCAL_RANK": "1", "device": "cuda"}, {}, "--nproc_per_node=1"),
        ({"WORLD_SIZE": "4"}, {}, "--batch 4"),
        ({"WORLD_SIZE": "3"}, MIXED, "--batch 6"),
    ]
    for place, changes, named in cases:
        with monkeypatch.context() as patch:
            for name in ("LOCAL_RANK", *HERE):
                patch.delenv(name, raising=False)
            for name, value in place.items():
                patch.setenv(name, value)
            given = {"data": data, "out": tmp_path / "run", "device": place.get("device", "cpu")}
            with pytest.raises(UserError, match=named):
                train(small(**changes), **given)  # type: ignore[arg-type]
