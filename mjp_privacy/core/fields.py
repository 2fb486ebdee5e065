"""Fields to a dataclass. A typo is an error that names the nearest field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid")
"""For dataclasses that are read from a file: a field that nobody knows is an error."""


def parse(kind: type[T], content: Mapping[str, Any], where: str, owners: Mapping[str, Any]) -> T:
    """Fields to a dataclass. `owners`: whose fields stand under which of its own."""
    try:
        return TypeAdapter(kind).validate_python(dict(content))
    except ValidationError as error:
        lines = [_explain(problem, kind, owners) for problem in error.errors()]
        raise UserError(f"{where} has {len(lines)} mistake(s):\n  " + "\n  ".join(lines)) from error


def _explain(problem: Any, kind: Any, owners: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "unexpected_keyword_argument":
        fields = sorted(_field_names(problem["loc"], kind, owners))
        known = f" Known: {', '.join(fields)}."
        hint = did_you_mean(str(problem["loc"][-1]), fields, known)
        return f"{place}: unknown field.{hint}"
    if problem["type"] == "missing":
        return f"{place}: this field is needed and was not given."
    return f"{place}: {problem['msg']}; got {problem['input']!r}."


def _field_names(location: tuple[Any, ...], kind: Any, owners: Mapping[str, Any]) -> set[str]:
    owner = owners.get(str(location[0]), kind) if len(location) > 1 else kind
    return {field.name for field in dataclasses.fields(owner)}
