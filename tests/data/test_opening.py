"""Folders and zips, of friends and of strangers: what one file holds or is harms no other."""

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mjp_privacy.data import ImageError, files, open_images
from mjp_privacy.data.files import is_usable
from tests.helpers.image_files import error_of, make_images, zipped


def read_all(path: Path) -> dict[str, str]:
    """What became of every image: its size, or the reason why it has none."""
    source, outcome = open_images(path), {}
    for record in source.records:
        try:
            outcome[record.image_id] = str(source.decode(record).size)
        except ImageError as error:
            outcome[error.image_id] = error.reason
    return outcome


@pytest.mark.parametrize("as_zip", [False, True])
def test_records_bytes_and_pictures_also_elsewhere(tmp_path: Path, as_zip: bool) -> None:
    """After pickling, and after a fork, in which a zip's handle is opened again."""
    images = ["b.PNG", "a.jpeg", "deep/er/c.webp", "Z.tif", "x.png/d.png"]
    folder = make_images(tmp_path / "in", [*images, ".hidden.png", "__MACOSX/x.png", ".git/y.png"])
    (folder / "notes.txt").write_text("x")
    path = zipped(folder) if as_zip else folder
    source = open_images(str(path))
    assert [record.image_id for record in source.records] == sorted(images)
    assert all(record.group == record.image_id for record in source.records)
    assert source.path == path
    copy, last = pickle.loads(pickle.dumps(source)), source.records[-1]  # noqa: S301
    for other in (source, copy):
        assert other.read_bytes(last) == (folder / "x.png/d.png").read_bytes()
        assert other.decode(last).getpixel((0, 0)) == (4,) * 3
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(source.decode(last).size != (8, 8))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_links_are_followed_once(tmp_path: Path) -> None:
    """Forty folders, each with two links to the next: a trillion paths."""
    for number in range(40):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "many" / str(number) / name).symlink_to(f"../../many/{number + 1}")
    make_images(tmp_path / "many" / "40", ["c.png"])
    (tmp_path / "many" / "40" / "loop").symlink_to(tmp_path / "many" / "0")
    assert set(read_all(tmp_path / "many" / "0")) == {"a/" * 40 + "c.png"}


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "empty folder": (lambda path: path.mkdir(), "a folder"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "cannot be read"),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "text": (lambda path: path.write_text("<svg>"), "not an image"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_one_images_reason(kind: str, tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", ["a.png"])
    make, expected = ODD[kind]
    make(folder / "b.png")
    outcome = read_all(folder)
    assert outcome["a.png"] == "(8, 8)"
    assert expected in outcome["b.png"]


def test_paths_that_hold_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty/x.npy", "empty/README", "x.tar", "x.zip", "imagenet/val/README"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"PK")
    for path, named in (
        (tmp_path / "empty", "1 × no ending, 1 × .npy"),
        (tmp_path / "x.tar", "x.tar"),
        (tmp_path / "x.zip", "x.zip"),
        (tmp_path / "xyz", "xyz"),
        *((nonsense, "zip of images") for nonsense in ("", "  ", "x" * 300, "a\0b")),
    ):
        assert named in error_of(path)

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    assert "Permission denied" in error_of(tmp_path)


# zips ---------------------------------------------------------------------------------------------


def test_zips_with_unsafe_names_or_that_lie_about_themselves(tmp_path: Path) -> None:
    """The entries of a bomb of one kernel share its bytes, so their sizes exceed the file's."""
    for name in ("/a.png", "../a.png", "x/../a.png", "C:/a.png", "x\\a.png"):
        with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
            archive.writestr("good.png", b"x")
            archive.writestr(name, b"x")
        assert repr(name) in error_of(tmp_path / "bad.zip")
    path = zipped(make_images(tmp_path / "in", ["a.png", "bé.png"]))
    good = path.read_bytes()
    content = bytearray(good)
    at = content.index(b"PK\x01\x02") + 20
    content[at : at + 4] = struct.pack("<I", 1 << 24)
    path.write_bytes(content)
    assert "overlap" in error_of(path)
    path.write_bytes(good.replace("é".encode(), b"\xff\xfe"))
    assert path.name in error_of(path)


def test_damaged_and_encrypted_entries(tmp_path: Path) -> None:
    path = zipped(make_images(tmp_path / "in", ["a.png", "b.png"]))
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT")] ^= 0xFF
    first = content.index(b"PK\x01\x02")
    for word, flag in (("damaged", 0), ("encrypted", 1)):
        content[first + 8] |= flag
        path.write_bytes(content)
        outcome = read_all(path)
        assert word in outcome["a.png"]
        assert outcome["b.png"] == "(8, 8)"
    content[content.index(b"PK\x01\x02", first + 1) + 8] |= 1
    path.write_bytes(content)
    assert "encrypted" in error_of(path)


def test_a_bomb_or_a_name_twice_is_one_images_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zipped(make_images(tmp_path / "in", ["a.png", "twice.png"]))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.png", bytes(1 << 20))
        archive.writestr("small.png", bytes(100))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("twice.png", archive.read("a.png"))
    assert "bomb" not in read_all(path)["bomb.png"]
    monkeypatch.setattr(files, "BOMB_FROM", 1 << 16)
    outcome = read_all(path)
    assert "bomb" in outcome.pop("bomb.png")
    assert "two entries" in outcome.pop("twice.png")
    assert "not an image" in outcome.pop("small.png")
    assert outcome == {"a.png": "(8, 8)"}
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 19)
    monkeypatch.setattr(files, "IMAGE_FILE", replace(files.IMAGE_FILE, max_bytes=1 << 19))
    assert "MiB" in read_all(path)["bomb.png"]
    (tmp_path / "in" / "a.png").write_bytes(bytes(1 << 20))
    assert "MiB" in read_all(tmp_path / "in")["a.png"]


# names --------------------------------------------------------------------------------------------


def test_a_name_that_no_table_can_hold_is_refused(tmp_path: Path) -> None:
    """Of an image; what no command can show is shown escaped."""
    for number, name in enumerate((b"esc\x1b[2J.png", b"line\nbreak.png", b"\xe9.png")):
        folder = make_images(tmp_path / str(number), ["a.png", "=1+1.png"])
        (folder / os.fsdecode(b"\x1b.txt")).touch()
        assert set(read_all(folder)) == {"a.png", "=1+1.png"}
        (folder / os.fsdecode(name)).touch()
        assert name[:3].decode("ascii", "ignore").strip("\x1b\n")[:2] in error_of(folder)
    assert not is_usable("y" * 300 + ".png")
    assert not is_usable("x/" * 300)
    assert is_usable("e\u0301\u00a0\u200d.png")
