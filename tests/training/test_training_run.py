"""Whole trainings: they learn, go on where they stopped, and lose nothing to a mishap."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from mjp_privacy.cli import main
from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.tensor_files import DIGEST_KEY
from mjp_privacy.training import snapshots
from mjp_privacy.training.journal import Journal
from mjp_privacy.training.trainer import Trainer, train
from tests.helpers.night import by_day
from tests.helpers.training import (
    FILES,
    class_folders,
    content,
    count_steps,
    curve,
    die_after_line,
    fail_in_validation,
    small,
    stop_at,
    weights,
)


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
        said = {key: value for key, value in file.metadata().items() if key != DIGEST_KEY}
    metadata = {key: json.loads(value) for key, value in said.items()}
    assert metadata["recipe"]["recipe"]["epochs"] == 2
    assert (metadata["position_start"], metadata["position_decay"]) == ("N(0, 1)", True)
    assert metadata["made_with"][0]["threads"] == torch.get_num_threads()
    assert metadata["seed"] == 0
    assert metadata["steps"] == 12
    assert metadata["val_top1"] == curve(tmp_path / "run")[-1]["val_top1"]
    assert "commit" in metadata
    half = load_model(checkpoint=tmp_path / "run" / "model_float16.safetensors")
    assert torch.equal(half.head.weight, model.head.weight.half().float())


MIXED = {"augmentation": {"mixup": 0.8, "cutmix": 1.0}, "log_every": 100}


HALF = {"recipe": {"precision": "bfloat16"}}


@pytest.mark.parametrize(
    "changes", by_day([{}, FILES, MIXED, HALF, {"recipe": {"ema_decay": 0.9}}], {1, 4})
)
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


@pytest.mark.nightly
@pytest.mark.parametrize("at", [1, 2])
def test_steps_before_a_validation_that_fails_are_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A damaged picture, a kill: the same command goes on with the validation, without a step."""
    config = small(checkpoint_minutes=60)
    options: dict[str, Any] = {"data": data, "val": data, "device": "cpu", "workers": 0}
    train(config, out=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        fail_in_validation(patch, at)
        with pytest.raises(UserError, match="damaged"):
            train(config, out=tmp_path / "failed", **options)
    steps = count_steps(monkeypatch)
    train(config, out=tmp_path / "failed", **options)
    assert len(steps) == 6 * (2 - at)
    assert curve(tmp_path / "failed") == curve(tmp_path / "whole")
    assert curve(tmp_path / "failed")[-1]["val_top1"] > 0
    assert (tmp_path / "failed" / "curves.png").is_file()
    before, after = weights(tmp_path / "whole"), weights(tmp_path / "failed")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.nightly
def test_a_line_that_was_written_before_its_checkpoint_stands_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"data": data, "val": data, "device": "cpu", "workers": 0}
    train(small(), out=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        die_after_line(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            train(small(), out=tmp_path / "killed", **options)
    train(small(), out=tmp_path / "killed", **options)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


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


def test_a_journal_that_meets_a_full_disk_ends_the_training_with_74(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Journal, line: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "write", full)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(content()))
    words = ["train", config, "--data", data, "--out", tmp_path / "run", "--device", "cpu"]
    assert main([str(word) for word in words]) == 74
    assert str(tmp_path / "run") in capsys.readouterr().err.splitlines()[-1]


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
    said = r"run/checkpoint.pt cannot be written \(no space left on device\). Free some space"
    with pytest.raises(StorageError, match=said):
        train(small(), data=data, out=tmp_path / "run", device="cpu")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] > 0
    assert not list((tmp_path / "run").glob(".checkpoint*"))


def test_imagenets_layout_brings_its_own_validation_images(tmp_path: Path) -> None:
    class_folders(tmp_path / "data" / "train")
    class_folders(tmp_path / "data" / "val", images=2)
    train(small(), data=tmp_path / "data", out=tmp_path / "run", device="cpu")
    assert "val_top1" in curve(tmp_path / "run")[-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        {"dal": "pca"},
        {"dal": "linear"},
        {"position_embedding": "none"},
        {"first_block": "closed_form"},
    ],
)
def test_other_kinds_of_models_come_back_as_they_were(
    data: Path, tmp_path: Path, changes: dict[str, str]
) -> None:
    masked = "dal" in changes
    model = {"unknown_embedding": masked, "dal": "none", **changes}
    jigsaw = {} if masked else {"shuffle": "none"}
    config = small(model=model, jigsaw=jigsaw, recipe={"epochs": 1})
    loaded = load_model(checkpoint=train(config, data=data, out=tmp_path / "run", device="cpu"))
    without = "position_embedding" in changes
    assert loaded.dal_kind == changes.get("dal", "none")
    assert loaded.position_embedding == ("exposed" if without else "learned")
    assert loaded.table.any() != without
    assert loaded.first_block == changes.get("first_block", "intact")
    assert loaded.card.trained_gamma == (0.5 if masked else 0)


def test_another_config_or_other_images_are_not_mixed_into_a_run(
    data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data, "out": tmp_path / "run", "device": "cpu"}
    train(small(), **options)
    with pytest.raises(UserError, match=r"jigsaw\.gamma was 0\.5 and is 0\.25"):
        train(small(jigsaw={"gamma": 0.25}), **options)
    with pytest.raises(UserError, match="--val"):
        train(small(), val=data, **options)
    (data / "class_1" / "003.png").unlink()
    with pytest.raises(UserError, match="--data"):
        train(small(), **options)


@pytest.mark.parametrize("changes", [{}, FILES])
@pytest.mark.parametrize("used_for", ["training", "validation"])
def test_an_unreadable_image_is_named(
    data: Path, tmp_path: Path, changes: dict[str, Any], used_for: str
) -> None:
    val = class_folders(tmp_path / "val", images=4)
    (data if used_for == "training" else val).joinpath("class_1/003.png").write_bytes(b"no image")
    for workers in (0, 1):
        with pytest.raises(UserError, match=rf"class_1/003\.png.* {used_for} image"):
            train(
                small(**changes),
                data=data,
                val=val,
                out=tmp_path / "run",
                device="cpu",
                workers=workers,
            )


def test_classes_must_be_the_models(data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": data, "out": tmp_path / "run", "device": "cpu"}
    part = small(model={"num_classes": 5}, data={"all_classes": False})
    for config, named in (
        (small(model={"num_classes": 5}), "label 3, 4"),
        (small(model={"num_classes": 2}), "label 2"),
        (part, r"labels\.csv"),
        (small(recipe={"batch": 50}), "--batch 36"),
    ):
        with pytest.raises(UserError, match=named):
            train(config, **options)
    with pytest.raises(UserError, match="--data"):
        train(small(), **{**options, "data": data / "class_0"})
    val = class_folders(tmp_path / "val", images=2)
    (val / "class_1").rename(val / "class_9")
    with pytest.raises(UserError, match="--val"):
        train(small(), val=val, **options)
    for label in range(3):
        (data / f"class_{label}").rename(data / f"0{label + 1}")
    with pytest.raises(UserError, match="007"):
        train(part, **options)
    for label in range(3):
        (data / f"0{label + 1}").rename(data / str(label + 1))
    assert train(part, **options).is_file()
