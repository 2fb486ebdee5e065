"""The facts of a cell: whose they are, what they are where nobody wrote them, and how they read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mjp_privacy.experiment.facts import (
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
"""What a cell means that does not say it, so that older runs stand beside newer ones."""

CLIENT_FACTS = columns_of(ClientFacts)
"""Who is attacked, besides the model."""

ATTACK_FACTS = frozenset((*columns_of(AttackFacts), *columns_of(OutcomeFacts)))
"""Who attacks, and what became of it: all that may differ between two attacks on one thing."""

COMMAND_FACTS = frozenset(columns_of(CommandFacts))
MODEL_FACTS = frozenset(columns_of(ModelFacts))


def fact(columns: Mapping[str, Any], key: str) -> Scalar:
    """A column as one value; lists of words are joined, other structures are for the notes."""
    value = columns.get(key)
    if isinstance(value, (list, tuple)):
        return " + ".join(map(str, value))
    if key == "withhold" and isinstance(value, str):
        return value.replace(", ", " + ")  # facts in words are parted by commas
    if value is None or not isinstance(value, (str, float, int, bool)):
        return DEFAULTS.get(key)
    return value


def target_of(cell: CellFacts) -> tuple[tuple[str, Scalar], ...]:
    """What is attacked: every fact but the attack's own and the command's.

    A fact that no part of `CellFacts` knows tells two targets apart: two different clients never
    become one.
    """
    keys = sorted({*cell.columns, *DEFAULTS} - ATTACK_FACTS - COMMAND_FACTS)
    return tuple((key, value) for key in keys if (value := fact(cell.columns, key)) is not None)


def scalar_text(value: Any) -> str:
    """`–` for what is missing, yes or no, numbers without needless digits."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def client_text(columns: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The columns of `keys` in words; those that have their default are not worth words."""
    parts = []
    for key in keys:
        value = fact(columns, key)
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        if missing or (key in DEFAULTS and value == DEFAULTS[key]):
            continue
        if key == "dal":
            parts += ["DAL in the loss"] if value else []
        else:
            text = value.replace("_", " ") if key == "upload" else scalar_text(value)  # type: ignore[union-attr]
            parts.append(f"{key.replace('_', ' ')} {text}")
    return ", ".join(parts) or "–"


def options_text(options: Any) -> str:
    """Options of an attack, stored as JSON: `prior=fitted, steps=300`."""
    try:
        known = json.loads(options)
    except (TypeError, ValueError):
        return scalar_text(options)
    if not isinstance(known, dict):
        return scalar_text(options)
    parts = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in known.items()
    ]
    return ", ".join(parts) or "–"
