"""From a mapping of fields to a checked dataclass. A misspelt field gets the nearest real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.shown import shown

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""For dataclasses that are read from a file: an unknown field is an error, and so is NaN."""

MOST = 10
"""How many mistakes a message lists."""


def parse(kind: type[T], content: Mapping[str, Any], where: str, owners: Mapping[str, Any]) -> T:
    """The dataclass `kind` made from these fields; every mistake in them is listed in one error.

    where   names the file in error messages
    owners  the dataclass behind each nested field, such as {"client": ClientConfig}, to suggest
            names for misspelt fields inside it
    """
    try:
        return TypeAdapter(kind).validate_python(dict(content))
    except ValidationError as error:
        raise UserError(f"{where} has {listed_mistakes(error, kind, owners)}") from error


def listed_mistakes(error: ValidationError, kind: Any, owners: Mapping[str, Any]) -> str:
    """What pydantic found, as the end of a sentence and a line for each mistake."""
    lines = [_explain(problem, kind, owners) for problem in error.errors(include_url=False)]
    count = len(lines)
    if count > MOST:
        lines = [*lines[:MOST], f"... and {count - MOST} more"]
    return f"{count} mistake(s):\n  " + "\n  ".join(lines)


def _explain(problem: Any, kind: Any, owners: Mapping[str, Any]) -> str:
    place = shown(".".join(str(part) for part in problem["loc"]), 100)
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        fields = sorted(_field_names(problem["loc"], kind, owners))
        all_fields = f" Known: {', '.join(fields)}."
        hint = did_you_mean(str(problem["loc"][-1]), fields, all_fields)
        return f"{place}: unknown field.{hint}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{place}: this field is needed and was not given."
    return f"{place}: {shown(problem['msg'])}; got {shown(repr(problem['input']), 100)}."


def _field_names(location: tuple[Any, ...], kind: Any, owners: Mapping[str, Any]) -> set[str]:
    owner = owners.get(str(location[0]), kind) if len(location) > 1 else kind
    if dataclasses.is_dataclass(owner):
        return {field.name for field in dataclasses.fields(owner)}
    return set(getattr(owner, "__annotations__", {}))
