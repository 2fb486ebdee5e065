"""Config files with a base and named `rows` over it, one of which is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name


def row_of(content: Mapping[str, Any], row: str | None, where: str) -> dict[str, Any]:
    """The base with the row's fields over it; its name gets the row's."""
    base = dict(content)
    rows = base.pop("rows", None) or {}
    if rows and row is None:
        raise UserError(
            f"{where} holds {len(rows)} rows: expected --row NAME, got none. "
            f"Rows: {', '.join(map(str, rows))}."
        )
    if row is None:
        return base
    if row not in rows:
        raise UserError(f"{where}: {unknown_name('row', row, [str(name) for name in rows])}")
    over = rows[row] or {}
    if not isinstance(over, Mapping):
        raise UserError(f"{where}, rows.{row}: expected fields over the base's, got {over!r}.")
    merged = _laid_over(base, over)
    merged["name"] = f"{base.get('name', '')}-{row}".strip("-")
    return merged


def _laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _laid_over(merged[key], value) if both else value
    return merged
