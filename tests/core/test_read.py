"""Files from outside: regular, not too large, and whatever else they are is one sentence."""

import json
import os
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from mjp_privacy.core import read
from mjp_privacy.core.errors import BadFile, NoFile, Unreadable, UserError
from mjp_privacy.core.read import (
    FileKind,
    csv_rows,
    is_there,
    read_json,
    read_mapping,
    reason,
    yaml_value,
)
from mjp_privacy.core.registry import Entry, did_you_mean
from mjp_privacy.core.schema import STRICT

KIND = FileKind("a note", "Write it again.", 1 << 20)
SMALL = FileKind("a note", "Write it again.", 1000)


def refused(reader: Callable[[Path], object], path: Path, content: str | bytes = "") -> str:
    """The message of a refusal, which names the file and is safe to print."""
    if content or not path.exists():
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as raised:
        reader(path)
    text = str(raised.value)
    assert path.name in text
    assert not set(text) & set("\x1b\0")
    assert len(text) < 900
    return text


def test_the_content_of_a_sound_file_and_of_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes("\ufeffgrün".encode())
    assert SMALL.bytes(path) == b"\xef\xbb\xbfgr\xc3\xbcn"
    assert (SMALL.text(path), SMALL.check(path)) == ("grün", 8)
    assert SMALL.sha256(path).startswith("0e7e3d")
    for place in (tmp_path / "none", tmp_path / "none" / "deeper", path / "inside"):
        with pytest.raises(NoFile):
            SMALL.bytes(place)
        assert not is_there(place)


@pytest.mark.parametrize("name", ["folder", "pipe", "socket", "zero", "loop", "a\0b", "x" * 5000])
def test_what_is_no_regular_file_is_refused_unopened(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)  # the name of a socket is at most a hundred characters long
    with socket.socket(socket.AF_UNIX) as place:
        place.bind("socket")
        for reader in (SMALL.check, SMALL.bytes, SMALL.text, SMALL.sha256):
            with pytest.raises(BadFile) as raised:
                reader(tmp_path / name)
            assert len(str(raised.value)) < 900
            assert "\0" not in str(raised.value)


def test_a_file_that_is_too_large_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    assert len(FileKind("a note", "Write it.", 1 << 34).bytes(path)) == 1000
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    refused(SMALL.bytes, path)
    path.write_bytes(b"x" * 5000)
    monkeypatch.setattr(FileKind, "check", lambda self, path: 1000)  # it grew since
    assert len(SMALL.bytes(path)) == 1000
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


