"""Label files from strangers: every mistake is one sentence that names the line."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import open_images
from tests.helpers.image_files import make_images, zipped

CSV = "file,label\na.png,1\n"
REFUSED = {
    "5,000 digits": (f"file,label\na.png,{'9' * 5000}\n", "line 2: expected a name and its label"),
    "500 digits": (f"file,label\na.png,{'9' * 500}\n", "got one of 500 digits"),
    "2^63": (f"file,label\na.png,{1 << 63}\n", "line 2: expected a class index below 1000000"),
    "negative": ("file,label\na.png,-3\n", "got '-3'"),
    "fraction": ("file,label\na.png,1.0\n", "got '1.0'"),
    "other digits": ("file,label\na.png,٣\n", "expected a label that is a class index"),
    "huge field": (f"file,label\n{'a' * 100_000}.png,1\n", "got 100006 characters"),
    "empty id": (CSV + '" ",2\n', "line 3: expected the name of an image, got none"),
    "id of a dot": (CSV + "./,2\n", "line 3: expected the name of an image, got none"),
    "name twice": (CSV + "b.png,2\n./a.png,3\n", "line 4, gives a.png twice, with the labels 1"),
    "column twice": ("file,label,label\na.png,1,2\n", "line 1: expected a label file; got the"),
    "column twice in case": ("file,Label,label\na.png,1,2\n", "got the column label twice"),
    "cells too many": (CSV + "b.png,2,3\n", "line 3: expected a label file; got 3 cells under 2"),
    "open quote": (CSV + '"b.png,2\n', "got what cannot be read (Error: unexpected end of data)"),
    "zero byte": (CSV + "b.png\0,2\n", "got a zero byte, which no text holds"),
    "escapes": ("file,label\na\x1b[2J.png,x\x1b[2J\n", r"got 'x\x1b[2J'"),
    "words": ("\x1b]0;title\x07 what\n", "starts with"),
    "val.txt, many digits": (f"a.png {'9' * 4300}\n", "line 1: expected a name and its label"),
    "val.txt, digits": (f"a.png {'9' * 30}\n", "line 1: expected a class index below 1000000"),
    "val.txt, beyond": ("a.png 1000\n", "holds the class index 1000; expected 0..999"),
    "val.txt, twice": ("a.png 1\na.png 2\n", "line 2, gives a.png twice"),
    "kaggle, no synset": ("ImageId,PredictionString\na,\n", "line 2: expected one of the 1000"),
    "kaggle, no name": ("ImageId,PredictionString\n,n01440764 1 2\n", "the name of an image"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_images(tmp_path / "in", ["a.png"])


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("place", ["given", "inside", "zip"])
def test_refused(case: str, place: str, folder: Path, tmp_path: Path) -> None:
    text, expected = REFUSED[case]
    table = (tmp_path if place == "given" else folder) / "labels.csv"
    table.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(UserError) as caught:
        open_images(
            zipped(folder) if place == "zip" else folder, table if place == "given" else None
        )
    message = str(caught.value)
    assert expected in message
    assert "labels.csv" in message
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "utf-32"])
def test_other_encodings_are_named(encoding: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_bytes("file,label\né.png,1\n".encode(encoding))
    with pytest.raises(UserError, match=r"not UTF-8|zero byte|starts with"):
        open_images(folder, tmp_path / "l.csv")


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_ends_of_lines_and_a_mark_of_bytes(newline: str, start: str, folder: Path) -> None:
    text = start + CSV.replace("\n", newline)
    (folder / "labels.csv").write_text(text, encoding="utf-8", newline="")
    assert [record.label for record in open_images(folder).records] == [1]


def test_lines_are_counted_from_the_first_of_the_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("\n\nfile,label\na.png,x\n")
    with pytest.raises(UserError, match=r"l\.csv, line 4: expected a label"):
        open_images(folder, tmp_path / "l.csv")


def test_a_label_file_that_is_no_file(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="expected a label file; got a named pipe"):
        open_images(folder, tmp_path / "pipe")
    os.mkfifo(folder / "labels.csv")
    with pytest.raises(UserError, match=r"labels\.csv cannot be read \(a named pipe\)"):
        open_images(folder)


def test_a_line_of_spaces_takes_no_time(folder: Path, tmp_path: Path) -> None:
    """A pattern that tries every way to part the spaces would take minutes."""
    lines = [f"a{' ' * 4000}b x" for _ in range(200)]
    (tmp_path / "val.txt").write_text("a.png 1\n" + "\n".join(lines))
    start = time.process_time()
    with pytest.raises(UserError, match="line 2: expected `name index`"):
        open_images(folder, tmp_path / "val.txt")
    assert time.process_time() - start < 5


def test_a_label_file_that_is_too_large(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "l.csv").open("wb") as file:
        file.write(CSV.encode())
        file.truncate(65 << 20)
    with pytest.raises(UserError, match=r"65\.0 MiB, more than 64"):
        open_images(folder, tmp_path / "l.csv")
    path = zipped(folder)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.csv", CSV + "\n" * (65 << 20))
    with pytest.raises(UserError, match=r"labels\.csv a zip bomb"):
        open_images(path)


@pytest.mark.parametrize("name", ["9" * 200, "20240131", "1000000"])
def test_folders_named_by_large_numbers_are_places(name: str, tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", [f"{name}/a.png", "7/b.png"])
    labels = {record.image_id: record.label for record in open_images(folder).records}
    assert sorted(labels.values()) == [0, 1]


@pytest.mark.parametrize(
    "name", [".", "in/", "in/.", "/", "..", "..png", "in/..png", "a/..", "..."]
)
def test_names_that_are_no_files_are_no_harm(name: str, tmp_path: Path) -> None:
    """Beside rows that name the images without their folder and by another suffix."""
    folder = make_images(tmp_path / "in", ["a.png", "b.png"])
    table = tmp_path / "labels.csv"
    table.write_text(f"file,label\n{name},7\na.jpg,1\nb.jpg,2\n")
    try:
        records = open_images(folder, table).records
    except UserError as error:
        assert "line 2: expected the name of an image" in str(error)  # noqa: PT017
    else:
        assert [record.label for record in records] == [1, 2]
