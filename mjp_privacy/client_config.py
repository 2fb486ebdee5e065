"""The client of a cell: how it makes its update, and how that enters a cell's identity."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from mjp_privacy.errors import UserError

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class ClientConfig:
    """How the client makes its gradient. Each field is a column of every row."""

    mode: Literal["eval", "train"] = "eval"
    loss: Literal["cross_entropy"] = "cross_entropy"
    batch: int = 1
    dal: bool = False
    """Add dal_lambda * L_DAL over the unmasked positions to the loss."""
    dal_lambda: float = 0.01


FIRST_FIELDS = ("mode", "loss", "batch", "dal", "dal_lambda")
"""In every cell's identity; fields that came later enter it where they are not at their default,
so that runs made before them stay finished."""


def client_identity(client: ClientConfig) -> dict[str, Any]:
    """What of the client decides a cell's key and run_id."""
    return {
        field.name: getattr(client, field.name)
        for field in dataclasses.fields(client)
        if field.name in FIRST_FIELDS or getattr(client, field.name) != field.default
    }


def check_client(client: ClientConfig, block: int, where: str) -> None:
    """Ranges, and that a block holds whole client steps. `where` ends before the field's name."""
    if client.batch < 1:
        raise UserError(f"{where}.batch: expected at least 1, got {client.batch}.")
    if block % client.batch:
        raise UserError(
            f"{where.removesuffix('client')}block: a block holds whole client steps; expected a "
            f"multiple of client.batch ({client.batch}), got {block}."
        )
    weight = client.dal_lambda
    if not 0 <= weight < math.inf:
        raise UserError(f"{where}.dal_lambda: expected 0 or a number above, got {weight}.")
