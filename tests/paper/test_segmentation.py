"""Whole segmentations: they learn, go on where they stopped, start from weights and are scored."""

import itertools
import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError
from mjp_privacy.models import load_model
from mjp_privacy.models.tensor_files import DIGEST_KEY
from mjp_privacy.paper.image_sets import make_shapes
from mjp_privacy.paper.segmentation_training import (
    build_segmentation,
    find_pairs,
    load_segmentation,
)
from mjp_privacy.training.config import TrainingConfig, load_training
from mjp_privacy.training.trainer import train
from tests.helpers.night import by_day
from tests.helpers.refusals import refused
from tests.helpers.segmentation import SWIN, content, pair_folder, save_pair, small
from tests.helpers.training import class_folders, curve
from tests.helpers.training import content as classification

SHAPES = Path(__file__).parents[2] / "configs" / "training" / "shapes.yaml"
CHANCE = 100 / 6
"""mAcc of any answer that does not look at the picture."""
PLAIN = {"model": {"unknown_embedding": False, "dal": "none"}, "jigsaw": {"shuffle": "none"}}
"""Changes that take MJP out of the small classifier."""
SQUARE = np.zeros((20, 20, 3), np.uint8)


@pytest.fixture
def ade(tmp_path: Path) -> Path:
    return pair_folder(tmp_path / "ade")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of one short training."""
    root = tmp_path_factory.mktemp("once")
    return trained(small(recipe={"epochs": 1}), pair_folder(root / "ade"), root / "run")


@pytest.fixture
def path(once: Path, tmp_path: Path) -> Path:
    """A copy of that file."""
    return Path(shutil.copy(once, tmp_path / "run.safetensors"))


def trained(config: TrainingConfig, ade: Path, out: Path) -> Path:
    return train(config, data=ade, out=out, device="cpu", workers=0)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ["plain_linear", "mjp_linear", "mjp_upernet"])
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


def test_the_command_trains_and_the_files_scores_are_those_of_the_run(
    ade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is the trained network; the same command goes on, of the same data alone."""
    head = {"head": "upernet", "channels": 16}
    fields = content(segmentation=head)
    file, run, out = tmp_path / "config.yaml", tmp_path / "run", tmp_path / "scores"
    file.write_text(yaml.safe_dump(fields))
    words = ["train", str(file), "--data", str(ade), "--workers", "0"]
    words += ["--out", str(run), "--device", "cpu"]
    for said in ("val mIoU", "finished already"):
        assert main(words) == 0
        assert said in capsys.readouterr().err
    assert main(["curves", str(run), "--out", str(tmp_path / "curves")]) == 0
    assert (tmp_path / "curves" / "curves.png").is_file()
    path = run / "model.safetensors"
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    network, stated = load_segmentation(str(path))
    assert stated == small(segmentation=head)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, state["model"][name])
    last = curve(run)[-1]
    assert json.loads(metadata_of(path)["val_miou"]) == last["val_miou"]
    options = ["--checkpoint", f"a={path}", f"b={path}", "--ade20k", ade, "--out", out]
    assert main(["evaluate", *map(str, options), "--device", "cpu"]) == 0
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
    labels = ade / "annotations" / "training" / "000.png"
    labels.write_bytes((ade / "annotations" / "training" / "001.png").read_bytes())
    assert main(words) == 2
    assert "a run with other training images or labels (--data)" in capsys.readouterr().err


# weights to start from


SWIN_START = {"family": "swin", "stages": [1, 1]}
"""At 56 and 112 pixels, where both stages hold a whole window of 7 patches."""


def starting_weights(tmp_path: Path, *, mjp: bool, swin: bool) -> Path:
    """A classifier of the small segmentation's sizes but for half its side, with E_unk or without,
    trained for an epoch on other classes."""
    fields = classification(recipe={"epochs": 1}, **({} if mjp else PLAIN))
    fields["model"] |= {"patch_size": 4, "depth": 4, "img_size": 8}
    if swin:
        fields["model"] |= {"img_size": 56, "embed_dim": 8, "num_heads": 2}
        fields |= {**SWIN_START, "data": {"store": "memory", "native_size": 28}}
    data = class_folders(tmp_path / "classes")
    return train(load_training(fields), data=data, out=tmp_path / "classifier", device="cpu")


