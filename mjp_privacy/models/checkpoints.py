"""Copies a file's tensors into a model: renames them, and reports or refuses what does not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.checkpoint_files import WeightFile
from mjp_privacy.models.checkpoint_tables import (
    UnknownInit,
    filled_unknown,
    position_notes,
    resampled,
)
from mjp_privacy.models.layouts import LAYOUTS, Layout, fitting
from mjp_privacy.models.layouts.known import TIMM
from mjp_privacy.models.localization import DalKind
from mjp_privacy.models.mjp_vit import MJPVisionTransformer

HEAD = "head.weight"
AXES = {"patch_embed.proj.weight": 4, "blocks.0.mlp.fc1.weight": 2, HEAD: 2, "cls_token": 3}
COLOURS = 3
KNOWN_LAYOUTS = (
    "Give a checkpoint in timm, DeiT or MJP layout, or in torchvision's, open_clip's or Hugging "
    "Face's (ViT, DeiT, CLIP)."
)
KNOWN_NETWORKS = f"Known are the layouts of {'; '.join(layout.title for layout in LAYOUTS)}."
SECOND_HEAD = re.compile(r"(?:.*\.)?(head_dist|cls_classifier|distillation_classifier)\.weight")
TABLES = ("pos_embed", "index_embed")
LAYERS = ("patch_embed.", "norm_pre.", "blocks.", "norm.", "fc_norm.", "pre_logits.", "head.")


@dataclass(frozen=True)
class CheckpointReport:
    """How a checkpoint was loaded: printed by a run, and stored with its rows."""

    source: str
    sha256: str
    layout: str  # the name of the file's `layouts.Layout`, or `random`
    missing: tuple[str, ...] = ()  # in the model, not in the file; `notes` say how they are filled
    unexpected: tuple[str, ...] = ()  # in the file, not used by the model
    beside: tuple[str, ...] = ()  # other entries of the file: optimizer, config, ...
    notes: tuple[str, ...] = ()  # part of a run_id: rewording one gives its cells new rows


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


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of a file's tensors; timm's for names that fit none, which `shape_of` refuses."""
    return fitting(tensors) or TIMM


def to_own_names(
    tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A file's tensors under this model's names: timm's and some additions."""
    own = layout_of(tensors).to_own(tensors)
    return {name: tensor.to(dtype) for name, tensor in own.items()}


def shape_of(state: Mapping[str, Tensor], source: str, *, classifies: bool = True) -> Shape:
    """Read the architecture off the tensors. The number of heads does not show in them.

    classifies  whether a network without a head is refused
    """
    _check_plain(state, source, classifies=classifies)
    projection = state["patch_embed.proj.weight"]
    blocks = {int(n.split(".")[1]) for n in state if n.startswith("blocks.")}
    table = state.get("pos_embed")
    return Shape(
        embed_dim=projection.shape[0],
        depth=max(blocks) + 1,
        patch_size=projection.shape[-1],
        num_classes=state[HEAD].shape[0] if HEAD in state else 0,
        # timm computes int(embed_dim * ratio), which must not round down: take the next float up.
        mlp_ratio=math.nextafter(
            state["blocks.0.mlp.fc1.weight"].shape[0] / projection.shape[0], math.inf
        ),
        grid=None if table is None else math.isqrt(table.shape[1] - 1),
        unknown_embedding="unk_embed" in state,
        index_embedding="index_embed" in state,
        dal=_dal_kind(state),
        pre_norm={"norm_pre.weight", "norm_pre.bias"} <= state.keys(),
        patch_bias="patch_embed.proj.bias" in state,
        qkv_bias=any(f"blocks.{block}.attn.qkv.bias" in state for block in blocks),
        head_bias=HEAD not in state or "head.bias" in state,
        distillation_token="dist_token" in state,
    )


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
                f"{', '.join(sorted(state)[:6])}, … {advice}"
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


def load_into(
    model: MJPVisionTransformer,
    state: dict[str, Tensor],
    file: WeightFile,
    *,
    unknown_init: UnknownInit | None = None,
) -> CheckpointReport:
    """Copy every tensor of the model from `state`: those of `file` under this model's names.

    A tensor that is missing, misshapen or of a layer that the model lacks is an error; but E_unk is
    filled as `unknown_init` says, and an `exposed` position table with zeros."""
    source = file.shown
    state, notes, filled = dict(state), list[str](), list[str]()
    position_notes(model, state, notes)
    if model.position_embedding == "exposed":
        if "pos_embed" not in state:
            notes.append("pos_embed is not in the checkpoint: fixed at zero")
            filled.append("pos_embed")
        state["pos_embed"] = torch.zeros_like(model.table)
    for name in TABLES:
        if name in state and getattr(model, name) is not None:
            state[name] = resampled(state[name], model.grid, name, notes)
    if model.unk_embed is not None and "unk_embed" not in state and "pos_embed" in state:
        state["unk_embed"] = filled_unknown(state, unknown_init, source, notes)
        filled.append("unk_embed")
    expected = dict(model.named_parameters())
    layout = layout_of(file.tensors)
    _check_complete(expected, state, source, layout.unknown(file.tensors))
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(state[name])
    return CheckpointReport(
        file.path.name,
        file.sha256,
        layout.name,
        tuple(filled),
        tuple(sorted(set(state) - set(expected))),
        file.beside,
        tuple(notes),
    )


def _check_complete(
    expected: dict[str, torch.nn.Parameter],
    state: dict[str, Tensor],
    source: str,
    unknown: Sequence[str],
) -> None:
    """Raise unless the tensors are the model's; the layout does not know the names `unknown`."""
    missing = sorted(set(expected) - set(state))
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} of the model's {len(expected)} tensors: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}. Expected a complete "
            "checkpoint; check that the model (depth, dal, index_embedding) is the file's."
        )
    unused = set(state) - set(expected)
    surplus = sorted(name for name in unused if name.startswith(LAYERS) or name in unknown)
    if surplus:
        raise UserError(
            f"{source} holds {len(surplus)} tensors of layers that the model does not have: "
            f"{', '.join(surplus[:5])}{', …' if len(surplus) > 5 else ''}. Leaving them out would "
            "give a different network; check that the model's depth is the file's and that the "
            "file holds a plain ViT."
        )
    for name, parameter in expected.items():
        if state[name].shape != parameter.shape:
            raise UserError(_shape_message(name, state[name], parameter, source))


def _shape_message(name: str, tensor: Tensor, parameter: Tensor, source: str) -> str:
    advice = "Give the dimensions of the checkpoint's own model."
    if name in ("cls_token", *TABLES):
        advice = f"Set embed_dim: {tensor.shape[-1]}, or give a checkpoint of this model."
    if name.startswith("head."):
        advice = (
            f"Set num_classes: {tensor.shape[0]}, or give a checkpoint with {parameter.shape[0]}."
        )
    if name.startswith("patch_embed."):
        advice = f"Set patch_size: {tensor.shape[-1]} and embed_dim: {tensor.shape[0]}."
    return (
        f"{source}: tensor {name!r} has shape {tuple(tensor.shape)}, expected "
        f"{tuple(parameter.shape)}. {advice}"
    )
