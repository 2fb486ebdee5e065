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
    assert "**one** on ImageNet-C: mCE" in printed
    assert "5 images in each of 75 cells" in printed
    assert "mCE, unnormalised, difference to one" in printed
    assert "paper" not in printed  # another family
    assert "unnormalised, and none against AlexNet, whose errors are among ImageNet's" in printed
    assert "CE against AlexNet |" not in printed
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


def test_a_model_of_imagenet_stands_against_alexnet(
    thousand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = corrupted_set(tmp_path / "c", classes=2)
    assert evaluate("--checkpoint", thousand, "--imagenet-c", data) == 0
    printed = capsys.readouterr().out
    assert re.search(r"mCE [0-9.]+ against AlexNet, [0-9.]+ unnormalised; 2 images", printed)
    assert "| mean | CE against AlexNet |" in printed


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
    said = capsys.readouterr().err
    assert "made of 3 class folders, numbered in sorted order, and big has 1000 classes" in said
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
    assert f"1 not read, and in no figure:\n  {damaged}: not an image in a format" in said
    (line,) = pd.read_csv(tmp_path / "out" / "unreadable.csv").to_dict("records")
    assert line["image"] == str(damaged)
    assert line["reason"].startswith("not an image")
    assert "**one** on our own corruptions: mCE" in printed
    assert "not the official files" in printed
    assert "| error without corruption |" in printed
    assert "4 (1 unreadable)" in printed


def test_imagenet_a(thousand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = synset_set(tmp_path / "imagenet-a", SYNSETS[::5])
    out = tmp_path / "out"
    assert evaluate("--checkpoint", thousand, "--imagenet-a", data, "--out", out) == 0
    assert "**big** on ImageNet-A: accuracy" in capsys.readouterr().out
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
def test_imagenet_o(thousand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = synset_set(tmp_path / "imagenet-o", SYNSETS[:200])
    # photographs of other classes are no part of it
    val = synset_set(tmp_path / "val", SYNSETS[150:250], images=2, seed=1)
    out = tmp_path / "out"
    command = ("--checkpoint", thousand, "--imagenet-o", strange, "--data", val)
    assert evaluate(*command, "--out", out) == 0
    assert "chance would reach" in capsys.readouterr().out
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


def break_nothing_there(data: Path) -> None:
    shutil.rmtree(data)


def break_file(data: Path) -> None:
    shutil.rmtree(data)
    data.write_bytes(b"tar")


def break_other_folders(data: Path) -> None:
    for entry in list(data.iterdir()):
        entry.rename(entry.with_name("x_" + entry.name))


def break_severity(data: Path) -> None:
    shutil.rmtree(data / "snow" / "4")


def break_class(data: Path) -> None:
    shutil.rmtree(data / "fog" / "2" / "3")


def break_image(data: Path) -> None:
    (image,) = (data / "fog" / "2" / "3").iterdir()
    image.rename(image.with_name("other.JPEG"))


def break_classes(data: Path) -> None:
    for name in CORRUPTIONS:
        for severity in SEVERITIES:
            for folder in list((data / name / str(severity)).iterdir()):
                for image in list(folder.iterdir()):
                    image.rename(folder.parent / image.name)
                folder.rmdir()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (break_nothing_there, "got nothing of this name"),
        (break_file, "got a file: unpack it"),
        (break_other_folders, "got x_brightness, x_contrast"),
        (break_severity, "snow has no folder for the severities 4; expected 1 to 5"),
        (break_class, "fog/2 lacks 1 of the 5 class folders of gaussian_noise/1: 3"),
        (break_image, "fog/2 holds 5 images, 4 of them under the names of the first folder's 5"),
        (break_classes, "the images of gaussian_noise/1 lie in no class folders"),
    ],
)
def test_another_layout_is_refused(tmp_path: Path, capsys, broken, words: str) -> None:  # type: ignore[no-untyped-def]
    data = corrupted_set(tmp_path / "c")
    broken(data)
    one = saved(tmp_path / "one.safetensors", 5)
    assert evaluate("--checkpoint", one, "--imagenet-c", data) == 2
    assert words in capsys.readouterr().err


@pytest.mark.nightly
def test_a_part_of_the_corruptions_has_no_mce(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = corrupted_set(tmp_path / "c")
    shutil.rmtree(data / "fog")
    one = saved(tmp_path / "one.safetensors", 5)
    assert evaluate("--checkpoint", one, "--imagenet-c", data) == 0
    assert "no mCE, which is a mean over all 15 corruptions; missing: fog" in (
        capsys.readouterr().out
    )


def test_mistakes_with_a_and_o(
    thousand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = synset_set(tmp_path / "few", SYNSETS[:199])
    all_of_them = synset_set(tmp_path / "all", SYNSETS[:200])
    other = synset_set(tmp_path / "other", SYNSETS[900:902])
    small = saved(tmp_path / "small.safetensors", 5)
    flat = make_images(tmp_path / "flat", ["a.png", "b.png"])
    c = corrupted_set(tmp_path / "c", classes=10)
    broken = tmp_path / "broken"
    for synset in SYNSETS[:200]:
        (broken / synset).mkdir(parents=True)
        (broken / synset / "a.jpg").write_bytes(b"no image")
    for words, message in (
        ((thousand, "--imagenet-a", few), "expected 200 folders named by synsets"),
        (
            (thousand, "--imagenet-a", broken),
            "None of the 200 images of broken can be read, the first of them for: ",
        ),
        ((small, "--imagenet-a", all_of_them), "small has 5 classes; ImageNet-A and -O need"),
        ((thousand, "--imagenet-o", all_of_them), "Expected --data with photographs of its 200"),
        (
            (thousand, "--imagenet-o", all_of_them, "--data", other),
            "--data holds no image of ImageNet-O's 200 classes",
        ),
        (
            (thousand, "--imagenet-a", all_of_them, "--out", all_of_them / "out"),
            "lies inside --imagenet-a",
        ),
        ((thousand,), "expected images, got none. Give --data"),
        ((thousand, "--imagenet-a", all_of_them, "--paper-row", "Z"), "expected one of A, B"),
        ((thousand, "--imagenet-a", all_of_them, "--seed", "-1"), "--seed: expected 0 to"),
        ((thousand, "--imagenet-a", all_of_them, "--data", flat), "expected images with labels"),
        ((small, "--imagenet-c", c), "--imagenet-c holds a label 9, but small has 5 classes"),
    ):
        assert evaluate("--checkpoint", *words) == 2, message
        assert message in capsys.readouterr().err
