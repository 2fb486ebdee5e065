"""`mjp evaluate --imagenet-c | -a | -o` on small folders in the official layouts."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision import transforms

from mjp_privacy.cli import main
from mjp_privacy.core import progress
from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.data.labels import synset_indices
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.paper.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES
from mjp_privacy.paper.robustness_scores import (
    ALEXNET,
    accuracy_when_answering,
    average_precision,
    rms_calibration,
)
from mjp_privacy.paper.robustness_sets import OFFICIAL, corruption_folders
from tests.helpers.image_files import make_images
from tests.helpers.models import tiny

FACTS = {"mean": [0.5] * 3, "std": [0.25] * 3, "num_heads": 3, "resize": 32}
SYNSETS = sorted(synset_indices())


def saved(path: Path, classes: int, seed: int = 0) -> Path:
    """A model whose answers differ from image to image."""
    model = tiny(torch.float32, num_classes=classes)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(seed)).mul_(4)
        model.head.bias.zero_()
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, path, {key: json.dumps(value) for key, value in FACTS.items()})
    return path


def paint(path: Path, rng: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    Image.fromarray(pixels).save(path, "JPEG")


def corrupted_set(root: Path, classes: int = 5, *, families: bool = False) -> Path:
    """ImageNet-C's layout with one image of each class, flat or in the archives' folders."""
    rng = np.random.default_rng(0)
    for family, names in FAMILIES.items():
        for name in names:
            for severity in SEVERITIES:
                folder = (root / family / name if families else root / name) / str(severity)
                for label in range(classes):
                    paint(folder / str(label) / f"ILSVRC2012_val_{label:08d}.JPEG", rng)
    return root


def synset_set(root: Path, synsets: list[str], images: int = 1, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    for synset in synsets:
        for number in range(images):
            paint(root / synset / f"{number}.jpg", rng)
    return root


def evaluate(*words: object) -> int:
    return main(["evaluate", *(str(word) for word in words), "--device", "cpu"])


def by_hand(model: LoadedModel, path: Path, classes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Confidences and hits, one image at a time."""
    source = open_images(path)
    confidence, hits = [], []
    for record in source.records:
        picture = Preprocessing(32, 32)(source.decode(record))
        logits = model(model.normalize(picture[None]))[0, classes].detach().double()
        odds = (logits - logits.max()).exp()
        confidence.append(float(odds.max() / odds.sum()))
        hits.append(float(classes[int(logits.argmax())] == record.label))
    return np.array(confidence), np.array(hits)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("thousand") / "big.safetensors", 1000)


