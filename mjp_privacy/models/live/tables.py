"""A live network's table of positions: which parameter it is, which rows are the patches', and how
many patches it shows the pictures to have.

A table is known by its name, as every library looked at has it, or by what it does: that its
gradient and the patch embedding's fulfil the patch equation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import Size
from mjp_privacy.models.jigsaw import Grid, to_patches
from mjp_privacy.models.network_parts import (
    HOLDS,
    convolution_of,
    gradients_of,
    kind_of,
    misfit,
    picture_like,
    takes,
)

POSITIONS = re.compile(r"pos(?!t)")
"""What a table of positions has in its name in every library looked at."""
MOST_OTHERS = 5
"""Rows of a table of positions that are not of patches: a class token's and four registers'."""
MOST_ROWS = 128
"""Rows of patches that a table of rows has at most: of 2,048 px in patches of 16."""


class Positions(NamedTuple):
    """What a live network adds to its patches."""

    grid: Grid
    table: nn.Parameter | None
    before: int
    """Rows of the table before the patches'."""
    is_shown: bool
    """Whether the network or the user says how many patches stand beside and below each other; else
    they are taken for a square's."""


def positions_of(
    module: nn.Module,
    projection: nn.Conv2d,
    img_size: Size | None,
    answer: Callable[[Any], Tensor],
) -> Positions:
    """The table of positions of a network, where it has one, and its pictures' patches.

    answer  what is wanted of that which the network returns
    """
    patch = int(projection.kernel_size[0])

    def tried(table: nn.Parameter) -> Positions | None:
        """The table with the rows for which the equation holds; None where it holds for none."""
        shown = _grid(module, table, patch, img_size)
        grid = shown or _square(table)
        if not 0 <= _rows(table) - grid.patches <= MOST_OTHERS:
            return None
        pixels = grid.pixels(patch)
        x = picture_like(projection.weight.new_empty(1, projection.in_channels, *pixels))
        try:
            sent, total = gradients_of(module.eval(), x, [table, projection.weight], answer)
        except Exception:  # of a size that it does not take, which the caller will meet
            return None
        if sent is None or total is None:
            return None
        rows, patches = sent.reshape(-1, sent.shape[-1]), to_patches(x[0], patch)
        for before in range(len(rows) - len(patches) + 1):
            of_patches = rows[before : before + len(patches)]
            if misfit(of_patches, patches, total.flatten(1)) <= HOLDS:
                return Positions(grid, table, before, shown is not None)
        return None

    named = named_tables(module, projection.out_channels)
    if shown := _rows_by_columns(module, named, projection):
        return Positions(shown, None, 0, True)
    if len(named) > 1:
        raise UserError(
            f"{kind_of(module)}: expected one table of positions, or one of rows and one of "
            f"columns, got {', '.join(named)}. Give a network that adds one table to its patches."
        )
    for table in named.values():
        if (found := tried(table)) is not None:
            return found
        shown = _grid(module, table, patch, img_size)
        grid, given = shown or _square(table), _grid(module, None, patch, img_size)
        others = given is not None and given != grid and not takes(module, projection, grid)
        if given is not None and others and takes(module, projection, given):
            return Positions(given, None, 0, True)  # it is of something else, as of rows alone
        return Positions(grid, table, _rows(table) - grid.patches, shown is not None)
    for table in other_tables(module, projection.out_channels):
        if (found := tried(table)) is not None:
            return found
    if (shown := _grid(module, None, patch, img_size)) is None:
        raise UserError(
            f"{kind_of(module)}: expected the size of the client's pictures, since no parameter is "
            f"added to the embedded picture as a table of positions is; got {img_size}. Give "
            "img_size=…, a side or (height, width); or, if the network flips, normalises or scales "
            "pictures or tokens itself, the network behind that."
        )
    return Positions(shown, None, 0, True)


def likely_grids(
    module: nn.Module, width: int, patch: int, img_size: Size | None
) -> tuple[list[Grid], str]:
    """How many patches of this side a network's pictures may have, the likeliest first, and, where
    no more than a guess says so, what does not show it."""
    named = named_tables(module, width)
    of = [*named.values()] if len(named) == 1 else []
    tables = of if named else [None, *other_tables(module, width)]
    grids = [_grid(module, table, patch, img_size) or _square(table) for table in tables or [None]]
    is_shown = bool(of) or _grid(module, None, patch, img_size) is not None
    several = f"none of {', '.join(named)}" if named else "no table of positions"
    return [*dict.fromkeys(grid for grid in grids if grid.patches)], "" if is_shown else several


