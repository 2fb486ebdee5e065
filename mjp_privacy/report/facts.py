"""The facts of a cell: whose they are, what they are where nobody wrote them, and how they read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

Scalar = str | float | int | bool | None

DEFAULTS: Mapping[str, Scalar] = {
    **{"role": "attack", "uploads": 1, "plain_share": 0.0, "mask": "image", "augment": "none"},
    **{"withhold": "", "positions": "own", "position_noise": 0.0, "server_lr": 0.0},
    **{"upload": "gradient", "lr": 0.1, "weight_decay": 0.0, "dal_lambda": 0.01},
    **{"defenses": "", "steps": 1, "optimizer": "sgd", "momentum": 0.0},
    **{"pseudo_gradient": "exact"},
}
"""What a cell means that does not say it, so that older runs stand beside newer ones."""

CLIENT_FACTS = (
    *("mode", "loss", "batch", "dal", "dal_lambda", "plain_share", "mask", "augment"),
    *("withhold", "positions", "position_noise", "server_lr", "upload", "lr", "weight_decay"),
    *("defenses", "steps", "optimizer", "momentum", "pseudo_gradient"),
)
"""Who is attacked, besides the model; ClientConfig's fields."""

ATTACK_FACTS = frozenset(
    (
        *("run_id", "cell_key", "attack", "attack_name", "attack_options", "engine", "victim"),
        *("role", "uploads", "paper_row", "notes", "status", "reason", "planned_images"),
    )
)
"""Who attacks, and what became of it: all that may differ between two attacks on one thing."""

COMMAND_FACTS = frozenset(("data", "data_is_papers", "labels", "true_labels", "lpips"))
"""Of the command that ran the cell; a later command on the same run may word them otherwise."""

MODEL_FACTS = frozenset(
    (
        *("model", "architecture", "checkpoint", "checkpoint_sha", "trained_gamma", "first_block"),
        *("position_embedding", "size", "mean", "std", "resize", "interpolation"),
    )
)


def fact(cell: Mapping[str, Any], key: str) -> Scalar:
    """A cell's fact as one value; lists of words are joined, other structures are for the notes."""
    value = cell.get(key)
    if isinstance(value, (list, tuple)):
        return " + ".join(map(str, value))
    if key == "withhold" and isinstance(value, str):
        return value.replace(", ", " + ")  # facts in words are parted by commas
    if value is None or not isinstance(value, (str, float, int, bool)):
        return DEFAULTS.get(key)
    return value


def target_of(cell: Mapping[str, Any]) -> tuple[tuple[str, Scalar], ...]:
    """What is attacked: every fact but the attack's own and the command's.

    A fact that nobody listed above tells two targets apart: two different clients never become
    one, and the price of a forgotten attack fact is a group that falls in two.
    """
    others = ATTACK_FACTS | COMMAND_FACTS
    keys = sorted({*cell, *DEFAULTS} - others)
    return tuple((key, value) for key in keys if (value := fact(cell, key)) is not None)


def scalar_text(value: Any) -> str:
    """`–` for what is missing, yes or no, numbers without needless digits."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def client_text(cell: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The facts of `keys` in words; those that have their default are not worth words."""
    parts = []
    for key in keys:
        value = fact(cell, key)
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
