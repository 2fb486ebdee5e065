"""Whole segmentation runs: they learn, go on where they stopped, and are scored from files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors import safe_open

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.paper.segmentation_network import build_segmentation, load_segmentation
from mjp_privacy.paper.shapes import make_shapes
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.trainer import train
from tests.helpers.night import nightly
from tests.helpers.segmentation import SWIN, content, pair_folder, save_pair, small
from tests.helpers.together import together
from tests.helpers.training import class_folders, curve, stop_at, weights
from tests.helpers.training import small as classifier

SHAPES = Path(__file__).parents[2] / "configs" / "training" / "shapes.yaml"
CHANCE = 100 / 6
"""mAcc of any answer that does not look at the picture."""


@pytest.fixture
def ade(tmp_path: Path) -> Path:
    return pair_folder(tmp_path / "ade")


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", [nightly("plain_linear"), "mjp_linear", nightly("mjp_upernet")])
def test_plain_and_mjp_weights_learn_the_shapes(tmp_path: Path, row: str) -> None:
    """In seconds of a CPU core each; trained on 64 pictures, scored on 16 others."""
    make_shapes(tmp_path / "shapes", 64, seed=1)
    config = load_training(SHAPES, row, epochs=10)
    config = replace(config, segmentation=replace(config.segmentation, channels=16))
    train(config, data=tmp_path / "shapes", out=tmp_path / "run", device="cpu", workers=0)
    lines = curve(tmp_path / "run")
    assert lines[-1]["loss"] < 0.75 * lines[0]["loss"]
    assert lines[-1]["val_miou"] > 25  # an answer of one class everywhere has 8 at most
    assert lines[-1]["val_macc"] > 1.7 * CHANCE
    assert lines[-1]["val_aacc"] > 75
    assert lines[-1]["dal"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        nightly({}),
        nightly({"segmentation": {"head": "upernet", "channels": 16}}),
        {"recipe": {"ema_decay": 0.5, "precision": "bfloat16"}},
        nightly(SWIN),
    ],
)
def test_a_killed_run_ends_with_the_same_weights(
    ade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    config = small(**changes)
    options: dict[str, Any] = {"data": ade, "device": "cpu", "workers": 0}
    train(config, out=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(config, out=tmp_path / "killed", **options)
    train(config, out=tmp_path / "killed", **options)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    before, after = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_the_file_is_the_trained_network_and_its_scores_those_of_the_run(
    ade: Path, tmp_path: Path
) -> None:
    config = small(segmentation={"head": "upernet", "channels": 16})
    path = train(config, data=ade, out=tmp_path / "run", device="cpu", workers=0)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    network, stated = load_segmentation(str(path))
    assert stated == config
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, state["model"][name])
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    last = curve(tmp_path / "run")[-1]
    assert json.loads(metadata["val_miou"]) == last["val_miou"]
    out = tmp_path / "scores"
    half = path.with_name("model_float16.safetensors")
    words = ["--checkpoint", f"a={path}", f"b={half}", "--ade20k", ade, "--out", out]
    assert main(["evaluate", *map(str, words), "--device", "cpu"]) == 0
    table = pd.read_csv(out / "segmentation.csv")
    for name in ("miou", "macc", "aacc"):
        assert table.loc[0, name] == pytest.approx(last[f"val_{name}"], abs=1e-4)
        assert table.loc[0, f"{name}_low"] <= table.loc[0, name] <= table.loc[0, f"{name}_high"]
    assert (table.loc[0, "n"], table.loc[0, "failed"]) == (3, 0)
    assert table["paper_miou"].isna().all()
    assert table["miou_over_first"][1] == pytest.approx(table["miou"][1] - table["miou"][0])
    assert table["miou_over_first"].isna().tolist() == [True, False]
    rows = pd.read_csv(out / "per_picture.csv").query("model == 'a'")
    of_class = rows.groupby("class")[["right", "truth", "answer"]].sum()
    union = of_class["truth"] + of_class["answer"] - of_class["right"]
    assert 100 * (of_class["right"] / union).mean() == pytest.approx(table.loc[0, "miou"])
    assert "| a | upernet | 3 |" in (out / "segmentation.md").read_text()


def test_the_command_trains_and_goes_on(
    ade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {name: part for name, part in content().items() if name != "task"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**fields, "segmentation": {}}))
    words = [str(config), "--task", "segmentation", "--data", str(ade), "--workers", "0"]
    words += ["--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["train", *words]) == 0
    assert "val mIoU" in capsys.readouterr().err
    assert main(["train", *words]) == 0
    assert "finished already" in capsys.readouterr().err
    assert main(["curves", str(tmp_path / "run"), "--out", str(tmp_path / "curves")]) == 0
    assert (tmp_path / "curves" / "curves.png").is_file()
    labels = ade / "annotations" / "training" / "000.png"
    labels.write_bytes((ade / "annotations" / "training" / "001.png").read_bytes())
    assert main(["train", *words]) == 2
    assert "a run with other training images or labels (--data)" in capsys.readouterr().err


@pytest.mark.nightly
def test_two_processes_lose_as_one_does(tmp_path: Path) -> None:
    """Where all pixels have labels, so that each process's mean is of as many."""
    ade, head = tmp_path / "ade", {"head": "upernet", "channels": 16, "scales": [1.5, 2.0]}
    config = small(segmentation=head, log_every=1)
    drawn = torch.Generator().manual_seed(0)
    for place in range(8):
        labels = torch.randint(1, 4, (24, 30), dtype=torch.uint8, generator=drawn)
        pixels = torch.randint(0, 256, (24, 30, 3), dtype=torch.uint8, generator=drawn)
        split = "training" if place < 5 else "validation"  # three in all: unequal shares
        save_pair(ade, f"{split}/{place:03d}", pixels.numpy(), labels.numpy())
    files: dict[str, Any] = {"data": ade, "device": "cpu", "workers": 0}
    train(config, out=tmp_path / "one", **files)
    said = together(tmp_path / "said", 2, lambda: train(config, out=tmp_path / "two", **files))
    assert said == ["", ""]
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == len(two) == 2
    for line, other in zip(one, two, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], abs=1e-4)
        assert other["accuracy"] == pytest.approx(line["accuracy"], abs=5e-3)
        assert other["val_miou"] == pytest.approx(line["val_miou"], abs=0.5)


