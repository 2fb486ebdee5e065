"""JSON from outside: no name twice, no NaN, and typed by a schema of pydantic's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from mjp_privacy.core.fields import listed_mistakes
from mjp_privacy.core.gate.file_kind import BadFile, FileKind, is_there
from mjp_privacy.core.shown import shown

T = TypeVar("T")


def read_json(
    path: Path, kind: FileKind, schema: type[T], owners: Mapping[str, Any] | None = None
) -> T:
    """The content of a file as `schema`, a dataclass or TypedDict; each mistake in it is named.

    read_json(path, HEADER, UploadHeader, {"model": ModelArguments})

    owners  what is behind each nested field, to suggest names for misspelt fields inside it
    """
    return typed(read_json_value(path, kind), path, kind, schema, owners)


def typed(
    content: Any,
    path: Path,
    kind: FileKind,
    schema: type[T],
    owners: Mapping[str, Any] | None = None,
) -> T:
    """What was read from a file as `schema`; UserError with every mistake in it."""
    if not isinstance(content, Mapping):
        raise kind.refusal(path, f"{_json_kind(content)} where named fields were expected")
    try:
        return TypeAdapter(schema).validate_python(dict(content))
    except ValidationError as error:
        got = listed_mistakes(error, schema, owners or {})
        message = f"{shown(path)}: expected {kind.expected}; got {got}\n{kind.do}"
        raise BadFile(path, message, got) from error


def read_json_value(path: Path, kind: FileKind) -> Any:
    """The content of a JSON file, untyped."""
    return json_value(kind.text(path), path, kind)


def json_value(text: str, path: Path, kind: FileKind) -> Any:
    """The value of a JSON text that a file holds; `path` and `kind` are for messages."""
    marks: list[_NoNumber] = []

    def marked(word: str) -> _NoNumber:
        marks.append(_NoNumber(word))
        return marks[-1]

    with kind.reading(path):
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=marked)
    if marks:
        where = next(place for place, inner in _inside(value) if inner is marks[0])
        raise kind.refusal(path, f"{marks[0]}, which is no number in JSON", where)
    return value


class _NoNumber(str):
    """NaN, Infinity or -Infinity, until it is known which field holds it."""


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """All values in a JSON value, each with its place: ("noise.pos_embed", 0.1)."""
    left = [("", value)]
    while left:
        place, inner = left.pop()
        yield place, inner
        pairs: Iterable[tuple[Any, Any]] = ()
        if isinstance(inner, dict):
            pairs = inner.items()
        elif isinstance(inner, list):
            pairs = enumerate(inner)
        left += [(f"{place}.{name}" if place else str(name), part) for name, part in pairs]


def read_json_lines(path: Path, kind: FileKind) -> list[dict[str, Any]]:
    """All complete lines of a file with a JSON object in each; empty if there is no file.

    Lines that are no such object are left out: a killed process leaves one unfinished.
    """
    if not is_there(path):
        return []
    kind.check(path)
    with kind.reading(path), path.open(encoding="utf-8", errors="replace") as file:
        read = [json_object(text) for text in file]
    return [line for line in read if line is not None]


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a line of JSON is; None if it is anything else."""
    try:
        line = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the field {shown(twice)!r} is given twice")
    return fields


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def _json_kind(content: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(content), "a number")
