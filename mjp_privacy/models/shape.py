"""The architecture that a file's tensors show, by their names and shapes under own names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_tables import grid_of
from mjp_privacy.models.layouts import LAYOUTS
from mjp_privacy.models.localization import DalKind

HEAD = "head.weight"
AXES = {"patch_embed.proj.weight": 4, "blocks.0.mlp.fc1.weight": 2, HEAD: 2, "cls_token": 3}
COLOURS = 3
BLOCK = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.")
KNOWN_LAYOUTS = (
    "Give a checkpoint in timm, DeiT or MJP layout, or in torchvision's, open_clip's or Hugging "
    "Face's (ViT, DeiT, CLIP)."
)
KNOWN_NETWORKS = f"Known are the layouts of {'; '.join(layout.title for layout in LAYOUTS)}."
SECOND_HEAD = re.compile(r"(?:.*\.)?(head_dist|cls_classifier|distillation_classifier)\.weight")
TABLES = ("pos_embed", "index_embed")


@dataclass(frozen=True)
class Shape:
    """The architecture as far as a checkpoint's tensors show it."""

    embed_dim: int
    depth: int
    patch_size: int
    num_classes: int
    mlp_ratio: float
    grid: int | None  # patches along a side; None: no position table to read it off
    unknown_embedding: bool
    index_embedding: bool
    dal: DalKind
    pre_norm: bool
    patch_bias: bool
    qkv_bias: bool
    head_bias: bool
    distillation_token: bool


def shape_of(state: Mapping[str, Tensor], source: str, *, classifies: bool = True) -> Shape:
    """Read the architecture off the tensors. The number of heads does not show in them.

    classifies  whether a network without a head is refused
    """
    _check_plain(state, source, classifies=classifies)
    projection = state["patch_embed.proj.weight"]
    blocks = _blocks(state, source)
    table = state.get("pos_embed")
    return Shape(
        embed_dim=projection.shape[0],
        depth=len(blocks),
        patch_size=projection.shape[-1],
        num_classes=state[HEAD].shape[0] if HEAD in state else 0,
        # timm computes int(embed_dim * ratio), which must not round down: take the next float up.
        mlp_ratio=math.nextafter(
            state["blocks.0.mlp.fc1.weight"].shape[0] / projection.shape[0], math.inf
        ),
        grid=None if table is None else grid_of(table, "pos_embed", source),
        unknown_embedding="unk_embed" in state,
        index_embedding="index_embed" in state,
        dal=_dal_kind(state),
        pre_norm={"norm_pre.weight", "norm_pre.bias"} <= state.keys(),
        patch_bias="patch_embed.proj.bias" in state,
        qkv_bias=any(f"blocks.{block}.attn.qkv.bias" in state for block in blocks),
        head_bias=HEAD not in state or "head.bias" in state,
        distillation_token="dist_token" in state,
    )


def _blocks(state: Mapping[str, Tensor], source: str) -> list[int]:
    """The numbers of the blocks: 0, 1, … without a gap."""
    numbers = sorted({int(match[1]) for name in state if (match := BLOCK.match(name))})
    if numbers != list(range(len(numbers))):
        raise UserError(
            f"{source} holds blocks of the numbers {shown(', '.join(map(str, numbers)), 60)}: "
            "expected 0, 1, … without a gap. Give a whole checkpoint."
        )
    return numbers


def _check_plain(state: Mapping[str, Tensor], source: str, *, classifies: bool) -> None:
    """Raise unless the tensors are those of a plain ViT in one of the known layouts.

    classifies  they are of a file, which holds a classifier; else of a live network
    """
    _check_one_head(state, source)
    kind, advice = ("ViT classifier", KNOWN_LAYOUTS) if classifies else ("ViT", KNOWN_NETWORKS)
    for name in AXES:
        if name not in state and (classifies or name != HEAD):
            raise UserError(
                f"{source} is not a plain {kind}: expected a tensor {name!r}, got "
                f"{shown(', '.join(sorted(state)[:6]))}, … {advice}"
            )
    # timm's distilled DeiT answers with two heads, so it has no position of the token apart.
    distilled = () if "dist_pos_embed" in state else ("dist_token",)
    for name in (*distilled, "reg_token", "blocks.0.ls1.gamma"):
        if name in state:
            raise UserError(
                f"{source} holds {name!r}: expected a plain ViT with one class token and no layer "
                "scale (ViT, DeiT without distillation, MJP)."
            )
    for name, axes in {**AXES, **dict.fromkeys(TABLES, 3)}.items():
        if name in state and state[name].ndim != axes:
            raise UserError(
                f"{source}: tensor {name!r} has shape {tuple(state[name].shape)}, expected {axes} "
                f"axes. {advice}"
            )
        if name in state and not state[name].numel():
            raise UserError(
                f"{source}: tensor {name!r} has shape {tuple(state[name].shape)}, which holds no "
                f"number: expected at least one along each axis. {advice}"
            )
    kernel = state["patch_embed.proj.weight"].shape[1:]
    if kernel[0] != COLOURS or kernel[1] != kernel[2]:
        raise UserError(
            f"{source} embeds patches of {kernel[1]}×{kernel[2]} pixels in {kernel[0]} colours: "
            f"expected square patches of {COLOURS} colours. Give a model of RGB pictures."
        )


def _check_one_head(state: Mapping[str, Tensor], source: str) -> None:
    """Raise for a model that was distilled through a second head."""
    second = [match[1] for name in state if (match := SECOND_HEAD.fullmatch(name))]
    if second:
        heads = ", ".join(dict.fromkeys([*(["head"] if HEAD in state else []), *second]))
        token = "holds 'dist_token' and " if "head_dist" in second and "dist_token" in state else ""
        raise UserError(
            f"{source} {token}has two heads ({heads}): a model that answers with two heads is not "
            "supported. Expected one with a single head (ViT, DeiT without distillation, MJP)."
        )


def _dal_kind(state: Mapping[str, Tensor]) -> DalKind:
    if "dal_regressor.layers.0.weight" in state:
        return "nonlinear"
    return "linear" if "dal_regressor.layers.weight" in state else "none"
