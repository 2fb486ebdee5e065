"""JSON from outside: no name twice, no NaN, and typed by a schema of pydantic's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from mjp_privacy.core.fields import listed_mistakes
from mjp_privacy.core.gate.file_kind import BadFile, FileKind, is_there
from mjp_privacy.core.shown import shown

T = TypeVar("T")


def read_json(path: Path, kind: FileKind, schema: type[T]) -> T:
    """The content of a file as `schema`, a dataclass or TypedDict; each mistake in it is named.

    read_json(path, HEADER, UploadHeader)
    """
    return typed(read_json_value(path, kind), path, kind, schema)


def typed(content: Any, path: Path, kind: FileKind, schema: type[T]) -> T:
    """What was read from a file as `schema`; UserError with every mistake in it."""
    if not isinstance(content, Mapping):
        raise kind.refusal(path, f"{_json_kind(content)} where named fields were expected")
    try:
        return TypeAdapter(schema).validate_python(dict(content))
    except ValidationError as error:
        got = listed_mistakes(error, schema, {})
        message = f"{shown(path)}: expected {kind.expected}; got {got}\n{kind.do}"
        raise BadFile(path, message, got) from error


def read_json_value(path: Path, kind: FileKind) -> Any:
    """The content of a JSON file, untyped."""
    return json_value(kind.text(path), path, kind)


def json_value(text: str, path: Path, kind: FileKind) -> Any:
    """The value of a JSON text that a file holds; `path` and `kind` are for messages."""
    with kind.reading(path):
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)


def read_json_lines(path: Path, kind: FileKind) -> list[dict[str, Any]]:
    """All complete lines of a file with a JSON object in each; empty if there is no file.

    Lines that are no such object are left out: a killed process leaves one unfinished.
    """
    if not is_there(path):
        return []
    kind.check(path)
    with kind.reading(path), path.open(encoding="utf-8", errors="replace") as file:
        read = [_object(text) for text in file]
    return [line for line in read if line is not None]


def _object(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {shown(twice)!r} is given twice")
    return fields


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def _json_kind(content: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(content), "a number")
