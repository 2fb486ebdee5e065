"""Whole training runs: they learn, go on where they stopped, export, and stop with a clear word."""

import itertools
import json
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
from safetensors import safe_open

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.training import snapshots
from mjp_privacy.training.journal import Journal, read_metrics
from mjp_privacy.training.run import train
from mjp_privacy.training.trainer import Trainer
from tests.helpers.training import class_folders, content, small

ROOT = Path(__file__).parents[2]
FILES = {
    "augmentation": {"rand_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0},
    "data": {"store": "files"},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "data")


def curve(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if k != "timing"}
        for line in read_metrics(run / "metrics.jsonl")
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    with safe_open(run / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process dies before this step, as with kill -9: nothing is saved on the way out."""
    original = Trainer._train_step

    def dying(self: Trainer, *batch: torch.Tensor) -> torch.Tensor:
        if self.step == step:
            raise KeyboardInterrupt
        return original(self, *batch)

    monkeypatch.setattr(Trainer, "_train_step", dying)


def test_a_run_learns_colours_and_leaves_what_it_promised(data: Path, tmp_path: Path) -> None:
    config = small(recipe={"epochs": 12})
    path = train(config, data=data, val=data, out=tmp_path / "run", device="cpu")
    lines = curve(tmp_path / "run")
    assert lines[-1]["val_top1"] == 100.0
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["step"] == 72
    assert {"epoch", "cross_entropy", "dal", "accuracy", "lr"} <= set(lines[0])
    assert path == tmp_path / "run" / "model.safetensors"
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"checkpoint.pt", "curves.png", "model_float16.safetensors"} <= names


def test_the_exported_model_is_the_trained_one(data: Path, tmp_path: Path) -> None:
    train(small(), data=data, val=data, out=tmp_path / "run", device="cpu")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    model = load_model(checkpoint=tmp_path / "run" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state["model"][name])
    card = model.card
    assert (card.img_size, card.resize, card.num_classes) == (28, 28, 3)
    assert (card.mean, card.std) == ((0.5,) * 3, (0.25,) * 3)
    assert card.trained_gamma == 0.5
    assert model.unk_embed is not None
    assert model.dal_kind == "nonlinear"
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
    assert metadata["recipe"]["recipe"]["epochs"] == 2
    assert (metadata["position_start"], metadata["position_decay"]) == ("N(0, 1)", True)
    assert metadata["made_with"][0]["threads"] == torch.get_num_threads()
    assert metadata["seed"] == 0
    assert metadata["steps"] == 12
    assert metadata["val_top1"] == curve(tmp_path / "run")[-1]["val_top1"]
    assert "commit" in metadata
    half = load_model(checkpoint=tmp_path / "run" / "model_float16.safetensors")
    assert torch.equal(half.head.weight, model.head.weight.half().float())


@pytest.mark.parametrize("kind", ["none", "closed_form"])
def test_other_kinds_of_models_come_back_as_they_were(
    data: Path, tmp_path: Path, kind: str
) -> None:
    plain = {"unknown_embedding": False, "dal": "none"}
    field = "position_embedding" if kind == "none" else "first_block"
    config = small(model={**plain, field: kind}, jigsaw={"shuffle": "none"})
    path = train(config, data=data, out=tmp_path / "run", device="cpu")
    model = load_model(checkpoint=path)
    assert model.position_embedding == ("exposed" if kind == "none" else "learned")
    assert model.first_block == ("closed_form" if kind == "closed_form" else "intact")
    assert model.card.trained_gamma == 0
    if kind == "none":
        assert not model.table.any()
    assert ("closed-form" in model.card.architecture) == (kind == "closed_form")


MIXED = {"augmentation": {"mixup": 0.8, "cutmix": 1.0}, "log_every": 100}


@pytest.mark.parametrize("changes", [{}, FILES, MIXED, {"recipe": {"ema_decay": 0.9}}])
def test_a_killed_run_draws_the_same_curve(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    config = small(**changes)
    options: dict[str, Any] = {"data": data, "val": data, "device": "cpu", "workers": 0}
    train(config, out=tmp_path / "whole", **options)
    for step in (3, 9):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(KeyboardInterrupt):
                train(config, out=tmp_path / "killed", **options)
    train(config, out=tmp_path / "killed", **options)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    before, after = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_a_finished_run_has_nothing_to_do(data: Path, tmp_path: Path) -> None:
    train(small(), data=data, out=tmp_path / "run", device="cpu")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(small(), data=data, out=tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_the_average_of_weights_is_what_is_exported(data: Path, tmp_path: Path) -> None:
    train(small(recipe={"ema_decay": 0.5}), data=data, out=tmp_path / "run", device="cpu")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    exported = weights(tmp_path / "run")["head.weight"]
    assert torch.equal(exported, state["average"]["module.head.weight"])
    assert not torch.equal(exported, state["model"]["head.weight"])


def test_fine_tuning_starts_from_the_given_weights(data: Path, tmp_path: Path) -> None:
    plain = {"unknown_embedding": False, "dal": "none"}
    start = train(
        small(model=plain, jigsaw={"shuffle": "none"}), data=data, out=tmp_path / "a", device="cpu"
    )
    config = small(initial={"checkpoint": str(start)}, recipe={"lr": 0.0, "epochs": 1})
    after = load_model(checkpoint=train(config, data=data, out=tmp_path / "b", device="cpu"))
    before = dict(load_model(checkpoint=start).named_parameters())
    assert after.unk_embed is not None
    for name, parameter in after.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name]), name
    mean = before["pos_embed"][:, 1:].mean(1, keepdim=True)
    assert torch.allclose(after.unk_embed, mean, atol=1e-6)


# mistakes and mishaps -----------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._train_step

    def exploding(self: Trainer, *batch: torch.Tensor) -> torch.Tensor:
        numbers = original(self, *batch)
        return numbers * float("nan") if self.step == 7 else numbers

    monkeypatch.setattr(Trainer, "_train_step", exploding)
    with pytest.raises(UserError, match=r"At step 8 the loss is nan.*finite weights.*--lr"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 6
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    monkeypatch.undo()
    again = small(initial={"checkpoint": str(tmp_path / "run" / "checkpoint.pt")})
    assert train(again, data=data, out=tmp_path / "again", device="cpu").is_file()


def test_an_infinite_gradient_never_reaches_a_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last step of a window: the loss was still finite, the weights are not."""
    original = torch.Tensor.backward

    def broken(self: torch.Tensor, *rest: Any, **more: Any) -> None:
        original(self * (float("inf") if next(calls) == 7 else 1.0), *rest, **more)

    calls = itertools.count()
    monkeypatch.setattr(torch.Tensor, "backward", broken)
    with pytest.raises(UserError, match=r"At step 8 the loss is [0-9.]+, its gradient's norm"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 6
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_without_a_checkpoint_none_is_promised(data: Path, tmp_path: Path) -> None:
    config = small(recipe={"lr": 1e30, "warmup_epochs": 0, "clip_grad": None})
    with pytest.raises(UserError, match=r"No checkpoint had been written yet.*smaller --lr"):
        train(config, data=data, out=tmp_path / "run", device="cpu")


def test_a_full_disk_leaves_the_checkpoint_before(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = torch.save, []

    def filling(state: object, path: Path) -> None:
        calls.append(path)
        if len(calls) > 1:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(state, path)

    monkeypatch.setattr(snapshots.torch, "save", filling)
    with pytest.raises(UserError, match=r"Could not write checkpoint.pt.*No space left.*is intact"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] > 0
    assert not list((tmp_path / "run").glob(".checkpoint*"))


def test_metrics_that_cannot_be_written_stop_with_a_word(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Journal, line: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "write", full)
    with pytest.raises(UserError, match=r"could not write there \(No space left.*same command"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")


def test_another_config_is_not_mixed_into_a_run(data: Path, tmp_path: Path) -> None:
    train(small(), data=data, out=tmp_path / "run", device="cpu")
    changed = small(jigsaw={"gamma": 0.25})
    with pytest.raises(UserError, match=r"jigsaw.gamma was 0.5 and is 0.25.*another --out"):
        train(changed, data=data, out=tmp_path / "run", device="cpu")


def test_other_images_are_not_mixed_into_a_run(data: Path, tmp_path: Path) -> None:
    train(small(), data=data, out=tmp_path / "run", device="cpu")
    with pytest.raises(UserError, match=r"other validation images.*Give the same"):
        train(small(), data=data, val=data, out=tmp_path / "run", device="cpu")
    (data / "class_1" / "003.png").unlink()
    with pytest.raises(UserError, match=r"other training images.*Give the same, or another --out"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")


def test_another_programs_checkpoint_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.save({"epoch": 3}, tmp_path / "run" / "checkpoint.pt")
    with pytest.raises(UserError, match=r"no checkpoint of this trainer.*another --out"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")


def test_a_damaged_checkpoint_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"checkpoint.pt in --out cannot be read.*another --out"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")


def test_an_unreadable_image_is_named(data: Path, tmp_path: Path) -> None:
    (data / "class_1" / "003.png").write_bytes(b"no image")
    for changes in ({}, FILES):
        for workers in (0, 1):
            with pytest.raises(UserError, match=r"class_1/003.png.*repair it or take"):
                train(
                    small(**changes),
                    data=data,
                    out=tmp_path / "run",
                    device="cpu",
                    workers=workers,
                )


def test_classes_must_be_the_models(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = small(model={"num_classes": 5})
    with pytest.raises(
        UserError, match=r"expected images of 5 classes, got 3; no image has the label 3, 4"
    ):
        train(more, data=data, out=out, device="cpu")
    with pytest.raises(UserError, match=r"label 2: expected 0 to 1 for the model's 2 classes"):
        train(small(model={"num_classes": 2}), data=data, out=out, device="cpu")
    part = small(model={"num_classes": 5}, data={"all_classes": False})
    with pytest.raises(UserError, match=r"numbered 0, 1, … anew.*labels.csv"):
        train(part, data=data, out=out, device="cpu")
    for label in range(3):
        (data / f"class_{label}").rename(data / str(label + 1))
    assert train(part, data=data, out=out, device="cpu").is_file()


def test_a_missing_class_folder_is_found_in_the_validation_images(
    data: Path, tmp_path: Path
) -> None:
    val = class_folders(tmp_path / "val", images=2)
    (val / "class_1").rename(val / "class_9")
    with pytest.raises(UserError, match=r"class 1 is the folder 'class_2' there and 'class_1'"):
        train(small(), data=data, val=val, out=tmp_path / "run", device="cpu")


def test_images_without_labels_and_too_few_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data .*: expected images with labels"):
        train(small(), data=data / "class_0", out=tmp_path / "run", device="cpu")
    with pytest.raises(UserError, match=r"at least one batch of 50 images, got 36.*--batch 36"):
        train(small(recipe={"batch": 50}), data=data, out=tmp_path / "run", device="cpu")


def test_imagenets_layout_brings_its_own_validation_images(tmp_path: Path) -> None:
    class_folders(tmp_path / "data" / "train")
    class_folders(tmp_path / "data" / "val", images=2)
    train(small(), data=tmp_path / "data", out=tmp_path / "run", device="cpu")
    assert "val_top1" in curve(tmp_path / "run")[-1]


# the command --------------------------------------------------------------------------------------


def test_the_command_trains_a_row_and_says_what_is_wrong(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**content(), "rows": {"J": {}, "K": {"seed": 4}}}))
    where = [str(config), "--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["train", *where, "--row", "K", "--epochs", "1"]) == 0
    assert str(tmp_path / "run" / "model.safetensors") in capsys.readouterr().out
    assert main(["train", *where]) == 2
    assert "expected --row NAME" in capsys.readouterr().err
    assert main(["train", *where, "--row", "K"]) == 2
    assert "recipe.epochs was 1 and is 2" in capsys.readouterr().err


def _command(config: Path, data: Path, out: Path) -> list[str]:
    files = [str(config), "--data", str(data), "--out", str(out)]
    return ["-m", "mjp_privacy", "train", *files, "--device", "cpu", "--threads", "1"]


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


@pytest.mark.parametrize("mask_per", ["batch", "image"])
def test_two_processes_lose_as_one_does(data: Path, tmp_path: Path, mask_per: str) -> None:
    """Same global batch, gloo; without drop path, mixup and the like, which each process draws."""
    config = tmp_path / "config.yaml"
    fields = content(
        model={"drop_path": 0},
        jigsaw={"mask_per": mask_per, "first_epoch": 0},
        recipe={"epochs": 6},
        log_every=1,
        checkpoint_minutes=0.0003,  # falls due at other steps by each process's clock
    )
    val = class_folders(tmp_path / "val", images=7)  # 21 images: unequal shares
    config.write_text(yaml.safe_dump(fields))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    for run, launcher in (("one", []), ("two", torchrun)):
        command = [sys.executable, *launcher, *_command(config, data, tmp_path / run)]
        subprocess.run([*command, "--val", str(val)], cwd=ROOT, check=True, env=environment)
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == len(two) == 36
    for line, other in zip(one, two, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], abs=1e-5)
        assert other["dal"] == pytest.approx(line["dal"], abs=1e-5)
    measured = [line["val_top1"] for line in one if "val_top1" in line]
    assert measured == [line["val_top1"] for line in two if "val_top1" in line]
    assert len(set(measured)) > 1


def test_a_batch_must_be_shareable(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"4 processes can share equally, got 6.*--batch 4"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")
    monkeypatch.setenv("WORLD_SIZE", "3")
    mixed = small(recipe={"batch": 9}, augmentation={"mixup": 0.8})
    with pytest.raises(UserError, match=r"an even number each, for mixup, got 9.*--batch 6"):
        train(mixed, data=data, out=tmp_path / "run", device="cpu")


def test_slips_of_the_command_line_are_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content()))
    command = [str(config), "--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    for more, words in (
        (["--threads", "0"], "--threads: expected 1 or more, got 0"),
        (["--workers", "-1"], "--workers: expected 0 or more, got -1"),
        (["--overlay", str(tmp_path)], "No metrics.jsonl in"),
        (["--batch", "0"], "recipe.batch"),
    ):
        assert main(["train", *command, *more]) == 2
        assert words in capsys.readouterr().err
    config.write_text(yaml.safe_dump({**content(), "rows": {"J": "yes"}}))
    assert main(["train", *command, "--row", "J"]) == 2
    assert "rows.J: expected fields that replace the base's, got 'yes'" in capsys.readouterr().err
