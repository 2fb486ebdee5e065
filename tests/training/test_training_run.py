"""Whole training runs: they learn, go on where they stopped, and export what they trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.tensor_files import DIGEST_KEY
from mjp_privacy.training.trainer import train
from tests.helpers.night import by_day
from tests.helpers.training import (
    FILES,
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


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["none", "pca", "linear", "nonlinear"])
def test_dal_of_every_kind_comes_back(data: Path, tmp_path: Path, kind: str) -> None:
    config = small(model={"dal": kind}, recipe={"epochs": 1})
    model = load_model(checkpoint=train(config, data=data, out=tmp_path / "run", device="cpu"))
    assert model.dal_kind == kind
    assert (model.dal_regressor is not None) == (kind != "none")


@pytest.mark.nightly
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