def named_tables(module: nn.Module, width: int) -> dict[str, nn.Parameter]:
    """What is named as a table of positions; nothing where positions are told otherwise, as by
    rotation."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if POSITIONS.search(name) and parameter.shape[-1] == width
        if parameter.numel() > width  # else of a class token
    }


def other_tables(module: nn.Module, width: int) -> list[nn.Parameter]:
    """What may be a table of positions under another name: parameters of so many columns that are
    no layer's weights."""
    layers = (nn.Linear, nn.MultiheadAttention, nn.modules.conv._ConvNd)
    return [
        parameter
        for part in module.modules()
        if not isinstance(part, layers)
        for parameter in part._parameters.values()
        if parameter is not None and parameter.ndim > 1
        if parameter.shape[-1] == width and parameter.numel() > width
    ]


def _rows(table: nn.Parameter) -> int:
    return table[..., 0].numel()


def _rows_by_columns(
    module: nn.Module, tables: dict[str, nn.Parameter], projection: nn.Conv2d
) -> Grid | None:
    """The patches of a network that adds a table of rows and one of columns, whose gradients are
    sums over patches; None of another network, as of one that stretches its tables."""
    counts = [_rows(table) for table in tables.values()]
    if len(counts) != 2 or max(counts) > MOST_ROWS:
        return None
    for rows, columns in (counts, counts[::-1]):
        grid, larger = Grid(rows, columns), Grid(rows + 1, columns + 1)
        if takes(module, projection, grid) and not takes(module, projection, larger):
            return grid
    return None


def _grid(
    module: nn.Module, table: nn.Parameter | None, patch: int, img_size: Size | None
) -> Grid | None:
    """The patches of the pictures that a network is made for, as its table's shape, its config or
    the size that is given shows them; None where nothing does."""
    if table is not None and table.ndim == 4 and min(table.shape[1:3]) > 1:
        return Grid(*table.shape[1:3])
    rows = None if table is None else _rows(table)
    stated = [_stated_size(part) for part in module.modules()]
    # Without a table pictures may be of any size.
    for size in [img_size, *stated] if rows is None else [*stated, img_size]:
        grid = Grid(0, 0) if size is None else Grid.of(size, patch)
        if grid.patches and (rows is None or 0 <= rows - grid.patches <= MOST_OTHERS):
            return grid
    return None


def _square(table: nn.Parameter | None) -> Grid:
    """The largest square of patches that a table has rows for; of none without a table."""
    side = 0 if table is None else math.isqrt(_rows(table))
    return Grid(side, side)


def _stated_size(part: nn.Module) -> Size | None:
    """The size of pictures that a part's config states, as transformers' do."""
    size = getattr(getattr(part, "config", None), "image_size", None)
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return size if isinstance(size, int) else None


# tables that are maps -----------------------------------------------------------------------------


class ChannelsLast(nn.Module):
    """Shows a table (1, H, W, D) as the map (1, D, H, W) that a network adds to its own."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.movedim(-1, 1)

    def right_inverse(self, table: Tensor) -> Tensor:
        """The table as it is kept."""
        return table.movedim(1, -1).contiguous()


def tables_by_rows(whole: nn.Module) -> set[str]:
    """Keep, in place, tables of positions that are maps (1, D, H, W) as (1, H, W, D); the names of
    these parameters, whose values stand elsewhere now."""
    projection, names = convolution_of(whole), set[str]()
    if projection is None or named_tables(whole, projection.out_channels):
        return names
    for name, parameter in list(whole.named_parameters()):
        inner, _, own = name.rpartition(".")
        holder = whole.get_submodule(inner)
        is_map = parameter.ndim == 4 and parameter.shape[:2] == (1, projection.out_channels)
        if is_map and parameter[0, 0].numel() > 1 and not isinstance(holder, nn.Conv2d):
            parametrize.register_parametrization(holder, own, ChannelsLast())
            names.add(name)
    return names
