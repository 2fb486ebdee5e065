"""The seeded order, preprocessing, the pictures that come along, and what was altered in files."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import (
    EmbeddedSource,
    ImageError,
    ImageRecord,
    Preprocessing,
    embedded_images,
    load_images,
    made,
    open_images,
    readable_subset,
    spread_subset,
)
from mjp_privacy.data.opening import keep_apart
from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.image_files import make_images
from tests.helpers.runs import cells, one_cell, rows

# order ------------------------------------------------------------------------------------------

RECORDS = [ImageRecord(f"{label}/{at}.png", label) for label in range(4) for at in range(label + 2)]


@given(seed=st.integers(0, 5), short=st.integers(1, 20), long=st.integers(1, 20), mix=st.randoms())
def test_subset_is_nested_and_independent_of_the_order_given(
    seed: int, short: int, long: int, mix: random.Random
) -> None:
    short, long = sorted((short, long))
    everything = spread_subset(RECORDS, None, seed)
    shuffled = mix.sample(RECORDS, len(RECORDS))
    assert spread_subset(RECORDS, long, seed) == everything[:long]
    assert spread_subset(shuffled, short, seed) == everything[:short]
    assert sorted(everything, key=lambda record: record.image_id) == RECORDS
    labels = [record.label for record in everything]
    assert sorted(labels[:4]) == sorted(labels[4:8]) == [0, 1, 2, 3]
    assert sorted(labels[8:11]) == [1, 2, 3]  # class 0 has two images


def test_subset_is_the_same_everywhere_and_differs_by_seed() -> None:
    """Fixed names: a change here changes every run with a limit."""
    chosen = [record.image_id for record in spread_subset(RECORDS, 6, 0)]
    assert chosen == ["2/3.png", "0/1.png", "3/3.png", "1/2.png", "2/1.png", "0/0.png"]
    assert len({spread_subset(RECORDS, None, seed) for seed in range(10)}) == 10
    records = [ImageRecord(f"{name}/{at}", group=name) for name in "abc" for at in range(3)]
    assert {record.group for record in spread_subset(records, 3, 1)} == {"a", "b", "c"}
    with pytest.raises(UserError, match="got 0"):
        spread_subset(records, 0, 1)


def test_a_limit_is_filled_from_files_that_are_images(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", ["a.png", "b.png", "c.png"])
    for name in "bc":
        (folder / f"{name}.png").write_bytes(b"")
    source = open_images(folder)
    chosen, reasons = readable_subset(source, source.records, 2, 0)
    assert [record.image_id for record in chosen] == ["a.png"]
    assert {record.image_id for record in reasons} == {"b.png", "c.png"}
    assert readable_subset(source, source.records, None, 0)[1] == {}
    (folder / "a.png").unlink()
    source = open_images(folder)
    with pytest.raises(UserError, match=r"[bc]\.png"):
        readable_subset(source, source.records, 2, 0)


# preprocessing ----------------------------------------------------------------------------------


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(width * 1000 + height + seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("sides", [(100, 75), (75, 101), (40, 40), (31, 90), (36, 77), (333, 248)])
@pytest.mark.parametrize(("size", "resize"), [(32, None), (32, 36), (33, 33), (64, 71)])
def test_equals_torchvision(
    sides: tuple[int, int], size: int, resize: int | None, interpolation: str
) -> None:
    preprocessing = Preprocessing(size, resize, interpolation)  # type: ignore[arg-type]
    resized = v2.Resize(preprocessing.short_side, v2.InterpolationMode(interpolation))
    theirs = v2.Compose([resized, v2.CenterCrop(size), v2.PILToTensor()])(noise(*sides))
    ours = preprocessing(noise(*sides))
    assert torch.equal(ours, theirs.float() / 255)


def test_a_picture_of_the_right_size_is_unchanged_and_options_are_checked() -> None:
    tensor, levels = Preprocessing(32)(noise(32, 32)), np.array(noise(32, 32))
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, torch.from_numpy(levels).permute(2, 0, 1) / 255)
    assert Preprocessing(32, squash=True)(noise(40, 50)).shape == (3, 32, 32)
    assert [Preprocessing(size).short_side for size in (32, 192, 224, 384)] == [35, 213, 248, 425]
    with pytest.raises(UserError, match="224 and resize 200"):
        Preprocessing(224, 200)
    with pytest.raises(UserError, match="bicubic"):
        Preprocessing(224, interpolation="bicubik")  # type: ignore[arg-type]


# load_images ------------------------------------------------------------------------------------


def test_load_images(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", [f"{name}/{at}.png" for name in "ab" for at in range(3)])
    loaded = list(load_images(folder, size=8))
    for image, label, image_id in loaded:
        level = "ab".index(image_id[0]) * 3 + int(image_id[2])
        assert label == "ab".index(image_id[0])
        assert torch.equal(image, torch.full((3, 8, 8), level, dtype=torch.float32) / 255)
    limited = load_images(folder, size=8, limit=2, seed=0)
    assert [item.image_id for item in limited] == [item.image_id for item in loaded[:2]]
    (folder / "c.png").write_bytes(b"")
    errors: list[ImageError] = []
    assert len(list(load_images(folder, size=8, on_error=errors.append))) == 6
    assert [error.image_id for error in errors] == ["c.png"]
    assert str(pickle.loads(pickle.dumps(errors[0]))) == str(errors[0])  # noqa: S301
    with pytest.raises(ImageError, match=r"c\.png: .*0 bytes"):
        list(load_images(folder, size=8))
    with pytest.raises(ImageError, match="short side 8 px"):
        list(load_images(folder, size=8, min_side=16))
    with pytest.raises(UserError):  # at the call, not at the first image
        load_images(folder / "none", size=8)


# pictures that come along -----------------------------------------------------------------------


def test_embedded_photographs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from skimage.data import astronaut

    source = open_images("embedded")
    assert isinstance(source, EmbeddedSource)
    assert {record.label for record in source.records} == {None}
    assert source.records == tuple(sorted(source.records, key=lambda record: record.image_id))
    assert {source.decode(record).size for record in source.records} == {(224, 224)}
    assert len({source.read_bytes(record) for record in source.records}) == 20
    photographs = {"astronaut", "camera", "chelsea", "coffee", "motorcycle", "rocket"}
    assert {record.group for record in source.records} == photographs
    assert {record.group for record in spread_subset(source.records, 6, 0)} == photographs
    record = next(record for record in source.records if record.image_id == "astronaut/0_1")
    assert np.array_equal(np.asarray(source.decode(record)), astronaut()[32:256, 256:480])
    assert embedded_images(48).decode(source.records[3]).size == (48, 48)
    with pytest.raises(UserError, match="got 0"):
        embedded_images(0)
    monkeypatch.setattr(made, "data_folder", lambda: tmp_path)
    with pytest.raises(UserError, match=str(tmp_path)):
        open_images("embedded")
    monkeypatch.undo()
    monkeypatch.setattr(made, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install scikit-image"):
        open_images("embedded")


def test_flat_pictures_have_what_their_kind_says() -> None:
    groups = {record.image_id: record.group for record in open_images("flat").records}
    kinds = [name.partition("/")[0] for name in groups]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("drawing", "half_blurred", "letterboxed", "saturated"), 6
    )
    assert groups["letterboxed/coffee_wide"] == groups["saturated/coffee_shadows"] == "coffee"
    pictures = {image.image_id: image.image for image in load_images("flat", size=192)}
    for name, picture in pictures.items():
        patches = to_patches(picture, 16)
        flat = int((patches.reshape(144, 3, 256).std(-1).amax(-1) == 0).sum())
        if name.startswith("letterboxed"):
            assert flat >= 40, name
            assert patches[0].unique().tolist() in ([0.0], [1.0])
        if name.startswith("saturated"):
            assert (picture == (0 if "shadows" in name else 1)).float().mean() > 0.1, name
        if name.startswith("half_blurred"):
            steps = picture.diff(dim=-1).abs()
            pairs = (steps.chunk(2, 1), steps.chunk(2, 2))
            halves = sorted(float(half.mean()) for pair in pairs for half in pair)
            assert halves[0] < 0.5 * halves[-1], name
    horse = pictures["drawing/horse"]
    assert torch.equal(horse, horse[:1].expand(3, -1, -1))


@pytest.mark.parametrize("word", ["embedded", "flat"])
def test_pictures_that_come_along_have_no_labels(word: str) -> None:
    with pytest.raises(UserError, match=word):
        open_images(word, "labels.txt")


@pytest.mark.nightly
def test_the_config_of_flat_pictures_needs_nothing_from_outside(tmp_path: Path) -> None:
    """Three pictures, six uploads: exact, and far above what one upload gives."""
    config = Path(__file__).parents[2] / "configs" / "flat_pictures.yaml"
    run_experiment(config, out=tmp_path / "run", limit=3)
    psnr = {}
    for entry in cells(tmp_path / "run"):
        found = rows(tmp_path / "run", [entry["run_id"]])
        values = found[(found["metric"] == "psnr") & (found["variant"] == "standard")]["value"]
        psnr[entry["attack"]] = float(values.clip(upper=100).mean())
    assert psnr["multi_round (6)"] > 60
    assert psnr["multi_round (6)"] > psnr["masked_span"] + 20
    assert psnr["masked_span"] > psnr["grey"] + 3
    assert yaml.safe_load(config.read_text())["images"] == "flat"


# files that are turned upright or have further frames ---------------------------------------------


@pytest.fixture
def altered(tmp_path: Path) -> Path:
    """Nine files, of which two are turned and three have several frames."""
    root = tmp_path / "images"
    root.mkdir()
    for name in ("plain.jpg", "plain.png", "plain.gif"):
        noise(48, 40).save(root / name)
    for name, orientation in (("turned.jpg", 6), ("mirrored.webp", 2), ("upright.jpg", 1)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        noise(48, 40).save(root / name, exif=exif)
    for name in ("frames.gif", "frames.webp", "frames.png"):
        noise(48, 40, 1).save(root / name, save_all=True, append_images=[noise(48, 40, 2)])
    return root


def test_decoding_and_headers_note_the_same(altered: Path) -> None:
    decoded, opened = open_images(altered), open_images(altered)
    pictures = {record.image_id: decoded.decode(record) for record in decoded.records}
    for record in opened.records:
        opened.check_header(record)
    assert pictures["frames.png"].tobytes() == noise(48, 40, 1).tobytes()
    assert pictures["turned.jpg"].size == (40, 48)
    for source in (decoded, opened):
        assert source.altered.turned == {"turned.jpg", "mirrored.webp"}
        assert source.altered.animated == {"frames.gif", "frames.webp", "frames.png"}
    assert decoded.altered.remark == opened.altered.remark
    assert open_images(altered).altered.remark == ""


def test_a_run_score_and_sample_say_it_once(
    altered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("class_0", "class_1"):
        shutil.copytree(altered, altered.parent / "classes" / name)

    def commands(command: str, *words: object) -> None:
        assert main([command, *map(str, words), "--out", str(altered.parent / command)]) == 0

    for limit in (None, 9):
        out = altered.parent / f"run{limit}"
        grey = one_cell(attacks=[{"name": "grey"}])
        run_experiment(grey, images=altered, out=out, device="cpu", limit=limit)
    both = ("--reference", altered, "--reconstruction", altered, "--metrics", "psnr")
    commands("score", *both)
    commands("sample", "--from", altered.parent / "classes", "--per-class", "9")
    printed = capsys.readouterr()
    for text, times in ((printed.err, 2), (printed.out, 2)):
        lines = [line for line in text.splitlines() if "frames.gif" in line]
        assert len(lines) == times
        assert all("turned.jpg" in line for line in lines)


# what is written lies apart from what is read -----------------------------------------------------


def test_outputs_that_are_or_hold_or_lie_in_an_input(tmp_path: Path) -> None:
    photos = make_images(tmp_path / "photos", ["x/a.png", "y/b.png"])
    (tmp_path / "link").symlink_to(photos)
    for out in ("photos", "photos/run", "photos/x/../x", "link/run", "."):
        with pytest.raises(UserError, match="--images"):
            keep_apart(tmp_path / out, {"--images": photos})
    for out in ("run", "photos2", "photo", "deep/run"):
        keep_apart(tmp_path / out, {"--images": photos, "--labels": None})
    keep_apart(tmp_path, {"--images": photos}, around=True)
    (tmp_path / "photos.zip").touch()
    keep_apart(tmp_path, {"--images": tmp_path / "photos.zip"})  # nobody writes such a name
    keep_apart("run", {"--images": "embedded", "--labels": "no\0path"})


COMMANDS = {
    "attack": "attack demo --images IN --out IN/out",
    "sample": "sample --from IN --out IN/out",
    "score": "score --reference IN --reconstruction IN --out IN/out.csv",
    "train": "train configs/training/cifar10.yaml --row J --data IN --out IN/out",
    "federate": "federate configs/federated/minute.yaml --data IN --out IN/out",
    "fit-prior": "fit-prior --images IN --patch 4 --size 8 --out IN/out.safetensors",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_writes_among_what_it_reads(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_images(tmp_path / "photos", ["x/a.png", "y/b.png"])
    before = sorted(photos.rglob("*"))
    words = [word.replace("IN", str(photos)) for word in COMMANDS[command].split()]
    assert main(words) == 2
    assert "--out" in capsys.readouterr().err
    assert sorted(photos.rglob("*")) == before
