"""`mjp sample --cifar10`: the official binary files become zips of class folders."""

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mjp_privacy.cli import main
from mjp_privacy.data import open_images
from mjp_privacy.paper import cifar10
from mjp_privacy.paper.cifar10 import CLASSES, FILES

IN_A_FILE = 30
NAMES = [name for files in FILES.values() for name in files]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "IN_A_FILE", IN_A_FILE)


def batches(seed: int = 0) -> dict[str, bytes]:
    """Files of random pictures by name."""
    chance = np.random.default_rng(seed)
    made = {}
    for name in NAMES:
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
    packed = archive(tmp_path / "cifar-10-binary.tar.gz", files)
    out = tmp_path / "data"
    assert command("--cifar10", packed, "--out", out) == 0
    assert "Wrote 150 training pictures" in capsys.readouterr().out
    for zipped, of in FILES.items():
        source = open_images(out / zipped)
        expected = {label: [] for label in range(10)}  # type: ignore[var-annotated]
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


def test_a_folder_gives_the_same_bytes_as_the_archive(tmp_path: Path) -> None:
    (tmp_path / "unpacked").mkdir()
    for name, content in batches().items():
        (tmp_path / "unpacked" / name).write_bytes(content)
    packed = archive(tmp_path / "c.tar.gz", batches())
    assert command("--cifar10", packed, "--out", tmp_path / "one") == 0
    assert command("--cifar10", tmp_path / "unpacked", "--out", tmp_path / "two") == 0
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_what_is_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = archive(tmp_path / "c.tar.gz", batches())
    with zipfile.ZipFile(tmp_path / "cifar10-test.zip", "w") as own:
        own.writestr("a/1.png", b"mine")
    before = (tmp_path / "cifar10-test.zip").read_bytes()
    assert command("--cifar10", packed, "--out", tmp_path) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "cifar10-test.zip").read_bytes() == before
    assert not (tmp_path / "cifar10-train.zip").exists()


def _without(name: str) -> dict[str, bytes]:
    return {key: content for key, content in batches().items() if key != name}


WRONG = {
    "python version": ({"data_batch_1": b"\x80\x04"}, "the python version, whose pickles could"),
    "a file less": (_without("test_batch.bin"), "an archive without test_batch.bin"),
    "cut": (batches() | {"data_batch_2.bin": b"\0" * 3073}, "data_batch_2.bin: expected"),
    "longer": (batches() | {"test_batch.bin": b"\0" * 3073 * (IN_A_FILE + 5)}, "bytes or more"),
    "class 10": (batches() | {"test_batch.bin": b"\x0a" * 3073 * IN_A_FILE}, "of class 10"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_archive_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, said = WRONG[name]
    packed = archive(tmp_path / "c.tar.gz", files)
    assert command("--cifar10", packed, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert said in error
    assert "cifar-10-binary.tar.gz" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["no file", "no archive", "a link in it", "cut off"])
def test_what_is_no_archive_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.tar.gz"
    if kind == "no archive":
        Image.new("RGB", (4, 4)).save(path, "PNG")
    elif kind == "cut off":
        path.write_bytes(archive(path, batches()).read_bytes()[:5000])
    elif kind == "a link in it":
        with tarfile.open(path, "w:gz") as packed:
            entry = tarfile.TarInfo("test_batch.bin")
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            packed.addfile(entry)
    assert command("--cifar10", path, "--out", tmp_path / "out") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_sources_are_refused_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--cifar10", "c.tar.gz", "--corrupt", "--out", tmp_path / "out") == 2
    assert "--cifar10" in capsys.readouterr().err
