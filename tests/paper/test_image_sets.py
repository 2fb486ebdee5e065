"""`mjp sample --cifar10`, `--shapes` and `--corrupt`: the official binary files become zips of
class folders, pictures and label maps are drawn by code, and the 15 corruptions are repeatable,
bounded and stronger by severity."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from skimage.data import astronaut

from mjp_privacy.cli import main
from mjp_privacy.data import open_images
from mjp_privacy.paper import image_sets
from mjp_privacy.paper.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from mjp_privacy.paper.image_sets import (
    CLASSES,
    CORRUPTED,
    FILES,
)
from mjp_privacy.paper.segmentation_training import splits_of
from tests.helpers.image_files import make_images
from tests.helpers.refusals import refused

IN_A_FILE = 30


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_sets, "IN_A_FILE", IN_A_FILE)


def batches() -> dict[str, bytes]:
    """Files of random pictures by name."""
    chance, made = np.random.default_rng(0), {}
    for name in (name for files in FILES.values() for name in files):
        records = chance.integers(0, 256, (IN_A_FILE, 3073), dtype=np.uint8)
        records[:, 0] = chance.permutation(np.arange(IN_A_FILE) % 10)
        made[name] = records.tobytes()
    return made


def archive(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return path


def command(*words: object) -> int:
    return main(["sample", *map(str, words)])


def test_every_picture_has_its_class_and_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = batches() | {"batches.meta.txt": b"airplane\n", "readme.html": b"<p>"}
    packed, out = archive(tmp_path / "c.tar.gz", files), tmp_path / "data"
    assert command("--cifar10", packed, "--out", out) == 0
    for zipped, of in FILES.items():
        source = open_images(out / zipped)
        expected: dict[int, list[np.ndarray]] = {label: [] for label in range(10)}
        for name in of:
            for record in np.frombuffer(files[name], np.uint8).reshape(-1, 3073):
                planes = [record[1 + 1024 * c : 1025 + 1024 * c].reshape(32, 32) for c in range(3)]
                expected[int(record[0])].append(np.stack(planes, axis=-1))
        assert len(source.records) == IN_A_FILE * len(of)
        for record in source.records:
            label, number = record.image_id.split("/")
            assert CLASSES.index(label) == record.label
            pixels = np.array(source.decode(record))
            assert (pixels == expected[record.label][int(number.split(".")[0])]).all()
    own = tmp_path / "three" / "cifar10-test.zip"  # what is there is not replaced
    own.parent.mkdir()
    own.write_bytes(b"mine")
    refused(capsys, own.name, "sample", "--cifar10", packed, "--out", own.parent)
    assert [path.read_bytes() for path in own.parent.iterdir()] == [b"mine"]


def test_what_is_no_such_archive_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = batches()
    one_less = {name: content for name, content in files.items() if name != "test_batch.bin"}
    wrong = [
        ("pickles", {"data_batch_1": b"\x80\x04"}),
        ("test_batch.bin", one_less),
        ("data_batch_2.bin", files | {"data_batch_2.bin": b"\0" * 3073}),
        ("test_batch.bin", files | {"test_batch.bin": b"\0" * 3073 * (IN_A_FILE + 5)}),
        ("class 10", files | {"test_batch.bin": b"\x0a" * 3073 * IN_A_FILE}),
    ]
    cases = [(n, archive(tmp_path / f"{at}.tar.gz", of)) for at, (n, of) in enumerate(wrong)]
    whole, cut, image = (tmp_path / f"{name}.tar.gz" for name in ("whole", "cut", "image"))
    cut.write_bytes(archive(whole, files).read_bytes()[:5000])
    image.write_bytes(b"\x89PNG\r\n")
    with tarfile.open(tmp_path / "link.tar.gz", "w:gz") as packed:
        entry = tarfile.TarInfo("test_batch.bin")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(entry)
    alone = [tmp_path / f"{name}.tar.gz" for name in ("cut", "image", "link", "none")]
    for named, path in [*cases, *((path.name, path) for path in alone)]:
        refused(capsys, named, "sample", "--cifar10", path, "--out", tmp_path / "out")
    words = ("--cifar10", whole, "--corrupt", "--out", tmp_path / "out")
    refused(capsys, "--corrupt", "sample", *words)
    assert not (tmp_path / "out").exists()


# shapes


def test_the_layout_is_ade20ks_and_a_seed_is_a_set(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        assert command("--shapes", 8, "--seed", seed, "--out", tmp_path / name) == 0
    sets = [splits_of(tmp_path / name, 6, "--data") for name in ("one", "same", "other")]
    assert [len(sets[0][split]) for split in ("training", "validation")] == [8, 2]
    digests = [one["training"].digest() for one in sets]
    assert digests[0] == digests[1] != digests[2]
    picture, labels = sets[0]["validation"].read(1)
    assert picture.size == labels.shape[::-1]


OF_PICTURES = (["--corrupt"], ["--size", 64], ["--per-class", 2], ["--limit", 3], ["--labels", "x"])


def test_options_that_do_not_fit_and_a_folder_with_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine" / "file.png"
    mine.parent.mkdir()
    mine.touch()
    for words, out, said in (
        (["--shapes", 0], "out", "got 0"),
        (["--shapes", 4, "--from", "x"], "out", "--shapes"),
        *((["--shapes", 4, *word], "out", word[0]) for word in OF_PICTURES),
        (["--cifar10", "x", "--seed", 1], "out", "--seed"),
        (["--from", "x", "--size", 64], "out", "--size"),
        (["--per-class", 0], "out", "per_class"),
        ([], "out", "--from"),
        (["--shapes", 4], "mine", "mine"),
        (["--shapes", 4], "mine/file.png", "file.png"),
    ):
        refused(capsys, said, "sample", *words, "--out", tmp_path / out)
    assert list(tmp_path.rglob("*")) == [mine.parent, mine]


# corrupted photographs ----------------------------------------------------------------------------


Pixels = NDArray[np.uint8]

STEPS = {
    "glass_blur": ((1, 2, 3), (4, 5)),  # 3 has three rounds, 4 two longer ones
    "snow": ((1, 2), (3, 4, 5)),  # from 3 on there are fewer and brighter flakes
    "frost": ((1, 2), (4, 5)),  # the picture fades while the frost stays
    "fog": ((1, 3, 5),),  # 2 and 4 are as thick as their neighbours, but rougher
    "elastic_transform": ((1, 2), (3, 5)),  # 1 and 2 move all of it, 3 to 5 bend it finely
}
"""Runs of severities along which the official constants grow; all five for the others."""


def photograph(side: int) -> Pixels:
    return np.asarray(Image.fromarray(astronaut()).resize((side, side)))


def under(pixels: Pixels, name: str, severity: int, seed: int = 0) -> Pixels:
    return corrupted(pixels, name, severity, np.random.default_rng([seed, severity]))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_seed_gives_its_bytes_at_any_size_and_a_severity_its_distortion(name: str) -> None:
    for pixels in (photograph(32), photograph(224), photograph(48)[:, :33]):
        before = pixels.copy()
        one, two = (under(pixels, name, 5) for _ in range(2))
        assert (one.dtype, one.shape) == (np.uint8, pixels.shape)
        assert np.array_equal(one, two)
        assert np.array_equal(pixels, before)
        assert not np.array_equal(one, pixels)
    for grey in (0, 255):
        assert under(np.full((32, 32, 3), grey, np.uint8), name, 5).shape == (32, 32, 3)
    pixels = photograph(64)
    for steps in STEPS.get(name, (SEVERITIES,)):
        draws = [[under(pixels, name, at, seed) for seed in range(8)] for at in steps]
        changes = np.abs(np.array(draws, float) - pixels).mean((1, 2, 3, 4)).tolist()
        assert changes == sorted(changes), changes
        assert changes[0] < changes[-1]


def test_noise_contrast_brightness_jpeg_and_pixels_by_hand() -> None:
    grey = np.full((256, 256, 3), 128, np.uint8)
    change = under(grey, "gaussian_noise", 1).astype(float) - 128
    assert change.std() / 255 == pytest.approx(0.08, rel=0.02)
    shot = under(grey, "shot_noise", 1) / 255
    assert shot.std() == pytest.approx((128 / 255 / 60) ** 0.5, rel=0.02)
    struck = under(grey, "impulse_noise", 5) != 128
    assert struck.mean() == pytest.approx(0.27, rel=0.03)
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"):  # they keep the light
        assert np.abs(under(grey, name, 5).astype(int) - 128).max() <= 1, name
    pixels = photograph(32)
    for name in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate"):  # no chance
        assert np.array_equal(under(pixels, name, 2, 0), under(pixels, name, 2, 1)), name
    means = (pixels / 255).mean((0, 1))
    by_hand = np.floor((means + 0.3 * (pixels / 255 - means)) * 255 + 1e-9).astype(int)
    assert np.abs(under(pixels, "contrast", 2).astype(int) - by_hand).max() <= 1
    dark = np.full((32, 32, 3), (100, 50, 0), np.uint8)
    bright = under(dark, "brightness", 3)[0, 0]
    assert bright.tolist() == [176, 88, 0]  # the largest grows by .3 · 255, the ratios stay
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=7)
    assert np.array_equal(under(pixels, "jpeg_compression", 5), np.asarray(Image.open(stream)))
    blocks = pixels.reshape(16, 2, 16, 2, 3).astype(float).mean((1, 3))  # severity 2 halves it
    large = np.kron(blocks, np.ones((2, 2, 1)))
    assert np.abs(under(pixels, "pixelate", 2) - large).max() <= 1


def corrupt(source: Path, out: Path, *options: str) -> int:
    words = ["sample", "--from", str(source), "--out", str(out), "--corrupt", "--size", "32"]
    return main([*words, *options])


def test_the_folder_is_laid_out_as_imagenet_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same images under other folders, with a label file, get the same noise."""
    names = ["n01440764/a.png", "n01440764/b.png", "n01443537/a.png", "n01443537/a.webp"]
    folder = make_images(tmp_path / "in", names, size=(40, 36))
    out, more = tmp_path / "out", ("--per-class", "2")
    assert corrupt(folder, out, *more) == 0
    assert {path.name for path in out.iterdir() if path.is_dir()} == set(CORRUPTIONS)
    cell = open_images(out / "fog" / "5")
    assert {record.image_id: record.label for record in cell.records} == {
        "n01440764/a.JPEG": 0,
        "n01440764/b.JPEG": 0,
        "n01443537/a.JPEG": 1,
        "n01443537/n01443537__a.webp.JPEG": 1,
    }
    assert cell.decode(cell.records[0]).size == (32, 32)
    about = json.loads((out / CORRUPTED).read_text())
    assert (about["size"], about["seed"], about["images"]) == (32, 0, 4)
    before = (out / "snow" / "2" / "n01440764" / "a.JPEG").read_bytes()
    words = ("sample", "--from", folder, "--corrupt", "--out")
    refused(capsys, str(out), *words, out)
    refused(capsys, "31", *words, tmp_path / "new", "--size", 31)
    moved = tmp_path / "moved" / "pictures" / "764" / "a.png"
    moved.parent.mkdir(parents=True)
    moved.write_bytes((folder / "n01440764/a.png").read_bytes())
    (tmp_path / "moved" / "labels.csv").write_text("file,label\npictures/764/a.png,0\n")
    assert corrupt(tmp_path / "moved", tmp_path / "two") == 0
    assert (tmp_path / "two" / "snow" / "2" / "0" / "a.JPEG").read_bytes() == before