def mjp_classifier(tmp_path: Path, **changes: Any) -> Path:
    """Weights with MJP of the small network's sizes, trained for an epoch on ten other classes."""
    model = {"img_size": 8, "patch_size": 4, "depth": 4, **changes.pop("model", {})}
    config = classifier(model=model, recipe={"epochs": 1}, **changes)
    data = class_folders(tmp_path / "classes")
    return train(config, data=data, out=tmp_path / "classifier", device="cpu")


def start_of(checkpoint: Path, **changes: Any) -> Any:
    """The network that a segmentation begins with from these weights, and the weights."""
    model = {"unknown_embedding": True, **changes.pop("model", {})}
    config = small(initial={"checkpoint": str(checkpoint)}, model=model, **changes)
    backbone = build_segmentation(config).backbone
    return dict(backbone.named_parameters()), dict(
        load_model(checkpoint=checkpoint).named_parameters()
    )


def test_training_starts_from_the_weights_of_a_classifier_with_mjp(tmp_path: Path) -> None:
    """The picture is twice as large, so the table of positions is resampled and all else equal."""
    began, stored = start_of(mjp_classifier(tmp_path))
    assert {name for name in stored if name not in began} == {
        *("head.weight", "head.bias"),
        *(name for name in stored if name.startswith("dal_regressor")),
    }
    for name, tensor in began.items():
        if name == "pos_embed":
            assert tensor.shape == (1, 17, 16)
            assert torch.equal(tensor[:, :1], stored[name][:, :1])
        else:
            assert torch.equal(tensor, stored[name]), name


