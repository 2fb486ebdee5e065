"""Whole trainings: they learn, go on where they stopped, and lose nothing to a mishap."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import Tensor

from mjp_privacy.cli import main
from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.models import load_model
from mjp_privacy.training import learner, snapshots
from mjp_privacy.training.batches import Batches
from mjp_privacy.training.config import load_training
from mjp_privacy.training.journal import Journal
from mjp_privacy.training.learner import Learner, RoundedProducts
from mjp_privacy.training.trainer import train
from tests.helpers.families import family_content
from tests.helpers.night import by_day
from tests.helpers.segmentation import SWIN, pair_folder
from tests.helpers.segmentation import small as segmentation
from tests.helpers.training import (
    FILES,
    class_folders,
    content,
    curve,
    die_after_line,
    small,
    stop_at,
    weights,
)


def facts(path: Path) -> dict[str, Any]:
    """What the file of a model says of it."""
    with safe_open(path, "pt") as file:
        return {k: json.loads(v) for k, v in file.metadata().items() if k != "mjp-seal"}


def assert_same(run: Path, whole: Path) -> None:
    """Two trainings that drew the same curve and ended with the same weights."""
    assert curve(run) == curve(whole)
    before, after = weights(whole), weights(run)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


# what comes out -----------------------------------------------------------------------------------


def test_a_run_learns_colours_and_exports_what_it_trained(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = train(small(recipe={"epochs": 12}), data=data, val=data, out=run, device="cpu")
    lines = curve(run)
    assert (lines[-1]["val_top1"], lines[-1]["step"]) == (100.0, 72)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"epoch", "cross_entropy", "dal", "accuracy", "lr"} <= set(lines[0])
    assert path == run / "model.safetensors"
    assert (run / "curves.png").is_file()
    state, model = torch.load(run / "checkpoint.pt", weights_only=True), load_model(checkpoint=path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state["model"][name])
    card = model.card
    assert (card.img_size, card.resize, card.num_classes) == (28, 28, 3)
    assert (card.mean, card.std, card.trained_gamma) == ((0.5,) * 3, (0.25,) * 3, 0.5)
    assert (model.unk_embed is not None, model.dal_kind) == (True, "nonlinear")
    said = facts(path)
    assert said["recipe"]["recipe"]["epochs"] == 12
    assert (said["position_start"], said["position_decay"]) == ("N(0, 1)", True)
    assert said["made_with"][0]["threads"] == torch.get_num_threads()
    assert (said["seed"], said["steps"], said["val_top1"]) == (0, 72, 100.0)
    assert "commit" in said
    half = load_model(checkpoint=run / "model_float16.safetensors")
    assert torch.equal(half.head.weight, model.head.weight.half().float())
    before = (run / "metrics.jsonl").read_bytes()
    train(small(recipe={"epochs": 12}), data=data, val=data, out=run, device="cpu")
    assert (run / "metrics.jsonl").read_bytes() == before  # there was nothing to do


@pytest.mark.parametrize("family", ["swin", "resnet"])
def test_other_families_learn_and_are_exported(data: Path, tmp_path: Path, family: str) -> None:
    config = load_training(family_content(family), epochs=3)
    path = train(config, data=data, val=data, out=tmp_path / "run", device="cpu")
    lines = curve(tmp_path / "run")
    assert lines[-1]["val_top1"] > 60
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (lines[-1]["dal"] > 0) == (family == "swin")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    trained = load_model(checkpoint=path).state_dict()
    floats = {name: t for name, t in state["model"].items() if t.is_floating_point()}
    assert all(torch.equal(trained[name], tensor) for name, tensor in floats.items())


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


def test_the_average_of_weights_is_what_is_exported(data: Path, tmp_path: Path) -> None:
    train(small(recipe={"ema_decay": 0.5}), data=data, out=tmp_path / "run", device="cpu")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    exported = weights(tmp_path / "run")["head.weight"]
    assert torch.equal(exported, state["average"]["module.head.weight"])
    assert not torch.equal(exported, state["model"]["head.weight"])


def test_fine_tuning_starts_from_the_given_weights(data: Path, tmp_path: Path) -> None:
    plain = small(model={"unknown_embedding": False, "dal": "none"}, jigsaw={"shuffle": "none"})
    start = train(plain, data=data, out=tmp_path / "a", device="cpu")
    config = small(initial={"checkpoint": str(start)}, recipe={"lr": 0.0, "epochs": 1})
    after = load_model(checkpoint=train(config, data=data, out=tmp_path / "b", device="cpu"))
    before = dict(load_model(checkpoint=start).named_parameters())
    assert after.unk_embed is not None
    for name, parameter in after.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name]), name
    mean = before["pos_embed"][:, 1:].mean(1, keepdim=True)
    assert torch.allclose(after.unk_embed, mean, atol=1e-6)


class NoBfloat16(RoundedProducts):
    """Raises where a product of bfloat16 numbers reaches torch, and counts those of others."""

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in learner.PRODUCTS:
            assert not any(isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 for arg in args)
            self.seen += 1
        assert "attention" not in str(function)
        return function(*args, **(kwargs or {}))


BFLOAT16 = {"precision": "bfloat16"}


def of_family(family: str) -> Any:
    stock = family_content(family)
    return load_training({**stock, "recipe": {**stock["recipe"], **BFLOAT16}}, epochs=1)


TRAININGS: dict[str, Callable[[], Any]] = {
    "vit": lambda: small(recipe={**BFLOAT16, "epochs": 1, "ema_decay": 0.9, "compile": True}),
    "swin": lambda: of_family("swin"),
    "resnet": lambda: of_family("resnet"),
    "linear": lambda: segmentation(recipe=BFLOAT16),
    "upernet": lambda: segmentation(recipe=BFLOAT16, segmentation={"head": "upernet"}),
    "swin_linear": lambda: segmentation(**SWIN, recipe=BFLOAT16),
}


@pytest.mark.parametrize("name", by_day(TRAININGS, {0}))
def test_no_product_of_a_training_and_its_validation_is_slow(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """On a CPU without bfloat16, which is said once and kept with the weights."""
    monkeypatch.setattr(learner, "has_bfloat16", lambda: False)
    config, files = TRAININGS[name](), {"data": data, "val": data}
    if config.task == "segmentation":
        files = {"data": pair_folder(tmp_path / "ade")}
    with NoBfloat16() as products:
        path = train(config, **files, out=tmp_path / "run", device="cpu")
    assert products.seen > 100
    assert capfd.readouterr().err.count("bfloat16") == 1
    assert "products" in facts(path)["made_with"][0]


# killed, and given again --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    by_day(
        [
            {},
            FILES,
            {"augmentation": {"mixup": 0.8, "cutmix": 1.0}, "log_every": 100},
            {"recipe": {"precision": "bfloat16"}},
            {"recipe": {"ema_decay": 0.9}},
        ],
        {1, 4},
    ),
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
    assert_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.parametrize("at", [1, 2])
def test_steps_before_a_validation_that_fails_are_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A damaged picture, a kill: the same command goes on with the validation, without a step; and
    a line that was written before its checkpoint stands once."""
    config = small(checkpoint_minutes=60)
    options: dict[str, Any] = {"data": data, "val": data, "device": "cpu", "workers": 0}
    train(config, out=tmp_path / "whole", **options)
    original, calls = Learner.validated, itertools.count(1)

    def failing(self: Learner, batches: Batches) -> dict[str, float]:
        if next(calls) == at:
            raise UserError("a damaged picture")
        return original(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "validated", failing)
        with pytest.raises(UserError, match="damaged"):
            train(config, out=tmp_path / "run", **options)
    steps = stop_at(monkeypatch, -1)
    train(config, out=tmp_path / "run", **options)
    assert len(steps) == 6 * (2 - at)
    assert_same(tmp_path / "run", tmp_path / "whole")
    with monkeypatch.context() as patch:
        die_after_line(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            train(config, out=tmp_path / "killed", **options)
    train(config, out=tmp_path / "killed", **options)
    assert_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_numbers_that_are_not_finite_stop_the_run_and_reach_no_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Also at the last step of a window: the loss was still finite, the weights are not."""
    step, backward, calls = Learner.train_step, Tensor.backward, itertools.count()

    def exploding(self: Learner, at: int, *batch: Tensor) -> Tensor:
        return step(self, at, *batch) * (float("nan") if at == 7 else 1)

    def infinite(self: Tensor, *rest: Any, **more: Any) -> None:
        backward(self * (float("inf") if next(calls) == 7 else 1.0), *rest, **more)

    with monkeypatch.context() as patch:
        if broken == "loss":
            patch.setattr(Learner, "train_step", exploding)
        else:
            patch.setattr(Tensor, "backward", infinite)
        with pytest.raises(UserError, match=r"step 8.*finite.*--lr"):
            train(small(), data=data, out=tmp_path / "run", device="cpu")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 6
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    again = small(initial={"checkpoint": str(tmp_path / "run" / "checkpoint.pt")})
    assert train(again, data=data, out=tmp_path / "again", device="cpu").is_file()


def test_a_full_disk_leaves_the_checkpoint_before_and_ends_with_74(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, calls = torch.save, []

    def filling(state: object, path: Path) -> None:
        calls.append(path)
        if len(calls) > 1:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(snapshots.torch, "save", filling)
        with pytest.raises(StorageError, match=r"checkpoint\.pt"):
            train(small(), data=data, out=tmp_path / "run", device="cpu")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] > 0
    assert not list((tmp_path / "run").glob(".checkpoint*"))

    def full(self: Journal, line: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "write", full)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(content()))
    words = ["train", config, "--data", data, "--out", tmp_path / "run", "--device", "cpu"]
    assert main([str(word) for word in words]) == 74
    assert str(tmp_path / "run") in capsys.readouterr().err.splitlines()[-1]


# images that do not fit ---------------------------------------------------------------------------


def test_another_config_or_other_images_are_not_mixed_into_a_run(
    data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data, "out": tmp_path / "run", "device": "cpu"}
    train(small(), **options)
    with pytest.raises(UserError, match=r"jigsaw\.gamma .*0\.5.*0\.25"):
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
    files: dict[str, Any] = {"data": data, "val": val, "out": tmp_path / "run", "device": "cpu"}
    for workers in (0, 1):
        with pytest.raises(UserError, match=rf"class_1/003\.png.* {used_for} image"):
            train(small(**changes), **files, workers=workers)


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


# the command --------------------------------------------------------------------------------------


def test_the_command_trains_a_row_and_says_what_is_wrong(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In ImageNet's layout, which brings its own images to validate on; what it says next can be
    copied, from a folder whose name holds a blank."""
    files, config, run = tmp_path / "my pictures", tmp_path / "config.yaml", tmp_path / "run"
    files.mkdir()
    data.rename(files / "test")
    shutil.copytree(files / "test", files / "train")
    config.write_text(yaml.safe_dump({**content(), "rows": {"J": {}, "K": {"seed": 4}}}))
    where = ["train", str(config), "--data", str(files), "--device", "cpu", "--out", str(run)]
    assert main([*where, "--row", "K", "--epochs", "1"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run}/model.safetensors\n"
    assert "val_top1" in curve(run)[-1]
    (line,) = (line for line in said.err.splitlines() if line.startswith("Next:"))
    following = shlex.split(line.removeprefix("Next:"))
    assert following[:3] == ["mjp", "attack", "own"]
    assert following[following.index("--images") + 1] == str(files)
    for wrong, named in (([], "--row"), (["--row", "K"], "recipe.epochs")):
        assert main([*where, *wrong]) == 2
        assert named in capsys.readouterr().err
