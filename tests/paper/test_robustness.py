"""`mjp evaluate --imagenet-c | -a | -o` on small folders in the official layouts; its scores beside
loops written from their definitions."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision import transforms

from mjp_privacy.cli import main
from mjp_privacy.data import open_images
from mjp_privacy.data.labels import synset_indices
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.zoo import IMAGENET_MEAN, IMAGENET_STD
from mjp_privacy.paper.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES
from mjp_privacy.paper.robustness import AGAINST_ALEXNET as AGAINST
from mjp_privacy.paper.robustness import (
    ALEXNET,
    DEIT,
    MJP,
    NORMALISED,
    UNNORMALISED,
    accuracy_when_answering,
    average_precision,
    corruption_lines,
    counterpart,
    markdown,
    mean,
)
from mjp_privacy.training.evaluation import TABLE3, TABLE4
from tests.helpers.image_files import make_images
from tests.helpers.models import tiny
from tests.helpers.refusals import refused
from tests.training.test_evaluation import saved

SYNSETS = sorted(synset_indices())


def paint(path: Path, rng: np.random.Generator, size: tuple[int, int] = (32, 32)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(path)


def corrupted_set(root: Path, classes: int = 5, form: str = "{name}") -> Path:
    """ImageNet-C's layout with one image of each class."""
    rng = np.random.default_rng(0)
    for family, functions in FAMILIES.items():
        for function, severity, label in product(functions, SEVERITIES, range(classes)):
            name = form.format(family=family, name=function.__name__)
            folder = root / name / str(severity)
            paint(folder / str(label) / f"ILSVRC2012_val_{label:08d}.JPEG", rng)
    return root


def photographs(
    root: Path, folders: list[str], images: int = 1, size: tuple[int, int] = (32, 32)
) -> Path:
    """Class folders of these names."""
    rng = np.random.default_rng(images)
    for folder, number in product(folders, range(images)):
        paint(root / folder / f"{number}.png", rng, size)
    return root


def evaluate(*words: object) -> int:
    return main(["evaluate", "--checkpoint", *map(str, words), "--device", "cpu"])


