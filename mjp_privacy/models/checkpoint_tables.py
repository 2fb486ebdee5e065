"""The tables of a checkpoint that a model reads otherwise: positions resampled, E_unk filled in."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models.mjp_vit import MJPVisionTransformer

UnknownInit = Literal["mean_position", "zeros", "random"]


def grid_of(table: Tensor, name: str, source: str = "") -> int:
    """Patches along a side of a table (1, N+1, D); UserError where it is of no square grid.

    source: what the message begins with, such as the file's name
    """
    patches = table.shape[1] - 1
    side = math.isqrt(max(patches, 0))
    if table.shape[0] != 1 or patches < 1 or side * side != patches:
        begin = f"{source}: " if source else ""
        raise UserError(
            f"{begin}{name} has {table.shape[1]} rows: expected one class row and a square grid of "
            f"patches, in the shape (1, rows, width); got {tuple(table.shape)}."
        )
    return side


def resampled(table: Tensor, grid: int, name: str, notes: list[str], source: str = "") -> Tensor:
    """The table (1, N+1, D) for a grid of another side, with a note; as it is for its own."""
    table = _wide(table)
    old = grid_of(table, name, source)
    if old == grid:
        return table
    notes.append(f"{name} resampled from {old}×{old} to {grid}×{grid} (bicubic, antialiased)")
    class_row, rows = table[:, :1], table[:, 1:]
    picture = rows.float().reshape(1, old, old, -1).permute(0, 3, 1, 2)
    picture = interpolate(picture, size=(grid, grid), mode="bicubic", antialias=True)
    rows = picture.permute(0, 2, 3, 1).reshape(1, grid * grid, -1).to(table.dtype)
    return torch.cat((class_row, rows), dim=1)


def _wide(table: Tensor) -> Tensor:
    """The table in float32, or in float64 where it is: files may store half precision."""
    return table if table.dtype == torch.float64 else table.float()


def position_notes(model: MJPVisionTransformer, state: dict[str, Tensor], notes: list[str]) -> None:
    """Note what of a checkpoint's embeddings the model does not use."""
    table = state.get("pos_embed")
    if model.position_embedding != "learned" and table is not None and _is_learned(table):
        notes.append(
            "position embeddings removed from weights that were trained with them "
            "(the paper trained this model without)"
        )
    if model.unk_embed is None and "unk_embed" in state:
        notes.append("the checkpoint's unknown embedding is not used")


def _is_learned(table: Tensor) -> bool:
    """Whether a table holds anything; of an outline that is not known."""
    return not table.is_meta and bool(table.any())


def filled_unknown(
    state: dict[str, Tensor], unknown_init: UnknownInit | None, source: str, notes: list[str]
) -> Tensor:
    """E_unk (1, 1, D) for a checkpoint without one, as `unknown_init` says, with a note."""
    if unknown_init is None:
        raise UserError(
            f"{source} holds no unknown embedding (unk_embed, or an MJP table pos_embed.weight "
            "with N+2 rows), which this model needs. Give an MJP checkpoint, or say how to fill "
            "it: `unknown_init: mean_position` (the row will say so)."
        )
    mean = _wide(state["pos_embed"])[:, 1:].mean(1, keepdim=True)
    if unknown_init == "zeros":
        notes.append("unk_embed is not trained: set to zeros")
        return torch.zeros_like(mean)
    if unknown_init == "random":
        notes.append("unk_embed is not trained: drawn from N(0, 1), torch's start of a table")
        drawn = torch.randn(mean.shape, generator=torch_generator("unknown embedding"))
        return drawn.to(mean)
    notes.append("unk_embed is not trained: set to the mean position embedding")
    return mean
