"""Opening folders and zips, the seeded order, preprocessing, the embedded photographs."""

import os
import pickle
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import (
    EmbeddedSource,
    ImageError,
    ImageRecord,
    Preprocessing,
    embedded_images,
    files,
    load_images,
    made,
    open_images,
    spread_subset,
)
from tests.helpers.image_files import make_images, zipped

# opening ----------------------------------------------------------------------------------------


def test_records_are_sorted_and_other_files_ignored(tmp_path: Path) -> None:
    images = ["b.PNG", "a.jpeg", "deep/er/c.webp", "Z.tif"]
    folder = make_images(tmp_path / "in", [*images, ".hidden.png", "__MACOSX/x.png", ".git/y.png"])
    for name in ("notes.txt", "table.csv", "Thumbs.db"):
        (folder / name).write_text("x")
    for path in (folder, zipped(folder)):
        source = open_images(path)
        assert [record.image_id for record in source.records] == sorted(images)
        assert all(record.group == record.image_id for record in source.records)
        assert source.path == path


@pytest.mark.parametrize("as_zip", [False, True])
def test_bytes_and_pictures(tmp_path: Path, as_zip: bool) -> None:
    folder = make_images(tmp_path / "in", ["a.png", "x/b.png"])
    source = open_images(str(zipped(folder) if as_zip else folder))
    first, second = source.records
    assert source.read_bytes(second) == (folder / "x/b.png").read_bytes()
    assert source.decode(first).getpixel((0, 0)) == (0, 0, 0)
    assert source.decode(second).getpixel((0, 0)) == (1, 1, 1)
    copy = pickle.loads(pickle.dumps(source))  # noqa: S301
    assert copy.read_bytes(second) == source.read_bytes(second)


def test_zip_is_readable_after_a_fork(tmp_path: Path) -> None:
    source = open_images(zipped(make_images(tmp_path / "in", ["a.png"])))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(source.decode(source.records[0]).size != (8, 8))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert source.decode(source.records[0]).size == (8, 8)


