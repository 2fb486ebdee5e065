"""`mjp sample`: which images are chosen, that a sample is whole or not there, and mistakes."""

import hashlib
from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.cli import main
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


def test_a_sample_is_a_copy_with_its_tables(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert run(folder, out, "--per-class", "2") == 0
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
    records = [(record.label, record.label_source) for record in open_images(out).records]
    assert records == [(label, "csv") for label in manifest["label"]]
    assert run(folder, tmp_path / "two", "--per-class", "2", "--limit", "2") == 0
    assert len({record.label for record in open_images(tmp_path / "two").records}) == 2


def test_the_choice_depends_on_the_seed_alone(folder: Path, tmp_path: Path) -> None:
    """Not on a zip, or on how ImageNet's files are laid out."""

    def chosen(source: Path, out: str, seed: int) -> dict[str, bytes]:
        assert run(source, tmp_path / out, "--seed", str(seed)) == 0
        return files_in(tmp_path / out)

    first = chosen(folder, "a", 0)
    assert chosen(zipped(folder), "b", 0) == first
    assert {tuple(chosen(folder, f"s{seed}", seed)) for seed in range(1, 6)} != {tuple(first)}
    flat = make_images(tmp_path / "flat", FLAT_VAL)
    synsets = ["n01440764", "n01443537", "n01440764", "n01443537"]
    rows = "".join(f"{name},{at % 2}\n" for at, name in enumerate(FLAT_VAL))
    (flat / "labels.csv").write_text(f"file,label\n{rows}")
    names = [f"{synset}/{name}" for synset, name in zip(synsets, FLAT_VAL, strict=True)]
    images = chosen(flat, "d", 0).keys(), chosen(make_images(tmp_path / "e", names), "f", 0).keys()
    assert images[0] == {name.rpartition("/")[2] for name in images[1]}


def test_unreadable_images_give_way_to_the_next(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whole").mkdir()  # an empty one is as good as none
    assert run(folder, tmp_path / "whole") == 0
    broken = pd.read_csv(tmp_path / "whole" / "labels.csv")["file"][0]
    (folder / broken).write_bytes(b"")
    for name in NAMES[8:]:  # all dogs
        (folder / name).write_bytes(b"x")
    capsys.readouterr()
    assert run(folder, tmp_path / "out") == 3
    printed = capsys.readouterr().out
    assert broken in printed
    assert "2 (0)" in printed  # a class without an image
    skipped = pd.read_csv(tmp_path / "out" / "skipped.csv")
    assert "0 bytes" in skipped["reason"][0]
    assert skipped["label"].tolist() == [0, 2, 2, 2, 2]
    assert len(pd.read_csv(tmp_path / "out" / "labels.csv")) == 2


def test_errors_of_the_user(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    flat = make_images(tmp_path / "flat", ["a.png"])
    bad = make_images(tmp_path / "bad", ["x/a.png", "y/b.png"])
    for path in bad.rglob("*.png"):
        path.write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    for source, out, options, expected in [
        (flat, "out", [], "--labels"),
        (folder, "out", ["--per-class", "0"], "got 0"),
        (bad, "out", [], "x/a.png"),
        (folder, "flat/a.png", [], "flat/a.png"),
        (folder, "bad", [], "bad"),  # which is not empty
        (folder, "in/out", [], "--from"),
        (folder, "s3://bucket/sample", ["--corrupt"], "s3:/bucket/sample"),
    ]:
        assert run(source, Path(out), *options) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ")
        assert expected in error
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_left_after_a_copy_that_failed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk; one that takes `A.png` and `a.png` for one name; images that change."""
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "dog" in path.parts:
            raise OSError(28, "No space left on device", str(path))
        return write(path, content)

    contents = (bytes([number]) for number in range(100))
    for code, owner, name, faulty in (
        (74, Path, "write_bytes", full),
        (2, Path, "write_bytes", lambda path, content: write(path, content[:-1])),
        (2, ImageSource, "read_bytes", lambda source, record: next(contents)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, faulty)
            assert run(folder, tmp_path / "out") == code
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
