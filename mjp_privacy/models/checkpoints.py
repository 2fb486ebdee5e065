"""Copies a file's tensors into a model: renames them, and reports or refuses what does not fit."""

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
    """How a checkpoint was loaded: printed by a run, and stored with its rows."""

    source: str
    sha256: str
    layout: Literal["timm", "official_mjp", "random"]
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


def layout_of(tensors: dict[str, Tensor]) -> Literal["timm", "official_mjp"]:
    """Whether tensors are named as timm (and DeiT) or as the authors' MJP code names them."""
    official = any(n == "pos_embed.weight" or n.startswith("dlocr.") for n in tensors)
    return "official_mjp" if official else "timm"


def to_own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm, DeiT or official MJP tensors under this model's names: timm's and some additions.

    The official layout keeps one lookup table with N+2 rows: class, patches, unknown.
    """
    state = {}
    for name, tensor in tensors.items():
        if name == "pos_embed.weight":
            state["pos_embed"] = tensor[:-1].unsqueeze(0)
            state["unk_embed"] = tensor[-1:].unsqueeze(0)
        elif name.startswith("dlocr."):
            state[name.replace("dlocr.", "dal_regressor.", 1)] = tensor
        else:
            state[name] = tensor
    return {name: tensor.float() for name, tensor in state.items()}


def shape_of(state: dict[str, Tensor], source: str) -> Shape:
    """Read the architecture off the tensors. The number of heads does not show in them."""
    for name in AXES:
        if name not in state:
            raise UserError(
                f"{source} is not a plain ViT classifier: expected a tensor {name!r}, got "
                f"{', '.join(sorted(state)[:6])}, … Give a checkpoint in timm, DeiT or MJP layout."
            )
    for name in ("dist_token", "reg_token", "blocks.0.ls1.gamma"):
        if name in state:
            raise UserError(
                f"{source} holds {name!r}: expected a plain ViT with one class token and no layer "
                "scale (ViT, DeiT without distillation, MJP)."
            )
    for name, axes in {**AXES, **dict.fromkeys(TABLES, 3)}.items():
        if name in state and state[name].ndim != axes:
            raise UserError(
                f"{source}: tensor {name!r} has shape {tuple(state[name].shape)}, expected {axes} "
                "axes. Give a checkpoint in timm, DeiT or MJP layout."
            )
    projection = state["patch_embed.proj.weight"]
    blocks = {int(n.split(".")[1]) for n in state if n.startswith("blocks.")}
    table = state.get("pos_embed")
    return Shape(
        embed_dim=projection.shape[0],
        depth=max(blocks) + 1,
        patch_size=projection.shape[-1],
        num_classes=state["head.weight"].shape[0],
        # timm computes int(embed_dim * ratio), which must not round down: take the next float up.
        mlp_ratio=math.nextafter(
            state["blocks.0.mlp.fc1.weight"].shape[0] / projection.shape[0], math.inf
        ),
        grid=None if table is None else math.isqrt(table.shape[1] - 1),
        unknown_embedding="unk_embed" in state,
        index_embedding="index_embed" in state,
        dal=_dal_kind(state),
    )


def _dal_kind(state: dict[str, Tensor]) -> DalKind:
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
    source = file.path.name
    state, notes, filled = dict(state), list[str](), list[str]()
    _position_notes(model, state, notes)
    if model.position_embedding == "exposed":
        if "pos_embed" not in state:
            notes.append("pos_embed is not in the checkpoint: fixed at zero")
            filled.append("pos_embed")
        state["pos_embed"] = torch.zeros_like(model.table)
    for name in TABLES:
        if name in state and getattr(model, name) is not None:
            state[name] = _resampled(state[name], model.grid, name, notes)
    if model.unk_embed is not None and "unk_embed" not in state and "pos_embed" in state:
        state["unk_embed"] = _filled_unknown(state, unknown_init, source, notes)
        filled.append("unk_embed")
    expected = dict(model.named_parameters())
    _check_complete(expected, state, source)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(state[name])
    return CheckpointReport(
        source,
        file.sha256,
        layout_of(file.tensors),
        tuple(filled),
        tuple(sorted(set(state) - set(expected))),
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


def _position_notes(
    model: MJPVisionTransformer, state: dict[str, Tensor], notes: list[str]
) -> None:
    table = state.get("pos_embed")
    if model.position_embedding != "learned" and table is not None and bool(table.any()):
        notes.append(
            "position embeddings removed from weights that were trained with them "
            "(the paper trained this model without)"
        )
    if model.unk_embed is None and "unk_embed" in state:
        notes.append("the checkpoint's unknown embedding is not used")


def _filled_unknown(
    state: dict[str, Tensor], unknown_init: UnknownInit | None, source: str, notes: list[str]
) -> Tensor:
    if unknown_init is None:
        raise UserError(
            f"{source} holds no unknown embedding (unk_embed, or an MJP table pos_embed.weight "
            "with N+2 rows), which this model needs. Give an MJP checkpoint, or say how to fill "
            "it: `unknown_init: mean_position` (the row will say so)."
        )
    mean = state["pos_embed"][:, 1:].mean(1, keepdim=True)
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
    expected: dict[str, torch.nn.Parameter], state: dict[str, Tensor], source: str
) -> None:
    missing = sorted(set(expected) - set(state))
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} of the model's {len(expected)} tensors: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}. Expected a complete "
            "checkpoint; check that the model (depth, dal, index_embedding) is the file's."
        )
    surplus = sorted(name for name in set(state) - set(expected) if name.startswith(LAYERS))
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