@pytest.mark.parametrize("families", [False, True])
def test_imagenet_c(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    families: bool,
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL", 0.0)
    data = corrupted_set(tmp_path / "c", families=families)
    one, two = saved(tmp_path / "one.safetensors", 5), saved(tmp_path / "two.safetensors", 5, 1)
    out = tmp_path / "out"
    assert evaluate("--checkpoint", one, two, "--imagenet-c", data, "--out", out) == 0
    printed, lines = capsys.readouterr()
    done = [re.match(r"(\w+): (\d+/\d+) · \S+ images/s · ", line) for line in lines.splitlines()]
    assert [line.groups() for line in done if line] == [
        (model, f"{5 * (cell + 1)}/375") for model in ("one", "two") for cell in range(75)
    ]
    assert "mCE, unnormalised, difference to one" in printed
    assert "paper" not in printed  # another family
    table = pd.read_csv(out / "robustness.csv")
    assert not table["measure"].str.contains("against AlexNet").any()
    model = load_model(checkpoint=one)
    for name in ("gaussian_noise", "jpeg_compression"):
        folder = corruption_folders(data).by_cell[name, 4]
        _, hits = by_hand(model, folder, list(range(5)))
        rows = table[(table["model"] == "one") & (table["corruption"] == name)]
        (line,) = rows[rows["severity"] == 4].to_dict("records")
        assert line["percent"] == pytest.approx(100 * (1 - hits.mean()))
        assert (line["n"], line["measure"]) == (5, "error")
    cells = table[(table["model"] == "two") & (table["measure"] == "error")]
    (mce,) = table[(table["model"] == "two") & (table["measure"] == "mCE, unnormalised")]["percent"]
    assert len(cells) == 75
    assert mce == pytest.approx(cells["percent"].mean())
    assert 0 < mce < 100
    per_image = pd.read_csv(out / "per_image.csv")
    assert len(per_image) == 10
    assert per_image[list(CORRUPTIONS)].to_numpy().mean() / 5 * 100 == pytest.approx(
        table[table["measure"] == "error"]["percent"].mean()
    )
    assert (out / "robustness.md").read_text() in printed


def test_a_model_of_imagenet_stands_against_alexnet(thousand: Path, tmp_path: Path) -> None:
    data, out = corrupted_set(tmp_path / "c", classes=2), tmp_path / "out"
    assert evaluate("--checkpoint", thousand, "--imagenet-c", data, "--out", out) == 0
    table = pd.read_csv(out / "robustness.csv")
    cells = table[table["measure"] == "error"].groupby("corruption")["percent"].mean()
    against = table[table["measure"] == "CE against AlexNet"].set_index("corruption")["percent"]
    expected = {name: 100 * cells[name] / ALEXNET[name] for name in CORRUPTIONS}
    assert against[list(CORRUPTIONS)].to_dict() == pytest.approx(expected)
    (mce,) = table[table["measure"] == "mCE against AlexNet"]["percent"]
    assert mce == pytest.approx(np.mean(list(expected.values())))


def test_numbers_of_plain_folders_are_those_of_a_model_with_as_many_classes(
    thousand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """airplane, cat and dog are 0, 1 and 2 of three classes, and nothing of ImageNet's thousand."""
    rng = np.random.default_rng(0)
    for name in ("airplane", "cat", "dog"):
        paint(tmp_path / "photos" / name / "a.png", rng)
    out = tmp_path / "corrupted"
    sample = ["sample", "--from", str(tmp_path / "photos"), "--out", str(out), "--size", "32"]
    assert main([*sample, "--corrupt", "--limit", "2"]) == 0
    assert json.loads((out / "corrupted.json").read_text())["plain_class_folders"] == 3
    assert evaluate("--checkpoint", thousand, "--imagenet-c", out) == 2
    assert "--imagenet-c" in capsys.readouterr().err
    assert evaluate("--checkpoint", saved(tmp_path / "m.safetensors", 3), "--imagenet-c", out) == 0


@pytest.mark.nightly
def test_our_own_corruptions_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for label in range(5):
        paint(tmp_path / "photos" / str(label) / "a.png", rng)
    out = tmp_path / "corrupted"
    sample = ["sample", "--from", str(tmp_path / "photos"), "--out", str(out), "--size", "32"]
    assert main([*sample, "--corrupt"]) == 0
    one = saved(tmp_path / "one.safetensors", 5)
    (out / "fog" / "2" / "3" / "a.JPEG").write_bytes(b"no image")
    photos = tmp_path / "photos"
    command = ("--checkpoint", one, "--imagenet-c", out, "--data", photos, "--limit", 5)
    assert evaluate(*command, "--out", tmp_path / "out") == 3
    printed, said = capsys.readouterr()
    damaged = out / "fog" / "2" / "3" / "a.JPEG"
    assert str(damaged) in said
    (line,) = pd.read_csv(tmp_path / "out" / "unreadable.csv").to_dict("records")
    assert line["image"] == str(damaged)
    assert line["reason"].startswith("not an image")
    assert "our own corruptions" in printed
    assert "| error without corruption |" in printed
    assert "4 (1 unreadable)" in printed


def test_imagenet_a(thousand: Path, tmp_path: Path) -> None:
    data = synset_set(tmp_path / "imagenet-a", SYNSETS[::5])
    out = tmp_path / "out"
    assert evaluate("--checkpoint", thousand, "--imagenet-a", data, "--out", out) == 0
    confidence, hits = by_hand(load_model(checkpoint=thousand), data, list(range(0, 1000, 5)))
    table = pd.read_csv(out / "robustness.csv").set_index("measure")
    assert table.loc["accuracy", "percent"] == pytest.approx(100 * hits.mean())
    assert table.loc["AURRA", "percent"] == pytest.approx(
        100 * accuracy_when_answering(confidence, hits), abs=1e-4
    )
    assert table.loc["RMS calibration error", "percent"] == pytest.approx(
        100 * rms_calibration(confidence, hits), abs=1e-4
    )
    assert set(table["n"]) == {200}


@pytest.mark.nightly
def test_photographs_are_cut_out_as_torchvision_does_it(thousand: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for synset in SYNSETS[::5]:
        (tmp_path / "a" / synset).mkdir(parents=True)
        pixels = rng.integers(0, 256, (70, 95, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "a" / synset / "1.png")
    assert (
        evaluate(
            "--checkpoint", thousand, "--imagenet-a", tmp_path / "a", "--out", tmp_path / "out"
        )
        == 0
    )
    model, source = load_model(checkpoint=thousand), open_images(tmp_path / "a")
    cut = transforms.Compose(
        [transforms.Resize(37), transforms.CenterCrop(32), transforms.ToTensor()]
    )  # 37: 256 / 224 of 32
    confidence, hits = [], []
    for record in source.records:
        logits = model(model.normalize(cut(source.decode(record))[None]))[0, ::5]
        confidence.append(float(logits.detach().double().softmax(0).max()))
        hits.append(float(5 * int(logits.argmax()) == record.label))
    table = pd.read_csv(tmp_path / "out" / "robustness.csv").set_index("measure")
    assert table.loc["RMS calibration error", "percent"] == pytest.approx(
        100 * rms_calibration(np.array(confidence), np.array(hits)), abs=1e-4
    )


@pytest.mark.nightly
def test_imagenet_o(thousand: Path, tmp_path: Path) -> None:
    strange = synset_set(tmp_path / "imagenet-o", SYNSETS[:200])
    # photographs of other classes are no part of it
    val = synset_set(tmp_path / "val", SYNSETS[150:250], images=2, seed=1)
    out = tmp_path / "out"
    command = ("--checkpoint", thousand, "--imagenet-o", strange, "--data", val)
    assert evaluate(*command, "--out", out) == 0
    model, classes = load_model(checkpoint=thousand), list(range(200))
    doubts = [-by_hand(model, path, classes)[0] for path in (strange, val)]
    ours = np.array([record.label < 200 for record in open_images(val).records])
    table = pd.read_csv(out / "robustness.csv").set_index("measure")
    assert table.loc["AUPR", "n"] == 200 + ours.sum() == 300
    assert table.loc["AUPR", "percent"] == pytest.approx(
        100 * average_precision(doubts[0], doubts[1][ours]), abs=1e-3
    )
    assert table.loc["AUPR by chance", "percent"] == pytest.approx(100 * 200 / 300)


def test_the_digest_of_imagenet_a_is_that_of_timms_list() -> None:
    synsets = files("timm.data").joinpath("_info/imagenet_a_synsets.txt").read_text().split()
    assert hashlib.sha256("\n".join(synsets).encode()).hexdigest() == OFFICIAL["A"][0]


# mistakes -----------------------------------------------------------------------------------


def no_class_folders(data: Path) -> None:
    for image in list(data.rglob("*.JPEG")):
        image.rename(image.parents[1] / image.name)


def other_folders(data: Path) -> None:
    for entry in list(data.iterdir()):
        entry.rename(entry.with_name(f"x_{entry.name}"))


LAYOUTS = {  # what is done to the folder, and the name that the message has
    "nothing there": (lambda data: shutil.rmtree(data), "--imagenet-c"),
    "other folders": (
        lambda data: data.joinpath("c").mkdir() or shutil.rmtree(data),
        "--imagenet-c",
    ),
    "no severity": (lambda data: shutil.rmtree(data / "snow" / "4"), "snow"),
    "no class": (lambda data: shutil.rmtree(data / "fog" / "2" / "3"), "fog/2"),
    "another image": (
        lambda data: next((data / "fog" / "2" / "3").iterdir()).rename(data / "fog/2/3/other.JPEG"),
        "fog/2",
    ),
    "no class folders": (no_class_folders, "gaussian_noise/1"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    data, (broken, named) = corrupted_set(tmp_path / "c"), LAYOUTS[layout]
    broken(data)
    one = saved(tmp_path / "one.safetensors", 5)
    assert evaluate("--checkpoint", one, "--imagenet-c", data) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("error: ") == 1


def test_mistakes_with_a_and_o(
    thousand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = synset_set(tmp_path / "few", SYNSETS[:199])
    whole = synset_set(tmp_path / "all", SYNSETS[:200])
    other = synset_set(tmp_path / "other", SYNSETS[900:902])
    small = saved(tmp_path / "small.safetensors", 5)
    flat = make_images(tmp_path / "flat", ["a.png", "b.png"])
    c = corrupted_set(tmp_path / "c", classes=10)
    broken = tmp_path / "broken"
    for synset in SYNSETS[:200]:
        (broken / synset).mkdir(parents=True)
        (broken / synset / "a.jpg").write_bytes(b"no image")
    for words, named in (
        ((thousand, "--imagenet-a", few), "--imagenet-a"),
        ((thousand, "--imagenet-a", broken), "broken"),
        ((small, "--imagenet-a", whole), "small"),
        ((thousand, "--imagenet-o", whole), "--imagenet-o"),
        ((thousand, "--imagenet-o", whole, "--data", other), "--data"),
        ((thousand, "--imagenet-a", whole, "--out", whole / "out"), "--imagenet-a"),
        ((thousand,), "--data"),
        ((thousand, "--imagenet-a", whole, "--paper-row", "Z"), "--paper-row"),
        ((thousand, "--imagenet-a", whole, "--seed", "-1"), "--seed"),
        ((thousand, "--imagenet-a", whole, "--data", flat), "--data"),
        ((small, "--imagenet-c", c), "small"),
    ):
        assert evaluate("--checkpoint", *words) == 2, words
        said = capsys.readouterr().err
        assert named in said
        assert said.count("error: ") == 1
