"""Fields to a dataclass. A typo is an error that names the nearest field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mjp_privacy.core.errors import UserError

T = TypeVar("T")


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
        near = get_close_matches(str(problem["loc"][-1]), fields, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(fields)}."
        return f"{place}: unknown field.{hint}"
    if problem["type"] == "missing":
        return f"{place}: this field is needed and was not given."
    return f"{place}: {problem['msg']}; got {problem['input']!r}."


def _field_names(location: tuple[Any, ...], kind: Any, owners: Mapping[str, Any]) -> set[str]:
    owner = owners.get(str(location[0]), kind) if len(location) > 1 else kind
    return {field.name for field in dataclasses.fields(owner)}
