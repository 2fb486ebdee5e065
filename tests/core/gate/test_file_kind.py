"""What a file is expected to be: regular, not too large, and readable by its library."""

import os
import socket
from pathlib import Path

import pytest

from mjp_privacy.core.errors import BadFile, NoFile, UserError
from mjp_privacy.core.read import MIB, FileKind, is_there, reason

NOTE = FileKind("a note of two lines", "Write it again.", 1000)


def test_the_content_of_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_bytes("\ufeffgrün".encode())
    assert NOTE.bytes(path) == b"\xef\xbb\xbfgr\xc3\xbcn"
    assert NOTE.text(path) == "grün"
    assert NOTE.check(path) == 8


def test_a_message_says_what_was_expected_what_came_and_what_to_do(tmp_path: Path) -> None:
    error = NOTE.refusal(tmp_path / "a.txt", "three lines", "line 3")
    assert str(error) == (
        f"{tmp_path}/a.txt, line 3: expected a note of two lines; got three lines. Write it again."
    )
    assert (error.path, error.got) == (tmp_path / "a.txt", "three lines")
    other = NOTE.advising("Leave it out.").refusal(tmp_path / "a.txt", "nothing")
    assert str(other).endswith("got nothing. Leave it out.")


def test_no_file_is_told_apart_from_a_bad_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none", tmp_path / "none" / "deeper", tmp_path / "file" / "inside"):
        with pytest.raises(NoFile, match="got no file of this name"):
            NOTE.bytes(path)
        assert not is_there(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folder", "a folder"),
        ("pipe", "a named pipe"),
        ("socket", "a socket"),
        ("zero", "a device"),
        ("loop", "too many levels of symbolic links"),
    ],
)
def test_what_is_no_regular_file_is_refused_unopened(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    before = Path.cwd()
    os.chdir(tmp_path)  # the name of a socket is at most a hundred characters long
    try:
        with socket.socket(socket.AF_UNIX) as place:
            place.bind("socket")
            for read in (NOTE.check, NOTE.bytes, NOTE.text):
                with pytest.raises(BadFile, match=f"expected a note of two lines; got {said}"):
                    read(tmp_path / name)
    finally:
        os.chdir(before)


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    for path in (tmp_path / "a\0b", tmp_path / ("x" * 5000)):
        with pytest.raises(BadFile) as raised:
            NOTE.check(path)
        assert len(str(raised.value)) < 600
        assert "\0" not in str(raised.value)
        assert not is_there(path)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 1000)
    assert len(NOTE.bytes(path)) == 1000
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadFile, match=r"got 1,048,576.0 MiB, more than 0.0 MiB"):
        NOTE.bytes(path)


def test_a_file_that_grew_since_it_was_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grows"
    path.write_bytes(b"x" * 5000)
    monkeypatch.setattr(FileKind, "check", lambda self, path: 1000)
    with pytest.raises(BadFile, match=r"more than 0.0 MiB"):
        NOTE.bytes(path)


def test_a_file_that_says_it_is_empty_and_is_not(tmp_path: Path) -> None:
    """Those of /proc have no size: what is read is counted."""
    with pytest.raises(BadFile, match=r"more than 0.0 MiB"):
        FileKind("a note", "Write it.", 10).bytes(Path("/proc/self/status"))


def test_a_large_bound_takes_no_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "small"
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    assert len(FileKind("a note", "Write it.", 1 << 34).bytes(path)) == 1000
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_the_digest_of_a_file(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "a"
    path.write_bytes(b"x" * 900)
    assert NOTE.sha256(path) == hashlib.sha256(b"x" * 900).hexdigest()
    with pytest.raises(BadFile, match="a folder"):
        NOTE.sha256(tmp_path)


def test_a_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes("grün".encode("latin-1"))
    with pytest.raises(BadFile, match=r"cannot be read \(UnicodeDecodeError: .*byte 0xfc"):
        NOTE.text(path)


class PanicException(BaseException):
    """As libraries in Rust raise it: it is no Exception."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a\x1b[2Jb\nsecond line"), r"(ValueError: a\x1b[2Jb)"),
        (ZeroDivisionError(), "(ZeroDivisionError)"),
        (RecursionError("too deep."), "(RecursionError: too deep)"),
        (OSError(5, "Input/output error"), "input/output error"),
        (MemoryError(), "a file that needs more memory than there is"),
        (PanicException("index out of range"), "(PanicException: index out of range)"),
        (KeyError("x" * 5000), "(KeyError: 'xxx"),
    ],
)
def test_whatever_a_library_raises_is_one_sentence(
    tmp_path: Path, error: BaseException, said: str
) -> None:
    with pytest.raises(BadFile) as raised, NOTE.reading(tmp_path / "a"):
        raise error
    text = str(raised.value)
    assert said in text
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 500
    assert raised.value.__cause__ is error


def test_what_is_no_fault_of_the_file_passes(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt(), SystemExit(3), GeneratorExit()):
        with pytest.raises(type(error)), NOTE.reading(tmp_path / "a"):
            raise error
    with pytest.raises(UserError, match="mine"), NOTE.reading(tmp_path / "a"):
        raise UserError("mine")


def test_a_file_that_vanishes_while_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(NoFile, match="no file of this name"), NOTE.reading(tmp_path / "a"):
        (tmp_path / "a").read_bytes()


def test_a_reason_is_short() -> None:
    assert reason(ValueError("x" * 9999)).count("x") < 210
    assert (
        reason(ValueError("\n\n  second  \n third")) == "what cannot be read (ValueError: second)"
    )
    assert MIB == 2**20