def started(checkpoint: Path, *, mjp: bool, swin: bool, **model: Any) -> TrainingConfig:
    """A segmentation of twice the side that begins with these weights."""
    shape = {**SWIN["model"], "img_size": 112} if swin else {}
    fields: dict[str, Any] = {"model": {**shape, "unknown_embedding": mjp, **model}}
    fields |= {"initial": {"checkpoint": str(checkpoint)}, "recipe": {"epochs": 1}}
    return small(**fields, **(SWIN_START if swin else {}))


@pytest.mark.parametrize(
    ("mjp", "swin"), by_day(itertools.product([False, True], [False, True]), {2})
)
def test_training_starts_from_a_classifiers_weights_and_refuses_others(
    ade: Path, tmp_path: Path, mjp: bool, swin: bool
) -> None:
    """The picture is twice as large, so the table of positions is resampled and all else equal."""
    path = starting_weights(tmp_path, mjp=mjp, swin=swin)
    stored = dict(load_model(checkpoint=path).named_parameters())
    began = dict(build_segmentation(started(path, mjp=mjp, swin=swin)).backbone.named_parameters())
    left = [name for name in stored if name not in began]
    assert all(name.startswith(("head.", "dal_regressor")) for name in left)
    table = "absolute_pos_embed" if swin else "pos_embed"
    for name, tensor in began.items():
        assert name == table or torch.equal(tensor, stored[name]), name
    assert began[table].shape == ((1, 28 * 28, 8) if swin else (1, 17, 16))
    if swin:
        assert torch.allclose(began[table].mean(1), stored[table].mean(1), atol=0.02)
    else:
        assert torch.equal(began[table][:, :1], stored[table][:, :1])
    assert trained(started(path, mjp=mjp, swin=swin), ade, tmp_path / "run").is_file()
    for picture in () if swin else ade.rglob("*.jpg"):  # refused before any is read
        picture.write_bytes(b"no image")
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("unknown_embedding", {"mjp": not mjp}),
        ("model.safetensors", {"patch_size": 8}),
        ("model.safetensors", {"embed_dim": 16 if swin else 32}),
        *([("relative_position_bias_table", {"img_size": 16})] if swin else []),
    ]
    for named, changes in wrong:
        with pytest.raises(UserError, match=named):
            trained(started(path, **{"mjp": mjp, "swin": swin, **changes}), ade, tmp_path / "no")
        assert not (tmp_path / "no" / "checkpoint.pt").exists()


# files of others


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


WRONG: list[tuple[str, dict[str, Any], dict[str, torch.Tensor | None]]] = [
    ("channels", {"segmentation": {"head": "upernet", "channels": 16_384}}, {}),
    ("head.pooled", {"segmentation": {"head": "upernet", "channels": 2048}}, {}),
    ("other.safetensors", {"model": {"embed_dim": 16_000, "depth": 48}}, {}),
    ("swin", {"family": "swin"}, {}),
    ("img_size", {"model": {"img_size": 18}}, {}),
    ("aaa", {}, {"aaa": torch.tensor(1.0)}),
    ("head.classifier.bias", {}, {"head.classifier.bias": None}),
]


