"""Files from outside: regular, not too large, and whatever else they are is one sentence."""

from __future__ import annotations

import json
import os
import socket
import time
import tracemalloc
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from mjp_privacy.core import read
from mjp_privacy.core.errors import BadFile, NoFile, Unreadable, UserError
from mjp_privacy.core.read import (
    MOST_LETTERS,
    FileKind,
    csv_rows,
    is_there,
    read_csv,
    read_json,
    read_mapping,
    reason,
    yaml_value,
)
from mjp_privacy.core.registry import Entry
from mjp_privacy.core.schema import (
    STRICT,
    Count,
    Label,
    Name,
    NotNegative,
    PathText,
    Positive,
    Seed,
    Share,
    Switch,
    parse,
    schema,
)

NOTE = FileKind("a note of two lines", "Write it again.", 1000)
KIND = FileKind("a header", "Record it again.", 1 << 20)
LABELS = FileKind("a table of labels", "Write file,label in its first line.", 1 << 20)


def one_sentence(raised: pytest.ExceptionInfo[UserError], path: Path) -> str:
    """The message of a refusal, which names the file and is safe to print."""
    text = str(raised.value)
    assert path.name in text or "\0" in str(path) or len(path.name) > 255
    assert not set(text) & set("\x1b\0")
    assert len(text) < 900
    return text


def test_the_content_of_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_bytes("\ufeffgrün".encode())
    assert NOTE.bytes(path) == b"\xef\xbb\xbfgr\xc3\xbcn"
    assert NOTE.text(path) == "grün"
    assert NOTE.check(path) == 8
    assert NOTE.sha256(path).startswith("0e7e3d")


def test_no_file_is_told_apart_from_a_bad_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none", tmp_path / "none" / "deeper", tmp_path / "file" / "inside"):
        with pytest.raises(NoFile):
            NOTE.bytes(path)
        assert not is_there(path)


