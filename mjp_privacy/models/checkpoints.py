"""From the tensors of a file to the model's own names, with a strict account of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.seeding import torch_generator
from mjp_privacy.models.checkpoint_files import WeightFile
from mjp_privacy.models.localization import DalKind
from mjp_privacy.models.mjp_vit import MJPVisionTransformer

UnknownInit = Literal["mean_position", "zeros", "random"]
AXES = {
    "patch_embed.proj.weight": 4,
    "blocks.0.mlp.fc1.weight": 2,
    "head.weight": 2,
    "cls_token": 3,
}
TABLES = ("pos_embed", "index_embed")
LAYERS = ("patch_embed.", "norm_pre.", "blocks.", "norm.", "fc_norm.", "pre_logits.", "head.")


@dataclass(frozen=True)
class CheckpointReport:
    """What was loaded, by the model's own names: printed, and stored beside the rows."""

    source: str
    sha256: str
    layout: Literal["timm", "official_mjp", "random"]
    missing: tuple[str, ...] = ()  # names the model has and the file has not, filled as notes say
    unexpected: tuple[str, ...] = ()  # names the file has and the model does not use
    beside: tuple[str, ...] = ()  # what lay beside the weights: optimizer, config, ...
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """What a checkpoint's tensors say about the model they belong to."""

    embed_dim: int
    depth: int
    patch_size: int
    num_classes: int
    mlp_ratio: float
    grid: int | None  # None: no position table
    unknown_embedding: bool
    index_embedding: bool
    dal: DalKind


def layout_of(tensors: dict[str, Tensor]) -> Literal["timm", "official_mjp"]:
    official = any(n == "pos_embed.weight" or n.startswith("dlocr.") for n in tensors)
    return "official_mjp" if official else "timm"


