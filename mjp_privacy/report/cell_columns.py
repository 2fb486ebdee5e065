"""Which facts of a cell describe client, attack and model, their defaults, and their wording."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mjp_privacy.experiment.cell_facts import (
    AttackFacts,
    CellFacts,
    ClientFacts,
    CommandFacts,
    ModelFacts,
    OutcomeFacts,
    columns_of,
    defaults_of,
)

Scalar = str | float | int | bool | None

DEFAULTS: Mapping[str, Scalar] = {"role": "attack", "uploads": 1, **defaults_of(ClientFacts)}
"""The values of facts that a cell does not state, so that older runs compare with newer ones."""

CLIENT_FACTS = columns_of(ClientFacts)
"""Facts that describe the attacked client, apart from its model."""

ATTACK_FACTS = frozenset((*columns_of(AttackFacts), *columns_of(OutcomeFacts)))
"""Facts of the attack and its outcome; they are no part of the target that is attacked."""

COMMAND_FACTS = frozenset(columns_of(CommandFacts))
MODEL_FACTS = frozenset(columns_of(ModelFacts))


def fact(columns: Mapping[str, Any], key: str) -> Scalar:
    """The value of a column; lists are joined by ` + `, what is no scalar gives the default."""
    value = columns.get(key)
    if isinstance(value, (list, tuple)):
        return " + ".join(map(str, value))
    if key == "withhold" and isinstance(value, str):
        return value.replace(", ", " + ")  # stored as words separated by commas
    if value is None or not isinstance(value, (str, float, int, bool)):
        return DEFAULTS.get(key)
    return value


def target_of(cell: CellFacts) -> tuple[tuple[str, Scalar], ...]:
    """What is attacked: every fact except those of the attack and of the command.

    Facts that `CellFacts` has no field for count as well, so that two different clients are never
    taken for one.
    """
    keys = sorted({*cell.columns, *DEFAULTS} - ATTACK_FACTS - COMMAND_FACTS)
    return tuple((key, value) for key in keys if (value := fact(cell.columns, key)) is not None)


def scalar_text(value: Any) -> str:
    """A value as text: `–` if it is missing, yes or no, a float with at most six digits."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def client_text(columns: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The columns `keys` in words, without missing values and defaults.

    For example `DAL in the loss, augment flip`, or `–` if nothing is left.
    """
    parts = []
    for key in keys:
        value = fact(columns, key)
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        if missing or (key in DEFAULTS and value == DEFAULTS[key]):
            continue
        if key == "dal":
            parts += ["DAL in the loss"] if value else []
        else:
            text = str(value).replace("_", " ") if key == "upload" else scalar_text(value)
            parts.append(f"{key.replace('_', ' ')} {text}")
    return ", ".join(parts) or "–"


def options_text(options: Any) -> str:
    """Options of an attack, stored as JSON, in words: `prior=fitted, steps=300`."""
    try:
        parsed = json.loads(options)
    except (TypeError, ValueError):
        return scalar_text(options)
    if not isinstance(parsed, dict):
        return scalar_text(options)
    parts = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in parsed.items()
    ]
    return ", ".join(parts) or "–"
