"""A Swin that starts from a Swin's file, as in the paper's Table 9; for a ViT `network` does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.models import load_model

POSITIONS = "absolute_pos_embed"


def fill_swin(model: Any, checkpoint: str) -> None:
    """Copy every tensor of a `JigsawSwin` but its classifier from a file that `mjp train` wrote.

    The table of absolute positions is resampled for a picture of another size.
    """
    loaded: Any = load_model(checkpoint=checkpoint)
    if loaded.family != "swin" or _comparable(loaded) != _comparable(model):
        got = loaded.sizes if loaded.family == "swin" else f"a {loaded.family}"
        raise UserError(
            f"{checkpoint}: expected the Swin that the config describes ({model.sizes}, with "
            f"{'a' if model.sizes.positions else 'no'} table of absolute positions), got {got}. "
            "Give its file, or the file's sizes in the config."
        )
    check_unknown(checkpoint, loaded.unk_embed is not None, model.unk_embed is not None)
    stored = dict(loaded.named_parameters())
    if model.sizes.positions:
        stored[POSITIONS] = _resampled(stored[POSITIONS], model.grid)
    for name, parameter in model.named_parameters():
        if name.startswith("head."):
            continue
        if stored[name].shape != parameter.shape:  # timm cuts windows to the smallest stage's size
            raise UserError(
                f"{checkpoint}: {name} has shape {tuple(stored[name].shape)}, expected "
                f"{tuple(parameter.shape)}: a stage smaller than a window has smaller windows. "
                "Expected an img_size with windows as in the file; give one at least as large."
            )
        with torch.no_grad():
            parameter.copy_(stored[name])


def check_unknown(source: str, stored: bool, wanted: bool) -> None:
    """Raise unless weights with MJP's E_unk start a network with one, and others one without: a
    segmentation's row says by its name what its weights were trained with."""
    if stored == wanted:
        return
    kinds = {True: "MJP's unk_embed", False: "no unk_embed"}
    raise UserError(
        f"{shown(source)}: model.unknown_embedding is {str(wanted).lower()}: expected weights to "
        f"start from with {kinds[wanted]}, got {kinds[stored]}. Give weights trained "
        f"{'with' if wanted else 'without'} MJP, or the row for these."
    )


def _comparable(network: Any) -> Any:
    """The sizes that two networks must share to have the same weights below their heads."""
    own = {"img_size": network.patch_size, "num_classes": 1}
    return replace(network.sizes, **own, unknown_embedding=False, dal="none")


def _resampled(table: Tensor, grid: int) -> Tensor:
    """The table (1, N, D) for a square grid of this side: bicubic, antialiased, as a ViT's."""
    side = round(table.shape[1] ** 0.5)
    if side == grid:
        return table
    picture = table.detach().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    picture = F.interpolate(picture, size=(grid, grid), mode="bicubic", antialias=True)
    return picture.permute(0, 2, 3, 1).reshape(1, grid * grid, -1)
