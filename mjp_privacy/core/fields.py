"""From a mapping of fields to a checked dataclass. A misspelt field gets the nearest real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid")
"""For dataclasses that are read from a file: an unknown field is an error."""


def parse(kind: type[T], content: Mapping[str, Any], where: str, owners: Mapping[str, Any]) -> T:
    """The dataclass `kind` made from these fields; every mistake in them is listed in one error.

    where   names the file in error messages
    owners  the dataclass behind each nested field, such as {"client": ClientConfig}, to suggest
            names for misspelt fields inside it
    """
    try:
        return TypeAdapter(kind).validate_python(dict(content))
    except ValidationError as error:
        lines = [_explain(problem, kind, owners) for problem in error.errors()]
        raise UserError(f"{where} has {len(lines)} mistake(s):\n  " + "\n  ".join(lines)) from error


def _explain(problem: Any, kind: Any, owners: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "unexpected_keyword_argument":
        fields = sorted(_field_names(problem["loc"], kind, owners))
        all_fields = f" Known: {', '.join(fields)}."
        hint = did_you_mean(str(problem["loc"][-1]), fields, all_fields)
        return f"{place}: unknown field.{hint}"
    if problem["type"] == "missing":
        return f"{place}: this field is needed and was not given."
    return f"{place}: {problem['msg']}; got {problem['input']!r}."


def _field_names(location: tuple[Any, ...], kind: Any, owners: Mapping[str, Any]) -> set[str]:
    owner = owners.get(str(location[0]), kind) if len(location) > 1 else kind
    return {field.name for field in dataclasses.fields(owner)}
