"""Tables of text: every column once, every row whole, every cell of a bearable length."""

import time
from pathlib import Path

import pytest

from mjp_privacy.core.errors import BadFile
from mjp_privacy.core.read import MOST_LETTERS, FileKind, csv_rows, read_csv

LABELS = FileKind("a table of labels", "Write file,label in its first line.", 1 << 20)


def refused(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadFile) as raised:
        read_csv(path, LABELS, needed=("file", "label"), known=("file", "label", "note"))
    said = str(raised.value)
    assert path.name in said
    assert "\x1b" not in said
    assert len(said) < 700
    return said


def test_a_sound_table(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes('\ufefflabel,file\r\n1,"a,b.png"\r\n\r\n2,"two\nlines"\r\n'.encode())
    assert read_csv(path, LABELS, needed=("file",)) == [
        {"label": "1", "file": "a,b.png"},
        {"label": "2", "file": "two\nlines"},
    ]
    path.write_text("file,label\n")
    assert read_csv(path, LABELS) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "line 1: expected a table of labels; got no column file, label among none"),
        ("file,label,label\n", "the column label twice"),
        ("file\n", "no column label among file"),
        ("file,label,colour\n", "the unknown column colour"),
        ("file,label,\x1b[2J\n", r"the unknown column \x1b[2J"),
        ("file,label\na.png\n", "line 2: expected a table of labels; got 1 cells under 2 columns"),
        ("file,label\na,1\nb,2,3\n", "line 3"),
        ("file,label\na," + "x" * (MOST_LETTERS + 1) + "\n", "a cell of 4097 characters"),
        ("file,label\na," + "x" * 200_000 + "\n", "field larger than field limit"),
        ('file,label\n"a,1\n', "unexpected end of data"),
        ('file,label\n"a"b,1\n', "expected after"),
        ("file,label\na,1\0\n", "a zero byte"),
        (b"file,label\n\xff,1\n", "UnicodeDecodeError"),
        ("file,label\n".encode("utf-16"), "UnicodeDecodeError"),
        (",".join(f"c{k}" for k in range(5000)), "no column file, label"),
        (b"x" * ((1 << 20) + 1), "more than 1.0 MiB"),
    ],
)
def test_what_is_no_table(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in refused(tmp_path / "labels.csv", content)


def test_a_text_that_was_read_already(tmp_path: Path) -> None:
    rows = csv_rows("a,b\n1,2\n", tmp_path / "x.csv", LABELS)
    assert list(rows) == [{"a": "1", "b": "2"}]


def test_many_columns_take_no_longer_than_they_are_many(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{k}" for k in range(100_000)))
    began = time.process_time()
    assert read_csv(path, LABELS) == []
    assert time.process_time() - began < 1  # each counted among all: minutes