def by_hand(
    model: LoadedModel, path: Path, classes: list[int], cut: Callable[..., torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Confidences and hits, one image at a time."""
    source = open_images(path)
    confidence, hits = [], []
    for record in source.records:
        picture = cut(source.decode(record))
        logits = model(model.normalize(picture[None]))[0, classes].detach().double()
        confidence.append(float(logits.softmax(0).max()))
        hits.append(float(classes[int(logits.argmax())] == record.label))
    return np.array(confidence), np.array(hits)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of as many classes as their names say; answers differ from image to
    image."""
    folder = tmp_path_factory.mktemp("models")
    for name, classes, seed in (("five", 5, 0), ("other", 5, 1), ("three", 3, 0), ("all", 1000, 0)):
        model = tiny(torch.float32, num_classes=classes, mean=(0.5,) * 3, std=(0.5,) * 3)
        with torch.no_grad():
            model.head.weight.normal_(generator=torch.Generator().manual_seed(seed)).mul_(4)
            model.head.bias.zero_()
        saved(folder / f"{name}.safetensors", model)
    return folder


# sets of images -----------------------------------------------------------------------------------


def test_imagenet_c(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As its archives are unpacked, each into a folder of its own."""
    data, out = corrupted_set(tmp_path / "c", form="{family}/{name}"), tmp_path / "out"
    damaged = data / "weather/fog/2/3/ILSVRC2012_val_00000003.JPEG"
    damaged.write_bytes(b"no image")
    pair = (models / "five.safetensors", models / "other.safetensors")
    assert evaluate(*pair, "--imagenet-c", data, "--out", out) == 3
    printed, said = capsys.readouterr()
    assert str(damaged) in said
    assert (out / "robustness.md").read_text() in printed
    table = pd.read_csv(out / "robustness.csv").fillna({"corruption": ""})
    assert table["paper"].isna().all()  # another family
    assert not table["measure"].str.contains("against AlexNet").any()
    table = table.set_index(["model", "measure", "corruption", "severity"]).sort_index()
    model = load_model(checkpoint=pair[0])
    for folder in data.rglob("jpeg_compression/*"):
        _, hits = by_hand(model, folder, list(range(5)), transforms.ToTensor())
        line = table.loc["five", "error", "jpeg_compression", int(folder.name)]
        assert line["percent"] == pytest.approx(100 * (1 - hits.mean()))
        assert (line["n"], line["failed"], line["interval"]) == (5, 0, "Wilson")
    counts = pd.read_csv(out / "per_image.csv").set_index("image_id")
    assert counts["fog"].isna().sum() == 2  # an image under each model
    whole = counts[counts["fog"].notna()]
    mce = {name: of[list(CORRUPTIONS)].mean(axis=1) * 20 for name, of in whole.groupby("model")}
    (figure,) = table.loc[("other", UNNORMALISED)].to_dict("records")
    assert figure["percent"] == pytest.approx(mce["other"].mean())
    assert (figure["n"], figure["failed"]) == (4, 1)
    (difference,) = table.loc[("other", f"{UNNORMALISED}, difference to five")].to_dict("records")
    assert difference["percent"] == pytest.approx((mce["other"] - mce["five"]).mean())
    assert difference["low"] <= difference["percent"] <= difference["high"]


def test_a_model_of_imagenet_stands_against_alexnet(models: Path, tmp_path: Path) -> None:
    data, outs = corrupted_set(tmp_path / "c", classes=2), (tmp_path / "out", tmp_path / "less")
    words = (models / "all.safetensors", "--imagenet-c", data, "--out")
    assert evaluate(*words, outs[0]) == 0
    table = pd.read_csv(outs[0] / "robustness.csv")
    cells = table[table["measure"] == "error"].groupby("corruption")["percent"].mean()
    against = table[table["measure"] == AGAINST].set_index("corruption")["percent"]
    expected = {name: 100 * cells[name] / ALEXNET[name] for name in CORRUPTIONS}
    assert against[list(CORRUPTIONS)].to_dict() == pytest.approx(expected)
    (mce,) = table[table["measure"] == NORMALISED]["percent"]
    assert mce == pytest.approx(np.mean(list(expected.values())))
    shutil.rmtree(data / "fog")  # without all corruptions there is no mCE
    assert evaluate(*words, outs[1]) == 0
    measures = pd.read_csv(outs[1] / "robustness.csv")["measure"]
    assert {*measures} == {"error", "mean error", AGAINST}


def test_our_own_corruptions_and_their_plain_class_folders(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """airplane, cat and dog are 0, 1 and 2 of three classes, and nothing of ImageNet's thousand.
    Two of them alone would be numbered anew."""
    photos, out = photographs(tmp_path / "photos", ["airplane", "cat", "dog"]), tmp_path / "made"
    sample = ["sample", "--from", str(photos), "--size", "32", "--corrupt", "--out"]
    assert main([*sample, str(out)]) == 0
    assert main([*sample, str(tmp_path / "part"), "--limit", "2"]) == 0
    for model, made in (("all", out), ("three", tmp_path / "part")):
        assert evaluate(models / f"{model}.safetensors", "--imagenet-c", made) == 2
        assert "--imagenet-c" in capsys.readouterr().err
    words = ("--imagenet-c", out, "--data", photos, "--limit", 2)
    assert evaluate(models / "three.safetensors", *words) == 0
    printed = capsys.readouterr().out
    assert "our own corruptions" in printed
    assert "| error without corruption |" in printed


@pytest.mark.parametrize("preset", ["ours", "authors_code"])
def test_imagenet_a_and_o(models: Path, tmp_path: Path, preset: str) -> None:
    """Pictures are cut out as torchvision does it, at 256 / 224 of 32 pixels: 37. The authors' code
    has ImageNet's mean and std for every model."""
    sizes = (transforms.Resize(37), transforms.CenterCrop(32))
    cut = transforms.Compose([*sizes, transforms.ToTensor()])
    hard = photographs(tmp_path / "a", SYNSETS[::5], size=(95, 70))
    strange = photographs(tmp_path / "o", SYNSETS[:200], size=(40, 36))
    val = photographs(tmp_path / "val", SYNSETS[150:250], images=2, size=(40, 36))  # half: others
    out, file = tmp_path / "out", models / "all.safetensors"
    words = ("--imagenet-a", hard, "--imagenet-o", strange, "--data", val, "--out", out)
    assert evaluate(file, *words, "--preset", preset) == 0
    table = pd.read_csv(out / "robustness.csv").set_index("measure")
    of_authors: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    own = of_authors if preset == "authors_code" else {}
    model, classes = load_model(checkpoint=file, **own), list(range(200))
    confidence, hits = by_hand(model, hard, list(range(0, 1000, 5)), cut)
    doubts = [-by_hand(model, path, classes, cut)[0] for path in (strange, val)]
    ours = np.array([record.label < 200 for record in open_images(val).records])
    expected = {
        "accuracy": 100 * hits.mean(),
        "AURRA": 100 * accuracy_when_answering(confidence, hits),
        "AUPR": 100 * average_precision(doubts[0], doubts[1][ours]),
        "AUPR by chance": 100 * 200 / 300,
    }
    assert table["percent"].to_dict() == pytest.approx(expected, abs=1e-3)
    assert table["n"].tolist() == [200] * 2 + [300] * 2
    aupr = table.loc["AUPR"]
    assert aupr["low"] < aupr["percent"] < aupr["high"] < aupr["low"] + 25


# mistakes -----------------------------------------------------------------------------------------

BREAK: dict[str, Callable[[Path], object]] = {  # by the name that the message has
    "--imagenet-c": shutil.rmtree,
    "expected folders": lambda data: [e.rename(data / f"x{e.name}") for e in [*data.iterdir()]],
    "snow/4": lambda data: shutil.rmtree(data / "snow" / "4"),
    "frost/2": lambda data: shutil.rmtree(data / "frost" / "2" / "1"),
    "fog/2": lambda data: next((data / "fog/2/1").iterdir()).rename(data / "fog/2/1/other.JPEG"),
    "gaussian_noise/1": lambda data: [i.rename(i.parents[1] / i.name) for i in data.rglob("*.J*")],
}


def test_another_layout_is_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, model = corrupted_set(tmp_path / "whole", classes=2), models / "five.safetensors"
    for number, (named, broken) in enumerate(BREAK.items()):
        data = Path(shutil.copytree(whole, tmp_path / str(number), copy_function=os.link))
        broken(data)
        refused(capsys, named, "evaluate", "--checkpoint", model, "--imagenet-c", data)


def test_mistakes_with_a_and_o(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, whole, broken = (
        photographs(tmp_path / name, SYNSETS[:many])
        for name, many in (("few", 199), ("all", 200), ("broken", 200))
    )
    other = photographs(tmp_path / "other", SYNSETS[900:902])
    flat = make_images(tmp_path / "flat", ["a.png", "b.png"])
    c = corrupted_set(tmp_path / "c", classes=6)
    for picture in broken.rglob("*.png"):
        picture.write_bytes(b"no image")
    for named, model, *words in (
        ("--imagenet-a", "all", "--imagenet-a", few),
        ("broken", "all", "--imagenet-a", broken),
        ("five", "five", "--imagenet-a", whole),
        ("--imagenet-o", "all", "--imagenet-o", whole),
        ("--data", "all", "--imagenet-o", whole, "--data", other),
        ("--imagenet-a", "all", "--imagenet-a", whole, "--out", whole / "out"),
        ("--data", "all"),
        ("--data", "five", "--imagenet-c", c, "--data", flat),
        ("five", "five", "--imagenet-c", c),
        ("--gamma", "all", "--imagenet-a", whole, "--gamma", 0.1),
        ("--preset", "all", "--imagenet-a", whole, "--preset", "paper"),
        ("--unknown-embedding", "all", "--imagenet-a", whole, "--unknown-embedding", "False"),
        ("--labels", "all", "--imagenet-a", whole, "--labels", "x.csv"),
        ("--data", "all", "--imagenet-a", whole, "--data", whole),
    ):
        file = models / f"{model}.safetensors"
        refused(capsys, named, "evaluate", "--checkpoint", file, *words)


# scores -------------------------------------------------------------------------------------------


def test_a_mean_of_images_that_are_alike_has_no_interval() -> None:
    """The bootstrap's would have no width."""
    alike = mean("error", np.array([20.0] * 4 + [np.nan]))
    assert (alike["percent"], alike["n"], alike["failed"]) == (20, 4, 1)
    assert np.isnan([alike["low"], alike["high"]]).all()
    one = mean("error", np.array([0.0, 0, 0, 20.0]))
    assert one["low"] < one["percent"] < one["high"]


def test_aurra_is_the_mean_of_the_accuracies_at_every_response_rate() -> None:
    """Of equal confidences that of a random order."""
    confidence, correct = np.array([0.7, 0.9, 0.8]), np.array([1.0, 1.0, 0.0])
    assert accuracy_when_answering(confidence, correct) == pytest.approx((1 + 1 / 2 + 2 / 3) / 3)
    confidence = np.array([0.5, 0.9, 0.5, 0.5, 0.1])
    correct = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    by_order = []
    for order in permutations(range(5)):
        if all(confidence[a] >= confidence[b] for a, b in pairwise(order)):
            ranked = correct[list(order)]
            by_order.append(np.mean([ranked[: k + 1].mean() for k in range(5)]))
    assert len(by_order) == 6
    assert accuracy_when_answering(confidence, correct) == pytest.approx(np.mean(by_order))


def test_aupr_against_a_loop_over_thresholds() -> None:
    rng = np.random.default_rng(0)
    strange, ordinary = rng.integers(0, 20, 60) / 20 + 0.1, rng.integers(0, 20, 200) / 20
    total, reached = 0.0, 0.0
    for threshold in sorted({*strange, *ordinary}, reverse=True):
        hits, alarms = (strange >= threshold).sum(), (ordinary >= threshold).sum()
        recall = hits / 60
        total += (recall - reached) * hits / (hits + alarms)
        reached = recall
    assert average_precision(strange, ordinary) == pytest.approx(total)


# the paper, and results/robustness ----------------------------------------------------------------


def test_the_paper_stands_beside_its_own_family_alone() -> None:
    model = tiny(torch.float32)
    assert counterpart(model, TABLE4["A"]) == {}
    model.card = replace(model.card, architecture="vit d384 l12 h6 p16@224", img_size=224)
    assert counterpart(model, TABLE4["A"]) is DEIT
    assert counterpart(model, TABLE4["J"]) is counterpart(model, TABLE3[0.03]) is MJP
    assert counterpart(model, TABLE4["B"]) == counterpart(model, None) == {}
    model.card = replace(model.card, img_size=192)
    assert counterpart(model, TABLE4["A"]) == {}


def test_what_is_printed_stands_beside() -> None:
    right = np.random.default_rng(0).random((30, 75)) < 0.5
    cells = pd.MultiIndex.from_product([CORRUPTIONS, SEVERITIES])
    errors = pd.DataFrame(right.astype(float), columns=cells)
    lines = corruption_lines(errors, MJP, classes=1000, others={})
    table = pd.DataFrame(lines).assign(model="M", images="ImageNet-C")
    text = markdown(table.astype({"severity": "Int64", "paper": float}))
    line = next(line for line in text.splitlines() if line.startswith("| contrast |"))
    assert f" | {MJP['errors']['contrast']:.2f} (" in line
    assert " | 40.78 (" in text