def to_own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm, DeiT and official MJP names -> this model's (timm's, `unk_embed`, `dal_regressor`).

    The official layout keeps one lookup table with N+2 rows: class, patches, unknown.
    """
    own = {}
    for name, tensor in tensors.items():
        if name == "pos_embed.weight":
            own["pos_embed"] = tensor[:-1].unsqueeze(0)
            own["unk_embed"] = tensor[-1:].unsqueeze(0)
        elif name.startswith("dlocr."):
            own[name.replace("dlocr.", "dal_regressor.", 1)] = tensor
        else:
            own[name] = tensor
    return {name: tensor.float() for name, tensor in own.items()}


def shape_of(own: dict[str, Tensor], source: str) -> Shape:
    """Read the architecture off the tensors; heads cannot be read and must be known."""
    for name in AXES:
        if name not in own:
            raise UserError(
                f"{source} is no plain ViT classifier: expected a tensor {name!r}, got "
                f"{', '.join(sorted(own)[:6])}, … Give a checkpoint in timm, DeiT or MJP layout."
            )
    for name in ("dist_token", "reg_token", "blocks.0.ls1.gamma"):
        if name in own:
            raise UserError(
                f"{source} holds {name!r}: expected a plain ViT with one class token and no layer "
                "scale (ViT, DeiT without distillation, MJP)."
            )
    for name, axes in {**AXES, **dict.fromkeys(TABLES, 3)}.items():
        if name in own and own[name].ndim != axes:
            raise UserError(
                f"{source}: tensor {name!r} has shape {tuple(own[name].shape)}, expected {axes} "
                "axes. Give a checkpoint in timm, DeiT or MJP layout."
            )
    projection = own["patch_embed.proj.weight"]
    blocks = {int(n.split(".")[1]) for n in own if n.startswith("blocks.")}
    table = own.get("pos_embed")
    return Shape(
        embed_dim=projection.shape[0],
        depth=max(blocks) + 1,
        patch_size=projection.shape[-1],
        num_classes=own["head.weight"].shape[0],
        # timm takes int(embed_dim * ratio): the next float up keeps that from rounding down.
        mlp_ratio=math.nextafter(
            own["blocks.0.mlp.fc1.weight"].shape[0] / projection.shape[0], math.inf
        ),
        grid=None if table is None else math.isqrt(table.shape[1] - 1),
        unknown_embedding="unk_embed" in own,
        index_embedding="index_embed" in own,
        dal=_dal_kind(own),
    )


def _dal_kind(own: dict[str, Tensor]) -> DalKind:
    if "dal_regressor.layers.0.weight" in own:
        return "nonlinear"
    return "linear" if "dal_regressor.layers.weight" in own else "none"


def load_into(
    model: MJPVisionTransformer,
    own: dict[str, Tensor],
    file: WeightFile,
    *,
    unknown_init: UnknownInit | None = None,
) -> CheckpointReport:
    """Copy every tensor the model has; anything missing or of another shape is an error."""
    source = file.path.name
    own, notes, filled = dict(own), list[str](), list[str]()
    _position_notes(model, own, notes)
    if model.position_embedding == "exposed":
        if "pos_embed" not in own:
            notes.append("pos_embed is not in the checkpoint: fixed at zero")
            filled.append("pos_embed")
        own["pos_embed"] = torch.zeros_like(model.table)
    for name in TABLES:
        if name in own and getattr(model, name) is not None:
            own[name] = _resampled(own[name], model.grid, name, notes)
    if model.unk_embed is not None and "unk_embed" not in own and "pos_embed" in own:
        own["unk_embed"] = _filled_unknown(own, unknown_init, source, notes)
        filled.append("unk_embed")
    expected = dict(model.named_parameters())
    _check_complete(expected, own, source)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(own[name])
    return CheckpointReport(
        source,
        file.sha256,
        layout_of(file.tensors),
        tuple(filled),
        tuple(sorted(set(own) - set(expected))),
        file.beside,
        tuple(notes),
    )


def _resampled(table: Tensor, grid: int, name: str, notes: list[str]) -> Tensor:
    old = math.isqrt(table.shape[1] - 1)
    if old * old != table.shape[1] - 1:
        raise UserError(
            f"{name} has {table.shape[1]} rows: expected one class row and a square grid of "
            "patches."
        )
    if old == grid:
        return table
    notes.append(f"{name} resampled from {old}×{old} to {grid}×{grid} (bicubic, antialiased)")
    return resample_abs_pos_embed(table, new_size=[grid, grid], num_prefix_tokens=1)


def _position_notes(model: MJPVisionTransformer, own: dict[str, Tensor], notes: list[str]) -> None:
    table = own.get("pos_embed")
    if model.position_embedding != "learned" and table is not None and bool(table.any()):
        notes.append(
            "position embeddings removed from weights that were trained with them "
            "(the paper trained this model without)"
        )
    if model.unk_embed is None and "unk_embed" in own:
        notes.append("the checkpoint's unknown embedding is not used")


def _filled_unknown(
    own: dict[str, Tensor], unknown_init: UnknownInit | None, source: str, notes: list[str]
) -> Tensor:
    if unknown_init is None:
        raise UserError(
            f"{source} holds no unknown embedding (unk_embed, or an MJP table pos_embed.weight "
            "with N+2 rows), which this model needs. Give an MJP checkpoint, or say how to fill "
            "it: `unknown_init: mean_position` (the row will say so)."
        )
    mean = own["pos_embed"][:, 1:].mean(1, keepdim=True)
    if unknown_init == "zeros":
        notes.append("unk_embed is not trained: set to zeros")
        return torch.zeros_like(mean)
    if unknown_init == "random":
        notes.append("unk_embed is not trained: drawn from N(0, 1), torch's start of a table")
        drawn = torch.randn(mean.shape, generator=torch_generator("unknown embedding"))
        return drawn.to(mean)
    notes.append("unk_embed is not trained: set to the mean position embedding")
    return mean


def _check_complete(
    expected: dict[str, torch.nn.Parameter], own: dict[str, Tensor], source: str
) -> None:
    missing = sorted(set(expected) - set(own))
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} of the model's {len(expected)} tensors: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}. Expected a complete "
            "checkpoint; check that the model (depth, dal, index_embedding) is the file's."
        )
    surplus = sorted(name for name in set(own) - set(expected) if name.startswith(LAYERS))
    if surplus:
        raise UserError(
            f"{source} holds {len(surplus)} tensors of layers that the model has not: "
            f"{', '.join(surplus[:5])}{', …' if len(surplus) > 5 else ''}. Without them the "
            "weights make another network; check that the model's depth is the file's and that "
            "the file is a plain ViT's."
        )
    for name, parameter in expected.items():
        if own[name].shape != parameter.shape:
            raise UserError(_shape_message(name, own[name], parameter, source))


def _shape_message(name: str, found: Tensor, parameter: Tensor, source: str) -> str:
    advice = "Give the dimensions of the checkpoint's own model."
    if name in ("cls_token", *TABLES):
        advice = f"Set embed_dim: {found.shape[-1]}, or give a checkpoint of this model."
    if name.startswith("head."):
        advice = (
            f"Set num_classes: {found.shape[0]}, or give a checkpoint with {parameter.shape[0]}."
        )
    if name.startswith("patch_embed."):
        advice = f"Set patch_size: {found.shape[-1]} and embed_dim: {found.shape[0]}."
    return (
        f"{source}: tensor {name!r} has shape {tuple(found.shape)}, expected "
        f"{tuple(parameter.shape)}. {advice}"
    )
