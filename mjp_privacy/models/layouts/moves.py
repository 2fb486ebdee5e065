"""What rules are made of: the ways in which a tensor is reshaped, and rules for several layers."""

from __future__ import annotations

from torch import Tensor

from mjp_privacy.models.layouts.layout import Rule

PAIR = r"\.(weight|bias)"


def as_token(vector: Tensor) -> Tensor:
    """(…, D) as a token (…, 1, 1, D)."""
    return vector[..., None, None, :]


def as_table(rows: Tensor) -> Tensor:
    """(…, N+1, D) as a position table (…, 1, N+1, D)."""
    return rows.unsqueeze(-3)


def without_last_row(rows: Tensor) -> Tensor:
    """MJP's lookup table (…, N+2, D) without E_unk, its last row, as a position table."""
    return as_table(rows[..., :-1, :])


def last_row(rows: Tensor) -> Tensor:
    """E_unk (…, 1, 1, D), the last row of MJP's lookup table."""
    return as_table(rows[..., -1:, :])


def without_second_row(table: Tensor) -> Tensor:
    """DeiT's table (…, 1, N+2, D) without the distillation token's row."""
    return table[..., [0, *range(2, table.shape[-2])], :]


def second_row(table: Tensor) -> Tensor:
    """The distillation token's row (…, 1, 1, D) of DeiT's table."""
    return table[..., 1:2, :]


def transposed(matrix: Tensor) -> Tensor:
    """A projection (…, D, O) as a linear layer's weight (…, O, D)."""
    return matrix.mT


def block(prefix: str, names: dict[str, str]) -> tuple[Rule, ...]:
    """Rules for one block: own layer -> the library's, each with a weight and a bias."""
    return tuple(
        Rule(rf"{prefix}\.{theirs}{PAIR}", rf"blocks.\1.{own}.\2") for own, theirs in names.items()
    )


def query_key_value(prefix: str, query: str, key: str, value: str) -> tuple[Rule, ...]:
    """Rules that join the library's three layers into one."""
    return tuple(
        Rule(rf"{prefix}\.{theirs}{PAIR}", r"blocks.\1.attn.qkv.\2", part=part)
        for part, theirs in enumerate((query, key, value))
    )


def layers(names: dict[str, str]) -> tuple[Rule, ...]:
    """Rules for layers outside the blocks: own layer -> the library's."""
    return tuple(Rule(rf"{theirs}{PAIR}", rf"{own}.\1") for own, theirs in names.items())
