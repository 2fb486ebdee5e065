"""`mjp sample --cifar10` and `--shapes`: the official binary files become zips of class folders;
pictures and label maps are drawn by code."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mjp_privacy.cli import main
from mjp_privacy.data import open_images
from mjp_privacy.paper import image_sets
from mjp_privacy.paper.image_sets import (
    CLASSES,
    FILES,
    GROUND,
    HIGH_DISC,
    LOW_DISC,
    SHAPES,
    SKY,
    drawn,
)
from mjp_privacy.paper.segmentation_data import splits_of
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
    """From the archive, and to the same bytes from its unpacked files."""
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
    (tmp_path / "unpacked").mkdir()
    for name, content in batches().items():
        (tmp_path / "unpacked" / name).write_bytes(content)
    assert command("--cifar10", tmp_path / "unpacked", "--out", tmp_path / "two") == 0
    for name in FILES:
        assert (out / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    own = tmp_path / "three" / "cifar10-test.zip"  # what is there is not replaced
    own.parent.mkdir()
    own.write_bytes(b"mine")
    refused(capsys, own.name, "sample", "--cifar10", packed, "--out", own.parent)
    assert [path.read_bytes() for path in own.parent.iterdir()] == [b"mine"]


def without(name: str) -> dict[str, bytes]:
    return {other: content for other, content in batches().items() if other != name}


WRONG = {
    "python version": ({"data_batch_1": b"\x80\x04"}, "pickles"),
    "a file less": (without("test_batch.bin"), "test_batch.bin"),
    "cut": (batches() | {"data_batch_2.bin": b"\0" * 3073}, "data_batch_2.bin"),
    "longer": (batches() | {"test_batch.bin": b"\0" * 3073 * (IN_A_FILE + 5)}, "test_batch.bin"),
    "class 10": (batches() | {"test_batch.bin": b"\x0a" * 3073 * IN_A_FILE}, "class 10"),
}
NO_ARCHIVE = ("no file", "no archive", "a link in it", "cut off")


@pytest.mark.parametrize("kind", [*WRONG, *NO_ARCHIVE, "another source beside it"])
def test_what_is_no_such_archive_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, more = tmp_path / "c.tar.gz", ["--corrupt"] if kind.startswith("another") else []
    files, said = WRONG.get(kind, (batches(), "--cifar10" if more else "c.tar.gz"))
    if kind == "no archive":
        path.write_bytes(b"\x89PNG\r\n")
    elif kind == "a link in it":
        with tarfile.open(path, "w:gz") as packed:
            entry = tarfile.TarInfo("test_batch.bin")
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            packed.addfile(entry)
    elif kind != "no file":
        content = archive(path, files).read_bytes()
        path.write_bytes(content[:5000] if kind == "cut off" else content)
    refused(capsys, said, "sample", "--cifar10", path, *more, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# shapes


def test_the_layout_is_ade20ks_and_a_seed_is_a_set(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("same", 3), ("other", 4), ("one", 3)):
        assert command("--shapes", 8, "--seed", seed, "--out", tmp_path / name) == 0
    sets = [splits_of(tmp_path / name, 6, "--data") for name in ("one", "same", "other")]
    assert [len(sets[0][split]) for split in ("training", "validation")] == [8, 2]
    digests = [one["training"].digest() for one in sets]
    assert digests[0] == digests[1] != digests[2]
    picture, labels = sets[0]["validation"].read(1)
    assert picture.size == labels.shape[::-1]


def test_every_class_occurs_and_discs_differ_only_by_where_they_are() -> None:
    """Outlines have no label; a disc's class is that of the ground below its centre."""
    sets = [drawn(seed) for seed in range(150)]
    for _, one in sets:
        assert (one[0] != GROUND).all()
        assert (one[-1] != SKY).all()
    shares = np.mean([np.bincount(one.ravel(), minlength=7) / one.size for _, one in sets], 0)
    assert len(shares) == len(SHAPES) + 1
    assert 0.02 < shares[0] < 0.2
    assert shares[1:].min() > 0.01
    high, low = (
        np.array([pixels[one == kind].mean() for pixels, one in sets if (one == kind).sum() > 60])
        for kind in (HIGH_DISC, LOW_DISC)
    )
    assert min(len(high), len(low)) > 30
    assert abs(high.mean() - low.mean()) < 3 * np.hypot(high.std(), low.std()) / 5


def test_options_that_do_not_fit_and_a_folder_with_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine" / "file.png"
    mine.parent.mkdir()
    mine.touch()
    for words, out, said in (
        (["--shapes", 0], "out", "got 0"),
        (["--shapes", 4, "--from", "x"], "out", "--shapes"),
        (["--shapes", 4, "--corrupt"], "out", "--corrupt"),
        ([], "out", "--from"),
        (["--shapes", 4], "mine", "mine"),
        (["--shapes", 4], "mine/file.png", "file.png"),
    ):
        refused(capsys, said, "sample", *words, "--out", tmp_path / out)
    assert list(tmp_path.rglob("*")) == [mine.parent, mine]