class PanicException(BaseException):
    """As libraries in Rust raise it: it is no Exception."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a\x1b[2Jb\nsecond line"), BadFile),
        (OSError(5, "Input/output error"), Unreadable),
        (PermissionError(13, "Permission denied"), Unreadable),
        (FileNotFoundError(2, "No such file"), NoFile),
        (MemoryError(), BadFile),
        (PanicException("x" * 5000), BadFile),
    ],
)
def test_whatever_a_library_raises_is_one_sentence(
    tmp_path: Path, error: BaseException, kind: type[BadFile]
) -> None:
    with pytest.raises(kind) as raised, KIND.reading(tmp_path / "name"):
        raise error
    assert raised.value.__cause__ is error
    assert len(reason(error)) < 260
    text = str(raised.value)
    assert "name" in text
    assert not set(text) & set("\x1b\n")


# JSON --------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=STRICT)
class Header:
    """What a file says of itself."""

    name: Annotated[str, Field(max_length=20)]
    rounds: Annotated[int, Field(ge=1, le=100)] = 1
    kind: Literal["a", "b"] = "a"
    noise: Annotated[float, Field(ge=0)] = 0.0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"name": "a", "name": "b"}', "'name'"),
        ('{"name": "a", "noise": NaN}', "NaN"),
        ('{"name": "a", "rounds": 1' + "0" * 5000 + "}", ""),
        ("[1, 2]", "named fields"),
        ({"name": "a", "round": 2}, "Did you mean rounds?"),
        ({"name": "a", "\x1b[2J": 1}, r"\x1b[2J"),
        ({f"n{k}": k for k in range(1000)}, "1001"),
    ],
)
def test_what_is_no_header(tmp_path: Path, content: Any, named: str) -> None:
    text = json.dumps(content) if isinstance(content, dict) else content
    assert named in refused(lambda path: read_json(path, KIND, Header), tmp_path / "a.json", text)


# YAML --------------------------------------------------------------------------------------------


def bomb(first: str, level: str) -> str:
    """A few lines that stand for more values than any memory holds."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{k}: &a{k} {level.format(', '.join([f'*a{k - 1}'] * 9))}" for k in range(1, 13)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [bomb("[x, x]", "[{}]"), bomb("{x: 1}", "{{<<: [{}], k: 1}}"), "a: [" + "1," * 1000 + "1]\n"],
)
def test_what_anchors_stand_for_is_counted_not_built(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MOST_NODES", 1000)
    began = time.process_time()
    assert "1000" in refused(read_mapping, tmp_path / "a.yaml", text)
    assert time.process_time() - began < 2  # built, it takes for ever


@pytest.mark.parametrize(
    ("content", "named"),
    [
        *((text, "") for text in ("a: &a [*a]", "&a {x: *a}", "a: [" * 5000, b"a: \xff\xfe")),
        *((text, "") for text in ("a: !!int five", "a: 2020-99-99", "a: 1" + "0" * 5000)),
        *((text, "") for text in ("? [a, b]\n: 1", "a: 1\n---\nb: 2")),
        ("!!python/object/apply:os.system ['touch /tmp/owned']\n", "python"),
        ("name: a\nname: b\n", "line 2: 'name'"),
        ("[1, 2]\n", "list"),
        ("", "empty"),
        ("a: 1:30.5\n", "'1:30.5'"),
        ("b: &n [010]\na: *n\n", "line 1: '010'"),
    ],
)
def test_what_is_no_config(tmp_path: Path, content: str | bytes, named: str) -> None:
    (tmp_path / "a.yaml").touch()
    assert named in refused(read_mapping, tmp_path / "a.yaml", content)


def test_numbers_are_written_as_everywhere_else_and_a_config_may_repeat_itself() -> None:
    for text in ("1e-3", "0.001", "1.E-3", "+.1e-2", "10e-4"):
        assert yaml_value(f"lr: {text}", "x") == {"lr": 0.001}
    text = "[10, -3, 007.5, 0x1F, 1_000, '010', \"1:30\", 08x, 12:30:a, 2020-01-01x, 1e, e3, 1-e3]"
    expected = [10, -3, 7.5, 31, 1000, "010", "1:30", "08x", "12:30:a", "2020-01-01x"]
    assert yaml_value(text, "here") == [*expected, "1e", "e3", "1-e3"]
    assert yaml_value("", "--values") is None
    with pytest.raises(UserError, match="--values"):
        yaml_value("[1,", "--values")
    again = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: [1, 2.5, null]}\nc: {<<: *b, z: 3}\n"
    content = yaml_value(again, "here")
    assert content["b"] == {"x": 1, "y": [1, 2.5, None]}
    assert content["c"] == content["b"] | {"z": 3}


# CSV ---------------------------------------------------------------------------------------------


def test_a_sound_table(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes('\ufefflabel,file\r\n1,"a,b.png"\r\n\r\n2,"two\nlines"\r\n'.encode())
    table = csv_rows(KIND.text(path), path, KIND, needed=("file",))
    rows = [(row["label"], row["file"]) for _, row in table]
    assert rows == [("1", "a,b.png"), ("2", "two\nlines")]
    lower = csv_rows("A,b\n1,2\n", path, KIND, column=str.lower)
    assert list(lower) == [(2, {"a": "1", "b": "2"})]


# names of a registry -----------------------------------------------------------------------------


def test_what_is_registered_and_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"attacks/nowhere\.py"):
        Entry("attacks.nowhere:Yours").load()
    with pytest.raises(UserError, match="Did you mean PatchGradient"):
        Entry("attacks.patch_gradient:PatchGradent").load()


def test_names_that_hold_a_part_are_offered_after_those_that_begin_with_it() -> None:
    assert did_you_mean("span", ["masked_span", "span_matching", "april"]).endswith(
        "span_matching, masked_span?"
    )
