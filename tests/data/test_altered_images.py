"""Files that are turned upright or have further frames are said once, with their number."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mjp_privacy.cli import main
from mjp_privacy.data import open_images
from mjp_privacy.experiment.run import run_experiment
from tests.helpers.runs import one_cell

SIDE = 40


def picture(seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE + 8, 3), np.uint8)
    return Image.fromarray(values)


def turned(path: Path, orientation: int = 6) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(len(path.name)).save(path, exif=exif)


def animated(path: Path) -> None:
    picture(1).save(path, save_all=True, append_images=[picture(2), picture(3)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven files, of which two are turned and three have several frames."""
    root = tmp_path / "images"
    root.mkdir()
    for name in ("plain.jpg", "plain.png", "plain.gif"):
        picture(0).save(root / name)
    turned(root / "turned.jpg")
    turned(root / "mirrored.webp", 2)
    for name in ("frames.gif", "frames.webp", "frames.png"):
        animated(root / name)
    turned(root / "upright.jpg", 1)
    return root


def test_decoding_and_headers_note_the_same(folder: Path) -> None:
    decoded, opened = open_images(folder), open_images(folder)
    for record in decoded.records:
        decoded.decode(record)
        opened.check_header(record)
    for source in (decoded, opened):
        assert source.altered.turned == {"turned.jpg", "mirrored.webp"}
        assert source.altered.animated == {"frames.gif", "frames.webp", "frames.png"}
    assert decoded.altered.remark == opened.altered.remark
    assert "\n" not in decoded.altered.remark


def test_pixels_are_those_of_the_first_frame_set_upright(folder: Path) -> None:
    source = open_images(folder)
    by_name = {record.image_id: source.decode(record) for record in source.records}
    assert by_name["frames.png"].tobytes() == picture(1).tobytes()
    assert by_name["turned.jpg"].size == (SIDE, SIDE + 8)


def test_a_run_says_it_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for limit in (None, 9):
        out = folder.parent / f"run{limit}"
        run_experiment(
            one_cell(attacks=[{"name": "grey"}]), images=folder, out=out, device="cpu", limit=limit
        )
        (line,) = [s for s in capsys.readouterr().err.splitlines() if "frames.gif" in s]
        assert "2 " in line
        assert "3 " in line
        assert "turned.jpg" in line


def test_plain_images_are_no_remark(folder: Path) -> None:
    source = open_images(folder)
    for record in source.records:
        if record.image_id.startswith(("plain", "upright")):
            source.decode(record)
    assert source.altered.remark == ""


def test_score_and_sample_say_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "scores.csv"
    words = ["--reference", str(folder), "--reconstruction", str(folder), "--out", str(out)]
    assert main(["score", *words, "--metrics", "psnr"]) == 0
    (line,) = [s for s in capsys.readouterr().out.splitlines() if "frames" in s]
    assert "turned.jpg" in line
    for name in ("class_0", "class_1"):
        shutil.copytree(folder, folder.parent / "classes" / name)
    words = ["--from", str(folder.parent / "classes"), "--out", str(folder.parent / "sample")]
    assert main(["sample", *words, "--per-class", "9"]) == 0
    (line,) = [s for s in capsys.readouterr().out.splitlines() if "frames" in s]
    assert "turned.jpg" in line
