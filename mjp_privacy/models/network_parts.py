"""Where a network under timm's names embeds its patches and adds their positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from mjp_privacy.core.errors import UserError, format_error
from mjp_privacy.models.jigsaw import Grid

CHANNELS = (3, 1)  # of colour and of grey pictures, which metrics and attacks take
IN_SIZE = "Give the network itself, and img_size=(height, width) where pictures are no squares."


@dataclass(frozen=True)
class Parts:
    """Where a network embeds its patches and adds their positions.

    table   none where the network has none, or adds it behind a norm of the embedded patches, so
            that its gradient is not the patches'
    before  rows of the table that stand before the patches' and belong to other tokens
    """

    projection: nn.Conv2d
    table: nn.Parameter | None
    grid: Grid
    before: int

    @property
    def rows_of_patches(self) -> slice:
        """Of the table."""
        return slice(self.before, self.before + self.grid.patches)

    @property
    def channels(self) -> int:
        """Of the pictures."""
        return self.projection.in_channels


def parts_of(net: nn.Module) -> Parts:
    """The parts of a network, found by shapes; a UserError says what it lacks.

    parts_of(timm.create_model("vit_small_patch14_dinov2")).before is 1
    """
    name = kind_of(net)
    embed: Any = getattr(net, "patch_embed", None)
    projection = getattr(embed, "proj", None)
    if not isinstance(projection, nn.Conv2d) or projection.kernel_size != projection.stride:
        raise UserError(
            f"{name}: expected patches that one convolution without overlap embeds "
            "(patch_embed.proj), got none: the attacks read that layer's gradient. Give another "
            "network, or the live one (load_module) if another of its layers embeds patches; "
            "inverting_gradients meets a Swin or a ResNet of this package."
        )
    (patch, tall), colours = projection.kernel_size, projection.in_channels
    height, width = getattr(embed, "img_size", None) or (0, 0)
    if colours not in CHANNELS:
        raise UserError(
            f"{name}: expected patches of 3 channels, or of 1 of grey pictures, got {colours}, as "
            "of what layers before them make of a picture, which no equation here tells. Give a "
            "network that embeds patches of colour or grey pictures."
        )
    if patch != tall or min(height, width) < patch:
        raise UserError(
            f"{name}: expected pictures of whole square patches, got {height}×{width} in patches "
            f"of {patch}×{tall}. Give img_size, multiples of the patch."
        )
    grid, table = Grid(height // patch, width // patch), getattr(net, "pos_embed", None)
    if grid.pixels(patch) != (height, width):
        embed.whole_size, embed.img_size = (height, width), grid.pixels(patch)
    behind_a_norm = not isinstance(getattr(embed, "norm", None), nn.Identity | None)
    behind_a_norm |= any(getattr(projection, "norms", ()))
    if not isinstance(table, nn.Parameter) or not table.requires_grad or behind_a_norm:
        return Parts(projection, None, grid, 0)
    rows, most = table[..., 0].numel(), grid.patches + 1 + getattr(net, "num_prefix_tokens", 0)
    if not grid.patches <= rows <= most or table.shape[-1] != projection.out_channels:
        raise UserError(
            f"{name}: expected a table of {grid.patches} to {most} positions of width "
            f"{projection.out_channels}, got {rows} of width {table.shape[-1]}. Give a network "
            "that adds its table to the embedded patches."
        )
    return Parts(projection, table, grid, getattr(net, "rows_before", rows - grid.patches))


def kind_of(net: Any) -> str:
    """The class of a network, of one under other names (`live.networks.Renamed`) that inside."""
    return type(getattr(net, "rest", net)).__name__


@contextmanager
def code_of(net: nn.Module, expected: str, advice: str) -> Iterator[None]:
    """Whatever a network's own code raises in this block, as a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{kind_of(net)}: expected a network {expected}; it raised {format_error(error)}. "
            f"{advice}"
        ) from error
