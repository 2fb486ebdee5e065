"""Bad values of a field, from its schema: wrong types, ranges and sizes; fields missing and extra.

for case in bad_contents(UploadHeader, header): ...
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter

LONG = "x" * 5000
CONTROLS = "a\x1b[2Jb\nc\x07\u202ed"
MISSING = object()
DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]
NUMBERS = {"integer", "number"}


Bad = tuple[str, Any, bool]
"""A value by its title, and whether it is certain to be refused: others may be legal."""


class BadContent(NamedTuple):
    """A whole content with one bad value in it."""

    at: tuple[Any, ...]  # the path of the field: ("grid", 0, "models")
    title: str
    content: Any
    certain: bool

    @property
    def field(self) -> str:
        """The field's own name, which a message has to hold."""
        return next(str(part) for part in reversed(self.at) if not isinstance(part, int))


def bad_contents(kind: Any, content: Mapping[str, Any]) -> Iterator[BadContent]:
    """The content with one field spoiled, for every field of the schema and of what is in it."""
    schema = TypeAdapter(kind).json_schema()
    defs = schema.get("$defs", {})

    def with_bad(at: tuple[Any, ...], bad: Bad) -> BadContent:
        title, value, certain = bad
        inner = whole = copy.deepcopy(content)
        for part in at[:-1]:
            inner = inner[part]
        if value is MISSING:
            inner.pop(at[-1], None)
        else:
            inner[at[-1]] = value
        return BadContent(at, title, whole, certain)

    def spoiled(schema: Any, here: Any, at: tuple[Any, ...]) -> Iterator[BadContent]:
        schema = _resolved(schema, defs)
        fields = schema.get("properties", {})
        for name, field in fields.items():
            place, inner = (*at, name), here.get(name) if isinstance(here, Mapping) else None
            missing = "missing", MISSING, name in schema.get("required", ())
            for bad in (missing, *bad_values(field, defs, name)):
                yield with_bad(place, bad)
            for option in _options(field, defs):
                if isinstance(inner, Mapping) and "properties" in option:
                    yield from spoiled(option, inner, place)
                elif isinstance(inner, Mapping) and inner:
                    key, item = next(iter(inner)), option.get("additionalProperties")
                    if isinstance(item, dict):
                        yield from spoiled(item, inner[key], (*place, key))
                elif isinstance(inner, list) and inner and isinstance(option.get("items"), dict):
                    yield from spoiled(option["items"], inner[0], (*place, 0))
        if fields:
            yield with_bad((*at, "surprise"), ("extra", 1, True))

    yield from spoiled(schema, content, ())


def bad_values(field: Any, defs: Mapping[str, Any], name: str = "") -> Iterator[Bad]:
    """Values that this field should refuse, or at least survive."""
    options = list(_options(field, defs))
    kinds = {str(option.get("type", "any")) for option in options}
    known = "any" not in kinds
    number, text = bool(kinds & NUMBERS), "string" in kinds
    closed = any("enum" in option or "const" in option for option in options)
    fits = {"a list": "array", "a mapping": "object", "null": "null", "true": "boolean"}
    for title, value, certain in (
        ("a list", [1, "x", None], known),
        ("a mapping", {"a": 1}, known),
        ("null", None, known),
        ("true", True, known),
        ("a number", 5, known and not number),
        ("a text", "five", closed or (known and not text)),
        ("a text of 5,000", LONG, known),
        ("control characters", CONTROLS, closed or (known and not text)),
        ("an empty text", "", closed or (known and not text)),
        ("a text that is a number", "5", known and not text),
        ("deep", DEEP, known),
        ("nan", math.nan, True),
        ("infinity", math.inf, True),
        ("-1", -1, number and name not in ("mean", "seed")),
        ("1.5", 1.5, number and kinds <= {"integer", "null"}),
        ("10^30", 10**30, number and "number" not in kinds),
        ("10^400", 10**400, number),
    ):
        is_legal = title in fits and fits[title] in kinds and title != "a list"
        yield title, value, certain and not is_legal
    for option in options:
        items = option.get("items") or next(iter(option.get("prefixItems", [])), None)
        for inner, wrapped in (
            (items, lambda value: [value]),
            (option.get("additionalProperties"), lambda value: {"entry": value}),
        ):
            for title, value, certain in (
                bad_values(inner, defs) if isinstance(inner, dict) and inner else ()
            ):
                if title not in ("1.5", "infinity", "deep", "a number"):
                    yield f"an entry: {title}", wrapped(value), certain


def _options(field: Any, defs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    field = _resolved(field, defs)
    for option in field.get("anyOf", ()):
        yield from _options(option, defs)
    if "anyOf" not in field:
        yield {"type": "string", **field} if {"enum", "const"} & field.keys() else field


def _resolved(schema: Any, defs: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema or len(schema.get("allOf", ())) == 1:
        inner = schema.get("allOf", [schema])[0]
        schema = defs[inner["$ref"].rsplit("/", 1)[1]] if "$ref" in inner else inner
    resolved: Mapping[str, Any] = schema
    return resolved