@pytest.mark.parametrize("name", ["folder", "pipe", "socket", "zero", "loop", "a\0b", "x" * 5000])
def test_what_is_no_regular_file_is_refused_unopened(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    before = Path.cwd()
    os.chdir(tmp_path)  # the name of a socket is at most a hundred characters long
    try:
        with socket.socket(socket.AF_UNIX) as place:
            place.bind("socket")
            for read in (NOTE.check, NOTE.bytes, NOTE.text, NOTE.sha256):
                with pytest.raises(BadFile) as raised:
                    read(tmp_path / name)
                one_sentence(raised, tmp_path / name)
    finally:
        os.chdir(before)


def test_a_file_that_is_too_large_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    assert len(FileKind("a note", "Write it.", 1 << 34).bytes(path)) == 1000
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadFile, match="large"):
        NOTE.bytes(path)
    path.write_bytes(b"x" * 5000)
    monkeypatch.setattr(FileKind, "check", lambda self, path: 1000)  # it grew since
    with pytest.raises(BadFile, match="large"):
        NOTE.bytes(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    with pytest.raises(BadFile, match="status"):  # those of /proc have no size
        FileKind("a note", "Write it.", 10).bytes(Path("/proc/self/status"))


class PanicException(BaseException):
    """As libraries in Rust raise it: it is no Exception."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a\x1b[2Jb\nsecond line"), BadFile),
        (ZeroDivisionError(), BadFile),
        (RecursionError("too deep."), BadFile),
        (OSError(5, "Input/output error"), Unreadable),
        (FileNotFoundError(2, "No such file"), NoFile),
        (MemoryError(), BadFile),
        (PanicException("index out of range"), BadFile),
        (KeyError("x" * 5000), BadFile),
    ],
)
def test_whatever_a_library_raises_is_one_sentence(
    tmp_path: Path, error: BaseException, kind: type[BadFile]
) -> None:
    with pytest.raises(kind) as raised, NOTE.reading(tmp_path / "a"):
        raise error
    assert "\n" not in one_sentence(raised, tmp_path / "a")
    assert raised.value.__cause__ is error
    assert len(reason(error)) < 260


# JSON --------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=STRICT)
class Header:
    """What a file says of itself."""

    name: Annotated[str, Field(max_length=20)]
    rounds: Annotated[int, Field(ge=1, le=100)] = 1
    kind: Literal["a", "b"] = "a"
    noise: Annotated[float, Field(ge=0)] = 0.0


def header_refused(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadFile) as raised:
        read_json(path, KIND, Header)
    return one_sentence(raised, path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        *((text, "") for text in ("", "{", "[" * 100_000, b'{"name": "\xff"}')),
        ('{"name": "a", "name": "b"}', "'name'"),
        ('{"name": "a", "noise": NaN}', "noise"),
        ('{"name": "a", "noise": [1, -Infinity]}', "noise"),
        ("[NaN]", "NaN"),
        ('{"name": "a", "rounds": 1' + "0" * 5000 + "}", ""),
        *((text, "named fields") for text in ("[1, 2]", "5", "null", '"text"', "true")),
    ],
)
def test_what_is_no_header(tmp_path: Path, content: str | bytes, named: str) -> None:
    assert named in header_refused(tmp_path / "a.json", content)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "name"),
        ({"name": "a", "round": 2}, "Did you mean rounds?"),
        ({"name": "x" * 5000}, "name"),
        ({"name": "a", "rounds": 10**30}, "rounds"),
        ({"name": "a", "kind": "c"}, "kind"),
        ({"name": 5}, "name"),
        ({"name": "a", "\x1b[2J": 1}, r"\x1b[2J"),
        ({f"n{k}": k for k in range(1000)}, "1001"),
    ],
)
def test_a_mistake_is_told_with_its_field(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    assert named in header_refused(tmp_path / "a.json", json.dumps(fields))


# YAML --------------------------------------------------------------------------------------------


def bomb(levels: int = 12, width: int = 9) -> str:
    """A few lines that stand for width ** levels values."""
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines) + "\n"


def merge_bomb(levels: int = 15) -> str:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    for level in range(1, levels):
        before = f"*a{level - 1}"
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([before] * 9)}], k{level}: 1}}")
    return "\n".join(lines) + "\n"


def config_refused(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as raised:
        read_mapping(path)
    return one_sentence(raised, path)


@pytest.mark.parametrize("text", [bomb(), merge_bomb(), "a: [" + "1," * 1000 + "1]\n"])
def test_what_anchors_stand_for_is_counted_not_built(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MOST_NODES", 1000)
    began = time.process_time()
    assert "1000" in config_refused(tmp_path / "a.yaml", text)
    assert time.process_time() - began < 2  # built, it takes for ever


def test_a_config_may_repeat_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: [1, 2.5, null]}\nc: {<<: *b, z: 3}\n")
    content = read_mapping(path)
    assert content["b"] == {"x": 1, "y": [1, 2.5, None]}
    assert content["c"] == content["b"] | {"z": 3}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        *((text, "") for text in ("a: &a [*a]", "&a {x: *a}", "a: [" * 5000, b"a: \xff\xfe")),
        *((text, "") for text in ("a: !!timestamp 2020-13-45", "a: !!int five", "a: 2020-99-99")),
        *((text, "") for text in ("a: 1" + "0" * 5000, "? [a, b]\n: 1", "a: 1\n---\nb: 2")),
        *((text, "") for text in ("a: x\x00y", "a: x\x1b[2Jy", "a" * (1 << 19), "a: !!binary x")),
        ("!!python/object/apply:os.system ['touch /tmp/owned']\n", "python"),
        ("a: !!python/name:os.system\n", "python"),
        ("name: a\nname: b\n", "line 2: 'name'"),
        ("a: *nowhere\n", "nowhere"),
        ("[1, 2]\n", "list"),
        ("", "empty"),
        ("a: 1\nb: [0777]\n", "line 2: '0777'"),
        ("a: 1:30.5\n", "'1:30.5'"),
        ("b: &n [010]\na: *n\n", "line 1: '010'"),
    ],
)
def test_what_is_no_config(tmp_path: Path, content: str | bytes, named: str) -> None:
    assert named in config_refused(tmp_path / "a.yaml", content)


def test_numbers_are_written_as_everywhere_else() -> None:
    for text in ("1e-3", "0.001", "1.E-3", "+.1e-2", "10e-4"):
        assert yaml_value(f"lr: {text}", "x") == {"lr": 0.001}
    text = "[10, -3, 007.5, 0x1F, 1_000, '010', \"1:30\", 08x, 12:30:a, 2020-01-01x, 1e, e3, 1-e3]"
    expected = [10, -3, 7.5, 31, 1000, "010", "1:30", "08x", "12:30:a", "2020-01-01x"]
    assert yaml_value(text, "here") == [*expected, "1e", "e3", "1-e3"]
    assert yaml_value("", "--values") is None
    with pytest.raises(UserError, match="--values"):
        yaml_value("[1,", "--values")


# CSV ---------------------------------------------------------------------------------------------


def test_a_sound_table(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes('\ufefflabel,file\r\n1,"a,b.png"\r\n\r\n2,"two\nlines"\r\n'.encode())
    assert read_csv(path, LABELS, needed=("file",)) == [
        {"label": "1", "file": "a,b.png"},
        {"label": "2", "file": "two\nlines"},
    ]
    assert list(csv_rows("A,b\n1,2\n", path, LABELS, column=str.lower)) == [
        (2, {"a": "1", "b": "2"})
    ]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "file, label"),
        ("file,label,label\n", "label"),
        ("file\n", "label"),
        ("file,label,\x1b[2J\n", r"\x1b[2J"),
        ("file,label\na,1\nb,2,3\n", "line 3"),
        ("file,label\na," + "x" * (MOST_LETTERS + 1) + "\n", "line 2"),
        ("file,label\na," + "x" * 200_000 + "\n", ""),
        ('file,label\n"a,1\n', ""),
        ("file,label\na,1\0\n", ""),
        (b"file,label\n\xff,1\n", ""),
        (",".join(f"c{k}" for k in range(100_000)), "file, label"),
        (b"x" * ((1 << 20) + 1), ""),
    ],
)
def test_what_is_no_table(tmp_path: Path, content: str | bytes, named: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadFile) as raised:
        read_csv(path, LABELS, needed=("file", "label"), known=("file", "label", "note"))
    assert named in one_sentence(raised, path)


# names of a registry, fields of a dataclass -------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("attacks.nowhere:Yours", "attacks/nowhere.py"),
        ("attacks.patch_gradient:PatchGradent", "Did you mean PatchGradient?"),
    ],
)
def test_what_is_registered_and_not_there_is_named(where: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        Entry(where).load()
    assert named in str(caught.value)


@schema
class Inner:
    """What an outer one holds."""

    rate: Positive = 0.1


@schema
class Outer:
    """Fields of every kind."""

    seed: Seed = 0
    count: Count = 1
    share: Share = 0.5
    loss: NotNegative = 0.0
    on: Switch = False
    label: Label = "a"
    name: Name = "a"
    path: PathText = "a"
    inner: Annotated[Inner | None, "nested"] = None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed", value) for value in (True, "5", -1, 2**63, 1.0)),
        *(("count", value) for value in (0, 10**10, None)),
        *(("share", value) for value in (True, "0.5", 1.1, float("nan"))),
        *(("loss", value) for value in (-1e-9, 1e300, float("inf"))),
        *(("on", value) for value in (1, "yes")),
        *(("label", value) for value in ("", "  ", "a\x1b[2J", "x" * 101, 5)),
        *(("name", value) for value in ("../a", ".a", "a/b", "a\\b")),
        *(("path", value) for value in ("", "a\0b", "x" * 5000)),
        ("inner", {"rate": 0}),
        ("inner", 5),
        ("sed", 1),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        parse(Outer, {field: value}, "the config")
    assert field in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_misspelt_field_gets_the_nearest_of_its_owner() -> None:
    with pytest.raises(UserError, match=r"inner\.rat: .*Did you mean rate\?"):
        parse(Outer, {"inner": {"rat": 1.0}}, "the config")
    with pytest.raises(UserError, match=r"(?s)Inner has .*rate"):
        Inner(rate=0.0)