@pytest.mark.nightly
def test_a_swin_starts_from_the_weights_of_a_swin_with_mjp(tmp_path: Path) -> None:
    """At 56 and 112 pixels, where both stages hold a whole window of 7 patches."""
    sizes = {"family": "swin", "stages": [1, 1]}
    shape = {"embed_dim": 8, "num_heads": 2, "img_size": 56}
    path = mjp_classifier(tmp_path, model=shape, data={"native_size": 28}, **sizes)
    larger = {**SWIN["model"], "img_size": 112}
    began, stored = start_of(path, model=larger, **sizes)
    assert began["absolute_pos_embed"].shape == (1, 28 * 28, 8)
    assert torch.allclose(
        began["absolute_pos_embed"].mean(1), stored["absolute_pos_embed"].mean(1), atol=0.02
    )
    for name, tensor in began.items():
        if name != "absolute_pos_embed":
            assert torch.equal(tensor, stored[name]), name
    for wrong in ({"embed_dim": 16}, {"patch_size": 8}):
        with pytest.raises(UserError, match="expected the Swin that the config describes"):
            start_of(path, model={**larger, **wrong}, **sizes)
    with pytest.raises(UserError, match="a stage smaller than a window has smaller windows"):
        start_of(path, model={**larger, "img_size": 16}, **sizes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"embed_dim": 32}, "embed_dim"),
        ({"patch_size": 8}, "patch_size"),
        ({"depth": 5}, "depth"),
    ],
)
def test_weights_of_another_geometry_are_refused_before_any_picture_is_read(
    ade: Path, tmp_path: Path, wrong: dict[str, int], said: str
) -> None:
    path = mjp_classifier(tmp_path)
    for picture in ade.rglob("*.jpg"):
        picture.write_bytes(b"no image")
    config = small(initial={"checkpoint": str(path)}, model=wrong)
    with pytest.raises(UserError, match=rf"model\.safetensors.*{said}"):
        train(config, data=ade, out=tmp_path / "run", device="cpu", workers=0)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def trained(config: TrainingConfig, ade: Path, out: Path) -> Path:
    return train(config, data=ade, out=out, device="cpu", workers=0)


def test_what_evaluate_refuses(
    ade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained(small(recipe={"epochs": 1}), ade, tmp_path / "run")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    only = pair_folder(tmp_path / "only", validation=0)
    mistakes: list[tuple[list[object], str]] = [
        (["--checkpoint", "cifar_vit", "--ade20k", ade], "states no such training"),
        (["--checkpoint", tmp_path / "x.pth", "--ade20k", ade], "No checkpoint at"),
        (["--checkpoint", path, "--ade20k", nothing], "expected ADE20K's layout"),
        (["--checkpoint", path, "--ade20k", only], "under images/validation, got none"),
        (
            ["--checkpoint", path, "--ade20k", ade, "--data", ade],
            "--ade20k measures segmentation alone: expected --checkpoint, --limit, --seed, "
            "--device and --out beside it, got --data",
        ),
        (["--checkpoint", path, "--data", ade], 'holds a network for "segmentation"'),
    ]
    for words, said in mistakes:
        assert main(["evaluate", *map(str, words), "--device", "cpu"]) == 2
        assert said in capsys.readouterr().err


def test_unreadable_pictures_are_counted_and_named(
    ade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained(small(recipe={"epochs": 1}), ade, tmp_path / "run")
    (ade / "images" / "validation" / "001.jpg").write_bytes(b"no image")
    assert main(["evaluate", "--checkpoint", str(path), "--ade20k", str(ade)]) == 3
    said, named = capsys.readouterr()
    assert "1 not read, and in no figure:\n  images/validation/001.jpg: not an image" in named
    assert "| run | linear | 2 (1 unreadable) |" in said
    assert "1 picture could not be read and has no part in the scores; the first: images" in said


def test_validation_without_any_label_says_so(ade: Path, tmp_path: Path) -> None:
    for place in range(3):
        pixels = torch.zeros(20, 20, 3, dtype=torch.uint8).numpy()
        save_pair(ade, f"validation/{place:03d}", pixels, pixels[..., 0])
    with pytest.raises(UserError, match="no pixel of the validation pictures has a label"):
        trained(small(), ade, tmp_path / "run")