def test_links_are_followed_once(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", ["x/a.png"])
    make_images(tmp_path / "other", ["b.png"])
    (folder / "y").symlink_to(tmp_path / "other")
    (folder / "x" / "loop").symlink_to(folder)
    (folder / "broken.png").symlink_to(tmp_path / "nowhere")
    source = open_images(folder)
    assert [record.image_id for record in source.records] == ["broken.png", "x/a.png", "y/b.png"]
    with pytest.raises(ImageError, match="cannot be read"):
        source.decode(source.records[0])


def test_unusable_images_say_which_and_why(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", ["a.png"])
    (folder / "b.png").write_bytes(b"")
    source = open_images(folder)
    with pytest.raises(ImageError) as caught:
        source.decode(source.records[1])
    assert (caught.value.image_id, caught.value.reason) == ("b.png", "the file is empty (0 bytes)")
    assert str(caught.value) == "b.png: the file is empty (0 bytes)"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301
    with pytest.raises(ImageError, match=r"a\.png: too small: short side 8 px"):
        source.decode(source.records[0], min_side=16)


def error_of(path: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        open_images(path)
    return str(caught.value)


def test_missing_paths_suggest_a_near_one(tmp_path: Path) -> None:
    make_images(tmp_path / "imagenet" / "val", ["a.png"])
    assert f"Did you mean {tmp_path / 'imagenet'}?" in error_of(tmp_path / "imagnet")
    assert f"Did you mean {tmp_path / 'imagenet' / 'val'}?" in error_of(tmp_path / "imagnet/val")
    assert f"{tmp_path} has no entry 'xyz' or similar" in error_of(tmp_path / "xyz")


def test_paths_that_hold_no_images(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "found nothing at all" in error_of(tmp_path / "empty")
    (tmp_path / "empty" / "x.npy").write_bytes(b"x")
    (tmp_path / "empty" / "README").write_bytes(b"x")
    assert "found 1 × no ending, 1 × .npy" in error_of(tmp_path / "empty")
    (tmp_path / "x.tar").write_bytes(b"x")
    assert "Expected a folder or a zip of images, got the file" in error_of(tmp_path / "x.tar")
    (tmp_path / "x.zip").write_bytes(b"PK")
    message = error_of(tmp_path / "x.zip")
    assert "expected a readable zip of images; got what cannot be read (BadZipFile" in message
    assert "Make or copy it again." in message


@pytest.mark.parametrize("name", ["/a.png", "../a.png", "x/../a.png", "C:/a.png", "x\\a.png"])
def test_unsafe_zips_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("good.png", b"x")
        archive.writestr(name, b"x")
    assert repr(name) in error_of(path)


def test_damaged_and_encrypted_entries(tmp_path: Path) -> None:
    path = zipped(make_images(tmp_path / "in", ["a.png", "b.png"]))
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT")] ^= 0xFF
    path.write_bytes(content)
    source = open_images(path)
    with pytest.raises(ImageError, match="damaged inside the zip"):
        source.decode(source.records[0])
    assert source.decode(source.records[1]).size == (8, 8)
    first = content.index(b"PK\x01\x02")
    content[first + 8] |= 1
    path.write_bytes(content)
    source = open_images(path)
    with pytest.raises(ImageError, match="encrypted inside the zip; make the zip again without"):
        source.decode(source.records[0])
    assert source.decode(source.records[1]).size == (8, 8)
    content[content.index(b"PK\x01\x02", first + 1) + 8] |= 1
    path.write_bytes(content)
    assert "got one with encrypted content, and no password can be given" in error_of(path)


@pytest.mark.parametrize("as_zip", [False, True])
def test_huge_files_are_not_read(
    tmp_path: Path, as_zip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_images(tmp_path / "in", ["a.png"])
    with (folder / "a.png").open("ab") as file:
        file.write(b"x" * (1 << 20))
    source = open_images(zipped(folder) if as_zip else folder)
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(files, "IMAGE_FILE", replace(files.IMAGE_FILE, max_bytes=1 << 20))
    with pytest.raises(ImageError, match=r"larger than 1 MiB|more than 1(.0)? MiB"):
        source.read_bytes(source.records[0])


def test_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    assert "Permission denied" in error_of(tmp_path)


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


def test_subset_goes_round_the_classes() -> None:
    labels = [record.label for record in spread_subset(RECORDS, None, 0)]
    assert sorted(labels[:4]) == sorted(labels[4:8]) == [0, 1, 2, 3]
    assert sorted(labels[8:11]) == [1, 2, 3]  # class 0 has two images


def test_subset_is_the_same_everywhere_and_differs_by_seed() -> None:
    """Fixed names: a change here changes every run with a limit."""
    chosen = [record.image_id for record in spread_subset(RECORDS, 6, 0)]
    assert chosen == ["2/3.png", "0/1.png", "3/3.png", "1/2.png", "2/1.png", "0/0.png"]
    assert len({spread_subset(RECORDS, None, seed) for seed in range(10)}) == 10


def test_subset_of_unlabelled_images_goes_round_the_groups() -> None:
    records = [ImageRecord(f"{name}/{at}", group=name) for name in "abc" for at in range(3)]
    assert {record.group for record in spread_subset(records, 3, 1)} == {"a", "b", "c"}
    with pytest.raises(UserError, match="at least 1 image, got 0"):
        spread_subset(records, 0, 1)


# preprocessing ----------------------------------------------------------------------------------


def noise(width: int, height: int) -> Image.Image:
    generator = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_picture_of_the_right_size_is_unchanged() -> None:
    tensor = Preprocessing(32)(noise(32, 32))
    assert tensor.shape == (3, 32, 32)
    assert tensor.dtype == torch.float32
    assert torch.equal(
        tensor, torch.from_numpy(np.asarray(noise(32, 32)).copy()).permute(2, 0, 1) / 255
    )


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("sides", [(100, 75), (75, 101), (40, 40), (31, 90), (36, 77), (333, 248)])
@pytest.mark.parametrize(("size", "resize"), [(32, None), (32, 36), (33, 33), (64, 71)])
def test_equals_torchvision(
    sides: tuple[int, int], size: int, resize: int | None, interpolation: str
) -> None:
    preprocessing = Preprocessing(size, resize, interpolation)
    theirs = v2.Compose(
        [
            v2.Resize(preprocessing.short_side, v2.InterpolationMode(interpolation)),
            v2.CenterCrop(size),
            v2.PILToTensor(),
        ]
    )(noise(*sides))
    ours = preprocessing(noise(*sides))
    assert torch.equal(ours, theirs.float() / 255)
    assert torch.equal((ours * 255).round() / 255, ours)


def test_preprocessing_options() -> None:
    assert [Preprocessing(size).short_side for size in (32, 192, 224, 384)] == [35, 213, 248, 425]
    with pytest.raises(UserError, match="size 224 and resize 200"):
        Preprocessing(224, 200)
    with pytest.raises(UserError, match="Did you mean bicubic"):
        Preprocessing(224, interpolation="bicubik")  # type: ignore[arg-type]


# load_images ------------------------------------------------------------------------------------


def test_load_images(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", [f"{name}/{at}.png" for name in "ab" for at in range(3)])
    loaded = list(load_images(folder, size=8))
    assert len(loaded) == 6
    for image, label, image_id in loaded:
        level = "ab".index(image_id[0]) * 3 + int(image_id[2])
        assert label == "ab".index(image_id[0])
        assert torch.equal(image, torch.full((3, 8, 8), level, dtype=torch.float32) / 255)
    limited = load_images(folder, size=8, limit=2, seed=0)
    assert [item.image_id for item in limited] == [item.image_id for item in loaded[:2]]


def test_load_images_with_unreadable_ones(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", ["a.png", "b.png"])
    (folder / "c.png").write_bytes(b"")
    with pytest.raises(ImageError, match=r"c\.png: the file is empty"):
        list(load_images(folder, size=8))
    errors: list[ImageError] = []
    assert len(list(load_images(folder, size=8, on_error=errors.append))) == 2
    assert [error.image_id for error in errors] == ["c.png"]
    with pytest.raises(UserError):  # at the call, not at the first image
        load_images(folder / "none", size=8)


# embedded ---------------------------------------------------------------------------------------


def test_embedded_photographs() -> None:
    source = open_images("embedded")
    assert isinstance(source, EmbeddedSource)
    assert len(source.records) == 20
    assert {record.group for record in source.records} == {
        "astronaut", "camera", "chelsea", "coffee", "motorcycle", "rocket",
    }  # fmt: skip
    assert source.records == tuple(sorted(source.records, key=lambda record: record.image_id))
    pictures = [source.decode(record) for record in source.records]
    assert {picture.size for picture in pictures} == {(224, 224)}
    assert len({source.read_bytes(record) for record in source.records}) == 20
    assert {record.label for record in source.records} == {None}
    assert {record.group for record in spread_subset(source.records, 6, 0)} == {
        record.group for record in source.records
    }


def test_embedded_crops_are_the_photograph() -> None:
    from skimage.data import astronaut

    source = embedded_images()
    record = next(record for record in source.records if record.image_id == "astronaut/0_1")
    assert np.array_equal(np.asarray(source.decode(record)), astronaut()[32:256, 256:480])


def test_embedded_sizes_and_errors() -> None:
    source = embedded_images(48)
    assert source.decode(source.records[3]).size == (48, 48)
    assert len(list(load_images("embedded", size=32, limit=3))) == 3
    with pytest.raises(UserError, match="no labels"):
        open_images("embedded", "labels.csv")
    with pytest.raises(UserError, match="at least 1 pixel"):
        embedded_images(0)


def test_embedded_without_scikit_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(made, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install scikit-image"):
        open_images("embedded")
    monkeypatch.setattr(made, "data_folder", lambda: tmp_path)
    with pytest.raises(UserError, match="Expected the photograph"):
        open_images("embedded")
