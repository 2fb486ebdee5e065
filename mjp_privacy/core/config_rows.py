"""Config files that hold a base and named `rows`; each row replaces some fields of the base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name


def row_of(content: Mapping[str, Any], row: str | None, where: str) -> dict[str, Any]:
    """The config of one row: the base, with the row's fields in place of the base's.

    The row's name is added to the config's: row J of `cifar10` is named `cifar10-J`. `where` names
    the file in error messages.
    """
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
    changes = rows[row] or {}
    if not isinstance(changes, Mapping):
        raise UserError(
            f"{where}, rows.{row}: expected fields that replace the base's, got {changes!r}."
        )
    fields = merged(base, changes)
    fields["name"] = f"{base.get('name', '')}-{row}".strip("-")
    return fields


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with these fields changed, also inside nested mappings."""
    fields = dict(base)
    for key, value in changes.items():
        both_nested = isinstance(value, Mapping) and isinstance(fields.get(key), Mapping)
        fields[key] = merged(fields[key], value) if both_nested else value
    return fields
