"""The seeded order, preprocessing, the pictures that come along, and what was altered in files."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skimage.data import astronaut
from torchvision.transforms import v2

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import Size, height_width
from mjp_privacy.data import (
    ImageError,
    ImageRecord,
    Preprocessing,
    images,
    load_images,
    open_images,
    spread_subset,
)
from mjp_privacy.data.images import keep_apart
from tests.helpers.image_files import make_images, noise

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


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("sides", [(100, 75), (40, 40), (31, 90), (333, 248)])
@pytest.mark.parametrize(
    ("size", "resize"),
    [(32, None), (33, 33), (64, 71), ((48, 32), 36), ((32, 48), 36), ((40, 100), 44)],
)
def test_preprocessing_is_torchvisions(
    sides: tuple[int, int], size: Size, resize: int | None, interpolation: str
) -> None:
    """Of a rectangle: the picture that just covers it is made as much larger as for a square."""
    preprocessing = Preprocessing(size, resize, interpolation)  # type: ignore[arg-type]
    height, width = height_width(size)
    scale = preprocessing.short_side / min(height, width)
    scale *= max(height / sides[1], width / sides[0])
    covering = [int(side * scale + 1e-9) for side in sides[::-1]]
    wanted = preprocessing.short_side if size == height else covering
    resized = v2.Resize(wanted, v2.InterpolationMode(interpolation))
    theirs = v2.Compose([resized, v2.CenterCrop(size), v2.PILToTensor()])(noise(*sides))
    assert torch.equal(preprocessing(noise(*sides)), theirs.float() / 255)
    same, levels = preprocessing(noise(width, height)), np.array(noise(width, height))
    assert torch.equal(same, torch.from_numpy(levels).permute(2, 0, 1) / 255)  # as it was
    assert Preprocessing(size, squash=True)(noise(*sides)).shape == (3, height, width)


def test_sizes_before_the_crop_and_options_that_are_none() -> None:
    assert [Preprocessing(size).short_side for size in (32, 192, 224, 384)] == [35, 213, 248, 425]
    with pytest.raises(UserError, match="224 and resize 200"):
        Preprocessing(224, 200)
    with pytest.raises(UserError, match="bicubic"):
        Preprocessing(224, interpolation="bicubik")  # type: ignore[arg-type]


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
    with pytest.raises(ImageError, match=r"c\.png: .*0 bytes"):
        list(load_images(folder, size=8))
    with pytest.raises(UserError):  # at the call, not at the first image
        load_images(folder / "none", size=8)


# pictures that come along -------------------------------------------------------------------------


def test_embedded_photographs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = open_images("embedded")
    assert {record.label for record in source.records} == {None}
    assert source.records == tuple(sorted(source.records, key=lambda record: record.image_id))
    assert {source.decode(record).size for record in source.records} == {(224, 224)}
    assert len({source.read_bytes(record) for record in source.records}) == 20
    photographs = {"astronaut", "camera", "chelsea", "coffee", "motorcycle", "rocket"}
    assert {record.group for record in spread_subset(source.records, 6, 0)} == photographs
    record = next(record for record in source.records if record.image_id == "astronaut/0_1")
    assert np.array_equal(np.asarray(source.decode(record)), astronaut()[32:256, 256:480])
    with pytest.raises(UserError, match="embedded"):
        open_images("embedded", "labels.txt")
    images.photograph.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(images, "data_folder", lambda: tmp_path)
        with pytest.raises(UserError, match=str(tmp_path)):
            open_images("embedded")
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="scikit-image"):
        open_images("embedded")


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
    words = ["fit-prior", "--images", str(photos), "--patch", "4", "--size", "8"]
    assert main([*words, "--out", str(photos / "out.safetensors")]) == 2
    assert not (photos / "out.safetensors").exists()
