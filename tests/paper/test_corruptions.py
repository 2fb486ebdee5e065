"""The 15 corruptions: repeatable, bounded, stronger by severity; and the folder of `--corrupt`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from skimage.data import astronaut

from mjp_privacy.cli import main
from mjp_privacy.data import open_images
from mjp_privacy.paper.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from mjp_privacy.paper.image_sets import CORRUPTED
from tests.helpers.image_files import make_images
from tests.helpers.refusals import refused

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


def test_the_folder_is_laid_out_as_imagenet_c_and_a_stopped_one_is_finished(
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
        "n01443537/n01443537__a.png.JPEG": 1,
        "n01443537/n01443537__a.webp.JPEG": 1,
    }
    assert cell.decode(cell.records[0]).size == (32, 32)
    about = json.loads((out / CORRUPTED).read_text())
    assert (about["size"], about["seed"], about["images"]) == (32, 0, 4)
    one = out / "snow" / "2" / "n01440764" / "a.JPEG"
    before = one.read_bytes()
    one.unlink()
    assert corrupt(folder, out, *more) == 0
    assert one.read_bytes() == before
    words = ("sample", "--from", folder, "--out", out, "--corrupt", "--size")
    for options, named in (((32, *more, "--seed", "1"), str(out)), ((31,), "31")):
        refused(capsys, named, *words, *options)
    moved = tmp_path / "moved" / "pictures" / "764" / "a.png"
    moved.parent.mkdir(parents=True)
    moved.write_bytes((folder / "n01440764/a.png").read_bytes())
    (tmp_path / "moved" / "labels.csv").write_text("file,label\npictures/764/a.png,0\n")
    assert corrupt(tmp_path / "moved", tmp_path / "two") == 0
    assert (tmp_path / "two" / "snow" / "2" / "0" / "a.JPEG").read_bytes() == before
