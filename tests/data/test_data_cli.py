"""The sample command: mjp sample."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.cli import main
from mjp_privacy.core import progress
from mjp_privacy.data import ImageSource, open_images
from tests.helpers.image_files import FLAT_VAL, make_images, zipped

NAMES = [f"{name}/{at}.png" for name in ("cat", "cow", "dog") for at in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_images(tmp_path / "in", NAMES)


def run(source: Path, out: Path, *options: str) -> int:
    return main(["sample", "--from", str(source), "--out", str(out), *options])


def files_in(out: Path) -> dict[str, bytes]:
    paths = [path for path in out.rglob("*") if path.is_file()]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def test_sample(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL", 0.0)
    out = tmp_path / "deep" / "out"
    assert run(folder, out, "--per-class", "2") == 0
    printed = capsys.readouterr()
    assert "12 images in" in printed.out
    assert f"Wrote 6 images to {out}." in printed.out
    assert re.fullmatch(
        r"choosing: 3/3 · [\d.]+ classes/s · 0 min 00 s left", printed.err.splitlines()[-1]
    )
    manifest = pd.read_csv(out / "manifest.csv")
    assert manifest["label"].tolist() == [0, 0, 1, 1, 2, 2]
    for file, sha256 in zip(manifest["file"], manifest["sha256"], strict=True):
        content = (out / file).read_bytes()
        assert content == (folder / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256
    assert pd.read_csv(out / "labels.csv").equals(manifest[["file", "label"]])
    assert (out / "skipped.csv").read_text() == "file,label,reason\n"
    assert len(files_in(out)) == 9
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    records = open_images(out).records
    assert [(record.label, record.label_source) for record in records] == [
        (label, "csv") for label in manifest["label"]
    ]


@pytest.mark.parametrize("more", [(), ("--corrupt",)])
def test_a_sample_is_written_to_no_address(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(folder, Path("s3://bucket/sample"), *more) == 2
    assert "--out s3:/bucket/sample" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_same_sample_twice_is_complete(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert run(folder, out) == 0
    before = files_in(out)
    assert run(folder, out) == 0
    assert "already holds this sample, complete: 3 images" in capsys.readouterr().out
    assert files_in(out) == before


@pytest.mark.parametrize("change", ["other seed", "changed", "missing", "extra", "foreign"])
def test_another_folder_is_left_alone(
    folder: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(folder, out) == 0
    image = out / pd.read_csv(out / "labels.csv")["file"][0]
    if change == "changed":
        image.write_bytes(b"x")
    elif change == "missing":
        image.unlink()
    elif change == "extra":
        make_images(out, ["cat/more.png"])
    elif change == "foreign":
        (out / "manifest.csv").unlink()
    before = files_in(out)
    assert run(folder, out, "--seed", "3" if change == "other seed" else "0") == 2
    assert "not empty and holds something other" in capsys.readouterr().err
    assert files_in(out) == before


def test_choice_depends_on_the_seed_alone(folder: Path, tmp_path: Path) -> None:
    def chosen(source: Path, out: str, seed: int) -> dict[str, bytes]:
        assert run(source, tmp_path / out, "--seed", str(seed)) == 0
        return files_in(tmp_path / out)

    again = tmp_path / "again"
    for name in reversed(NAMES):
        (again / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, again / name)
    first = chosen(folder, "a", 0)
    assert chosen(again, "b", 0) == chosen(zipped(folder), "c", 0) == first
    assert {tuple(chosen(folder, f"s{seed}", seed)) for seed in range(1, 6)} != {tuple(first)}


def test_every_layout_of_imagenet_gives_the_same_images(tmp_path: Path) -> None:
    flat = make_images(tmp_path / "flat", FLAT_VAL)
    synsets = ["n01440764", "n01443537", "n01440764", "n01443537"]
    (flat / "synset_labels.txt").write_text("\n".join(synsets))
    sorted_names = [f"{synset}/{name}" for synset, name in zip(synsets, FLAT_VAL, strict=True)]
    assert run(flat, tmp_path / "a") == 0
    assert run(make_images(tmp_path / "sorted", sorted_names), tmp_path / "b") == 0
    first, second = (pd.read_csv(tmp_path / out / "labels.csv") for out in "ab")
    names = [Path(file).name for file in second["file"]]
    assert dict(zip(first["file"], first["label"], strict=True)) == dict(
        zip(names, second["label"], strict=True)
    )


def test_unreadable_images_give_way_to_the_next(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path / "whole") == 0
    broken = pd.read_csv(tmp_path / "whole" / "labels.csv")["file"][0]
    (folder / broken).write_bytes(b"")
    for name in NAMES:
        if name.startswith("dog"):
            (folder / name).write_bytes(b"x")
    capsys.readouterr()
    assert run(folder, tmp_path / "out") == 3
    printed = capsys.readouterr().out
    assert "Wrote 2 images" in printed
    assert f"Skipped 5 unreadable images, listed in skipped.csv; the first is {broken}: " in printed
    assert "Fewer than 1 readable images in 1 classes; class (images found): 2 (0)." in printed
    skipped = pd.read_csv(tmp_path / "out" / "skipped.csv")
    assert skipped["reason"][0] == "the file is empty (0 bytes)"
    assert skipped["label"].tolist() == [0, 2, 2, 2, 2]
    assert len(pd.read_csv(tmp_path / "out" / "labels.csv")) == 2


def test_classes_with_too_few(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(folder, ["cat/more.png"])
    assert run(folder, tmp_path / "out", "--per-class", "5") == 0
    assert "Fewer than 5 readable images in 2 classes; class (images found): 1 (4), 2 (4)." in (
        capsys.readouterr().out
    )


def test_labels_given(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "flat", ["a.png", "b.png", "c.png"])
    table = tmp_path / "l.csv"
    table.write_text("file,label\na.png,7\nb.png,7\nc.png,9\n")
    assert run(folder, tmp_path / "out", "--labels", str(table)) == 0
    assert pd.read_csv(tmp_path / "out" / "labels.csv")["label"].tolist() == [7, 9]


def test_errors_of_the_user(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = make_images(tmp_path / "flat", ["a.png"])
    bad = make_images(tmp_path / "bad", ["x/a.png", "y/b.png"])
    for path in bad.rglob("*.png"):
        path.write_bytes(b"")
    for source, out, options, expected in [
        (flat, "out", [], "has no classes: The images carry no labels. Give --labels"),
        (Path("embedded"), "out", [], "The embedded images carry no labels."),
        (folder, "out", ["--per-class", "0"], "at least 1, got 0"),
        (bad, "out", [], "None of the 2 images"),
        (folder, "flat/a.png", [], "got the file"),
        (folder, "in/out", [], "lies inside --from"),
        (tmp_path / "inn", "out", [], "Did you mean"),
        (folder, "flat/a.png/out", [], "expected a folder, or a place where one can be made"),
    ]:
        assert run(source, tmp_path / out, *options) == 2
        printed = capsys.readouterr().err
        assert printed.splitlines()[-1].startswith("error: ")
        assert expected in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "flat", "in"]


def test_nothing_is_left_after_a_failed_copy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "dog" in path.parts:
            raise OSError(28, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert run(folder, tmp_path / "out") == 74
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_copy_that_is_not_the_image_is_no_sample(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a disk that takes `A.png` and `a.png` for one name."""
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: write(path, content[:-1]))
    assert run(folder, tmp_path / "out") == 2
    assert "is not the image: the disk of the sample changed it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_images_that_change_meanwhile(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contents = (bytes([number]) for number in range(100))
    monkeypatch.setattr(ImageSource, "read_bytes", lambda source, record: next(contents))
    monkeypatch.setattr(ImageSource, "decode", lambda source, record: None)
    assert run(folder, tmp_path / "out") == 2
    assert "changed while it was copied" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_progress_bar_on_a_terminal(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert run(folder, tmp_path / "out") == 0
    assert "3/3" in capsys.readouterr().err


@pytest.mark.nightly
def test_as_a_command(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mjp_privacy", "sample"]
    options = ["--from", str(folder) + "x", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command + options, capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: No folder or zip of images at ")
    assert "Traceback" not in done.stderr
