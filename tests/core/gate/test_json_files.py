"""JSON from outside: typed, finite, every name once, and of a bearable depth."""

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from mjp_privacy.core.errors import BadFile, NoFile
from mjp_privacy.core.read import (
    FileKind,
    json_value,
    read_json,
    read_json_lines,
    read_json_value,
    typed,
)
from mjp_privacy.core.schema import STRICT

KIND = FileKind("a header", "Record it again.", 1 << 20)


@dataclass(frozen=True, config=STRICT)
class Header:
    """What a file says of itself."""

    name: Annotated[str, Field(max_length=20)]
    rounds: Annotated[int, Field(ge=1, le=100)] = 1
    kind: Literal["a", "b"] = "a"
    noise: Annotated[float, Field(ge=0)] = 0.0


def refused(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadFile) as raised:
        read_json(path, KIND, Header)
    assert str(raised.value).startswith(str(path))
    assert "Record it again." in str(raised.value)
    return str(raised.value)


def test_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"name": "ViT", "rounds": 3}')
    assert read_json(path, KIND, Header) == Header("ViT", 3)
    assert read_json_value(path, KIND) == {"name": "ViT", "rounds": 3}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "JSONDecodeError"),
        ("{", "JSONDecodeError"),
        ('{"name": "a", "name": "b"}', "the field 'name' is given twice"),
        ('{"name": "a", "noise": NaN}', "a.json, noise: expected a header; got NaN, which"),
        (
            '{"name": "a", "noise": -Infinity}',
            "a.json, noise: expected a header; got -Infinity, which is no number",
        ),
        ('{"name": "a", "rounds": 1' + "0" * 5000 + "}", "Exceeds the limit"),
        ("[" * 100_000, "RecursionError"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "RecursionError"),
        (b'{"name": "\xff"}', "UnicodeDecodeError"),
        (b'{"name": "a\x00b"}', "Invalid control character"),
        ("[1, 2]", "a list where named fields were expected"),
        ("5", "a number where named fields"),
        ("null", "null where named fields"),
        ('"text"', "a text where named fields"),
        ("true", "true or false where named fields"),
    ],
)
def test_what_is_no_header(tmp_path: Path, content: str | bytes, words: str) -> None:
    said = refused(tmp_path / "a.json", content)
    assert words in said
    assert len(said) < 700


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "name: this field is needed and was not given"),
        ({"name": "a", "round": 2}, "round: unknown field. Did you mean rounds?"),
        ({"name": "x" * 5000}, "name: String should have at most 20 characters"),
        ({"name": "a", "rounds": 10**30}, "rounds: "),
        ({"name": "a", "rounds": 0}, "rounds: Input should be greater than or equal to 1; got 0"),
        ({"name": "a", "kind": "c"}, "kind: Input should be 'a' or 'b'; got 'c'"),
        ({"name": "a", "noise": -1}, "noise: Input should be greater than or equal to 0"),
        ({"name": 5}, "name: Input should be a valid string; got 5"),
        ({"name": ["a"]}, "name: Input should be a valid string"),
        ({"name": "a", "\x1b[2J": 1}, r"\x1b[2J: unknown field"),
    ],
)
def test_a_mistake_is_told_with_its_field(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    said = refused(tmp_path / "a.json", json.dumps(fields))
    assert words in said
    assert "\x1b" not in said


def test_many_mistakes_are_counted_and_ten_are_told(tmp_path: Path) -> None:
    said = refused(tmp_path / "a.json", json.dumps({f"n{k}": k for k in range(1000)}))
    assert "1001 mistake(s)" in said
    assert "... and 991 more" in said
    assert len(said.splitlines()) < 15


def test_a_value_that_was_read_already(tmp_path: Path) -> None:
    assert typed({"name": "a"}, tmp_path / "a", KIND, Header) == Header("a")
    assert json_value('{"a": [1, null]}', tmp_path / "a", KIND) == {"a": [1, None]}
    with pytest.raises(BadFile, match="JSONDecodeError"):
        json_value("{", tmp_path / "a", KIND)


def test_lines_that_are_no_objects_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"a": 1}', "", "[1]", "5", '{"b": NaN}', "[" * 50_000, '{"c": 2}', '{"d": ']
    path.write_bytes("\n".join(lines).encode() + b"\xff\xfe")
    assert read_json_lines(path, KIND) == [{"a": 1}, {"c": 2}]


def test_no_file_of_lines_is_no_lines(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "none", KIND) == []
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadFile, match="got a folder"):
        read_json_lines(tmp_path / "folder", KIND)
    with pytest.raises(NoFile, match="no file of this name"):
        read_json(tmp_path / "none", KIND, Header)


def test_a_name_that_stands_twice_among_many(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    names = [f'"n{k}": 1' for k in range(50_000)]
    path.write_text("{" + ", ".join([*names, '"last": 1', '"last": 2']) + "}")
    began = time.process_time()
    with pytest.raises(BadFile, match="the field 'last' is given twice"):
        read_json_value(path, KIND)
    assert time.process_time() - began < 2  # each counted among all: a minute
