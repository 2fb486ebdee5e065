"""Bad values of a field, from its schema: wrong types, ranges and sizes; fields missing and extra.

for place, bad in bad_contents(UploadHeader, header): ...
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

LONG = "x" * 5000
CONTROLS = "a\x1b[2Jb\nc\x07\u202ed"
MISSING = object()
MANY_NAMES = {f"n{number}": 1 for number in range(10_000)}


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


DEEP = _deep(300)


@cache
def _many(value: Any) -> list[Any]:
    """The same list for every field: there are thousands."""
    return [value] * 100_000


@dataclass(frozen=True)
class BadValue:
    """A value and what is expected of a reader: `certain` is refused, others may be legal."""

    title: str
    value: Any
    certain: bool


@dataclass(frozen=True)
class BadContent:
    """A whole content with one bad field, whose path is `at`."""

    at: tuple[Any, ...]
    bad: BadValue
    whole: Any

    @property
    def place(self) -> str:
        """The field's path in words, such as grid.0.models."""
        return ".".join(map(str, self.at))

    @property
    def content(self) -> Any:
        """A copy of the content with the bad value in its place."""
        content = copy.deepcopy(self.whole)
        inner = content
        for part in self.at[:-1]:
            inner = inner[part]
        if self.bad.value is MISSING:
            inner.pop(self.at[-1], None)
        else:
            inner[self.at[-1]] = self.bad.value
        return content

    @property
    def field(self) -> str:
        """The field's own name, which a message has to hold."""
        return [part for part in self.place.split(".") if not part.isdigit()][-1]


def bad_contents(kind: Any, content: Mapping[str, Any]) -> Iterator[BadContent]:
    """The content with one field spoiled, for every field of the schema and of what is in it."""
    schema = TypeAdapter(kind).json_schema()
    yield from _spoiled(schema, schema.get("$defs", {}), content, content, ())


def _spoiled(
    schema: Mapping[str, Any], defs: Mapping[str, Any], here: Any, whole: Any, at: tuple[Any, ...]
) -> Iterator[BadContent]:
    schema = _resolved(schema, defs)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        place = (*at, name)
        certain = name in required
        yield BadContent(place, BadValue("missing", MISSING, certain), whole)
        for value in bad_values(field, defs, name):
            yield BadContent(place, value, whole)
        inner = here.get(name) if isinstance(here, Mapping) else None
        if isinstance(inner, Mapping):
            for option in _options(field, defs):
                if "properties" in option:
                    yield from _spoiled(option, defs, inner, whole, place)
                elif isinstance(option.get("additionalProperties"), dict) and inner:
                    key = next(iter(inner))
                    item = option["additionalProperties"]
                    yield from _spoiled(item, defs, inner[key], whole, (*place, key))
        if isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            for option in _options(field, defs):
                item = option.get("items")
                if isinstance(item, dict):
                    yield from _spoiled(item, defs, inner[0], whole, (*place, 0))
    if "properties" in schema:
        yield BadContent((*at, "surprise"), BadValue("extra", 1, True), whole)


def bad_values(
    field: Mapping[str, Any], defs: Mapping[str, Any], name: str = ""
) -> Iterator[BadValue]:
    """Values that this field should refuse, or at least survive."""
    options = list(_options(field, defs))
    kinds = {str(option.get("type", "any")) for option in options}
    anything = "any" in kinds
    closed = any("enum" in option or "const" in option for option in options)
    numbers = bool(kinds & {"integer", "number"})
    for title, value, kind in (
        ("a list", [1, "x", None], "array"),
        ("an empty list", [], "array"),
        ("a mapping", {"a": 1}, "object"),
        ("null", None, "null"),
        ("true", True, "boolean"),
        ("a number", 5, "numbers"),
        ("a text", "five", "string"),
    ):
        fits = numbers if kind == "numbers" else kind in kinds
        # One number stands for three in some fields; a list where one is known may be of texts.
        certain = not anything and (not fits or (title == "a list" and kind in kinds))
        if closed and kind == "string":
            certain = True
        yield BadValue(title, value, certain)
    yield BadValue("a text of 5,000", LONG, not anything)
    yield BadValue("control characters", CONTROLS, closed or not (anything or "string" in kinds))
    yield BadValue("an empty text", "", closed or not (anything or "string" in kinds))
    yield BadValue("deep", DEEP, not anything)
    yield BadValue("nan", math.nan, True)
    yield BadValue("infinity", math.inf, True)
    yield BadValue("a text that is a number", "5", not anything and "string" not in kinds)
    if numbers or anything:
        bounded = numbers and name not in ("mean", "seed")
        yield BadValue("-1", -1, bounded)
        yield BadValue("zero", 0, False)
        yield BadValue("1.5", 1.5, kinds <= {"integer", "null"})
        yield BadValue("10^9", 10**9, False)
        yield BadValue("2^63", 2**63, "number" not in kinds and numbers)
        yield BadValue("10^30", 10**30, "number" not in kinds and numbers)
        yield BadValue("10^400", 10**400, numbers)
        yield BadValue("-10^30", -(10**30), numbers)
    for option in options:
        if option.get("type") == "array":
            item = option.get("items") or next(iter(option.get("prefixItems", [])), {})
            for value in _wrong_items(item, defs):
                yield BadValue(f"a list of {value.title}", [value.value], value.certain)
            yield BadValue("a list of 10^5", _many(_plain(item, defs)), False)
        if option.get("type") == "object" and "properties" not in option:
            yield BadValue("a name of 5,000", {LONG: 1}, False)
            yield BadValue("10^4 names", MANY_NAMES, False)
            inner = option.get("additionalProperties")
            if isinstance(inner, dict):
                for value in _wrong_items(inner, defs):
                    yield BadValue(f"entry {value.title}", {"entry": value.value}, value.certain)


def _wrong_items(item: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[BadValue]:
    wanted = {"null", "a text", "nan", "-1", "10^30", "a mapping", "true", "control characters"}
    wanted |= {"a text of 5,000", "an empty text", "a list"}
    for value in bad_values({**item}, defs) if item else ():
        if value.title in wanted:
            yield value


def _plain(item: Mapping[str, Any], defs: Mapping[str, Any]) -> Any:
    kinds = {option.get("type") for option in _options(item, defs)} if item else set()
    return 1 if kinds & {"integer", "number"} else "x"


def _options(field: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    field = _resolved(field, defs)
    if "anyOf" in field:
        for option in field["anyOf"]:
            yield from _options(option, defs)
        return
    if "enum" in field or "const" in field:
        yield {"type": "string", **field}
        return
    yield field


def _resolved(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema or len(schema.get("allOf", ())) == 1:
        inner = schema.get("allOf", [schema])[0]
        schema = defs[inner["$ref"].rsplit("/", 1)[1]] if "$ref" in inner else inner
    return schema
