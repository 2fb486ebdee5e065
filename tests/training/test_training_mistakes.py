"""Mistakes and mishaps of a training: each stops with one clear sentence, and loses nothing."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mjp_privacy.cli import main
from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.training import snapshots
from mjp_privacy.training.journal import Journal
from mjp_privacy.training.trainer import Trainer, train
from tests.helpers.training import FILES, class_folders, content, curve, small


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
    config = small(recipe={"lr": 1e9, "warmup_epochs": 0, "clip_grad": None})
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
    said = r"run/checkpoint.pt cannot be written \(no space left on device\). Free some space"
    with pytest.raises(StorageError, match=said):
        train(small(), data=data, out=tmp_path / "run", device="cpu")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] > 0
    assert not list((tmp_path / "run").glob(".checkpoint*"))


def test_metrics_that_cannot_be_written_stop_with_a_word(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(self: Journal, line: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "write", full)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(content()))
    words = ["train", config, "--data", data, "--out", tmp_path / "run", "--device", "cpu"]
    assert main([str(word) for word in words]) == 74
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {tmp_path / 'run'} cannot be written (no space left on device). Free some space; "
        "then the same command goes on from here"
    )


def test_another_config_is_not_mixed_into_a_run(data: Path, tmp_path: Path) -> None:
    train(small(), data=data, out=tmp_path / "run", device="cpu")
    changed = small(jigsaw={"gamma": 0.25})
    with pytest.raises(UserError, match=r"jigsaw.gamma was 0.5 and is 0.25.*another --out"):
        train(changed, data=data, out=tmp_path / "run", device="cpu")


@pytest.mark.nightly
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
    with pytest.raises(UserError, match=r"(?s)checkpoint.pt of an earlier run.*another --out"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")


def test_a_damaged_checkpoint_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"checkpoint.pt: .*got what cannot be read.*another --out"):
        train(small(), data=data, out=tmp_path / "run", device="cpu")


def test_an_unreadable_image_is_named(data: Path, tmp_path: Path) -> None:
    (data / "class_1" / "003.png").write_bytes(b"no image")
    for changes in ({}, FILES):
        for workers in (0, 1):
            with pytest.raises(
                UserError, match=r"class_1/003.png.*every training image.*repair it"
            ):
                train(
                    small(**changes),
                    data=data,
                    out=tmp_path / "run",
                    device="cpu",
                    workers=workers,
                )


def test_an_unreadable_validation_image_is_called_so(data: Path, tmp_path: Path) -> None:
    val = class_folders(tmp_path / "val", images=4)
    (val / "class_1" / "003.png").write_bytes(b"no image")
    for changes in ({}, FILES):
        with pytest.raises(UserError, match=r"class_1/003.png.*Expected every validation image"):
            train(
                small(**changes), data=data, val=val, out=tmp_path / "run", device="cpu", workers=0
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
        (data / f"class_{label}").rename(data / f"0{label + 1}")
    with pytest.raises(UserError, match=r"the class index \(7, not 007\)"):
        train(part, data=data, out=out, device="cpu")
    for label in range(3):
        (data / f"0{label + 1}").rename(data / str(label + 1))
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
