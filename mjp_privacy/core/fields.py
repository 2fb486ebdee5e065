"""From a mapping of fields to a checked dataclass. A misspelt field gets the nearest real one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import wraps
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.shown import shown

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""For dataclasses that are read from a file: an unknown field is an error, and so is NaN."""


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def schema(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked, as STRICT says.

    A wrong value is a UserError also where the class is called, as the command line and
    `dataclasses.replace` do.
    """
    made: Any = dataclass(frozen=True, config=STRICT)(cls)
    checked = made.__init__

    @wraps(checked)
    def initialised(self: Any, *values: Any, **fields: Any) -> None:
        try:
            checked(self, *values, **fields)
        except ValidationError as error:
            raise UserError(f"{cls.__name__} has {listed_mistakes(error, made, {})}") from error

    made.__init__ = initialised
    whole: type[T] = made
    return whole


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
    said, hint = problem["msg"].removeprefix("Value error, "), ""
    if problem["type"] == "dataclass_type":
        said = "Input should be named fields"
    if problem["type"] == "literal_error":
        hint = did_you_mean(str(problem["input"]), re.findall(r"'([^']+)'", problem["msg"]))
    return f"{place}: {shown(said)}; got {shown(repr(problem['input']), 100)}.{hint}"


def _field_names(location: tuple[Any, ...], kind: Any, owners: Mapping[str, Any]) -> set[str]:
    owner = owners.get(str(location[0]), kind) if len(location) > 1 else kind
    if dataclasses.is_dataclass(owner):
        return {field.name for field in dataclasses.fields(owner)}
    return set(getattr(owner, "__annotations__", {}))