@pytest.mark.parametrize(("named", "changes", "tensors"), WRONG, ids=[row[0] for row in WRONG])
def test_a_file_that_is_no_such_network_is_refused_before_memory_is_taken(
    path: Path, named: str, changes: dict[str, Any], tensors: dict[str, torch.Tensor | None]
) -> None:
    """And a segmentation's own is no classifier."""
    metadata = {key: value for key, value in metadata_of(path).items() if key != DIGEST_KEY}
    recipe = {"family": "vit", **json.loads(metadata["recipe"])}
    for name, value in changes.items():
        recipe[name] = {**recipe[name], **value} if isinstance(value, dict) else value
    stored = {
        name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None
    }
    wrong = path.with_name("other.safetensors")
    save_file(stored, wrong, {**metadata, "recipe": json.dumps(recipe)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=named) as caught:
        load_segmentation(str(wrong))
    assert "other.safetensors" in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000_000 / 1024
    with pytest.raises(UserError, match='"segmentation"'):
        load_model(checkpoint=path)


# mistakes


def labelled(value: int, side: int = 20) -> Any:
    """What makes a pair of a square whose map has this label."""
    labels = np.full((side, 20), value, np.uint8)
    return lambda ade, name: save_pair(ade, name, SQUARE, labels)


MISTAKES: dict[str, tuple[str, Callable[[Path, str], object]]] = {
    "size": ("annotations/validation/001.png", labelled(1, side=24)),
    "unreadable map": (
        "annotations/training/001.png",
        lambda ade, name: (ade / "annotations" / f"{name}.png").write_bytes(b"no image"),
    ),
    "unreadable picture": (
        "images/validation/001.jpg",
        lambda ade, name: (ade / "images" / f"{name}.jpg").write_bytes(b"no image"),
    ),
}


@pytest.mark.parametrize(("named", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_two_mistakes_are_counted_before_a_step_is_trained(
    ade: Path, tmp_path: Path, named: str, mistake: Callable[[Path, str], object]
) -> None:
    for number in ("001", "002"):
        mistake(ade, f"{named.split('/')[1]}/{number}")
    with pytest.raises(UserError, match=f", 2 .*{named}"):
        trained(small(), ade, tmp_path / "run")
    labelled(7)(ade, "training/000")
    with pytest.raises(UserError, match=r"annotations/training/000\.png has a label 7"):
        trained(small(), ade, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_picture_and_its_map_are_turned_together_or_not_at_all(ade: Path) -> None:
    pairs = find_pairs(small(), ade, None)[0]
    labels = pairs.read(0)[1]
    for name in (pairs.pictures[0], pairs.maps[0]):
        with Image.open(ade / name) as picture:
            exif = picture.getexif()
            exif[0x0112] = 6
            picture.copy().save(ade / name, exif=exif)
        if name == pairs.pictures[0]:
            with pytest.raises(ImageError, match="orientation"):
                pairs.read(0)
    assert np.array_equal(pairs.read(0)[1], np.rot90(labels, -1))


def test_a_split_without_labels_or_without_pictures(
    ade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in range(3):
        save_pair(ade, f"validation/{place:03d}", SQUARE, SQUARE[..., 0])
    with pytest.raises(UserError, match="validation"):
        trained(small(), ade, tmp_path / "other")
    for kind in ("images", "annotations"):
        (ade / kind / "validation").rename(ade / kind / "val")
    trained(small(recipe={"epochs": 1}), ade, tmp_path / "unscored")
    assert "no images/validation" in capsys.readouterr().err


def test_unreadable_pictures_are_counted_and_what_cannot_be_scored_is_refused(
    ade: Path, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nothing").mkdir()
    only = pair_folder(tmp_path / "only", validation=0)
    large, unreadable = pair_folder(tmp_path / "large"), pair_folder(tmp_path / "unreadable")
    save_pair(large, "validation/001", SQUARE, np.full((20, 20), 9, np.uint8))
    for picture in (unreadable / "images" / "validation").iterdir():
        picture.write_bytes(b"no image")
    options = [("--preset", "authors_code"), ("--unknown-embedding", "False"), ("--data", ade)]
    for named, *words in (
        ("recipe", "cifar_vit", "--ade20k", ade),
        ("x.pth", tmp_path / "x.pth", "--ade20k", ade),
        ("--ade20k", path, "--ade20k", tmp_path / "nothing"),
        ("images/validation", path, "--ade20k", only),
        ("9", path, "--ade20k", large),
        ("none of 3", path, "--ade20k", unreadable),
        ("segmentation", path, "--data", ade),
        *((option, path, "--ade20k", ade, option, value) for option, value in options),
    ):
        refused(capsys, named, "evaluate", "--checkpoint", *words, "--device", "cpu")
    (ade / "images" / "validation" / "001.jpg").write_bytes(b"no image")
    command = ["evaluate", "--checkpoint", str(path), "--ade20k", str(ade), "--device", "cpu"]
    assert main(command) == 3
    printed, said = capsys.readouterr()
    assert "images/validation/001.jpg" in said
    assert "| run | linear | 2 (1 unreadable) |" in printed
