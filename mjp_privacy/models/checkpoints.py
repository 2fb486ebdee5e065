"""Copies a file's tensors into a model: renames them, and reports or refuses what does not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, WeightFile
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.layouts import LAYOUTS, TIMM
from mjp_privacy.models.mjp_vit import MJPVisionTransformer

UnknownInit = Literal["mean_position", "zeros", "random"]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAYERS = ("patch_embed.", "norm_pre.", "blocks.", "norm.", "fc_norm.", "pre_logits.", "head.")
TABLES = ("pos_embed", "index_embed")
HEAD, PATCHES, FC1 = "head.weight", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"
AXES = {PATCHES: 4, FC1: 2, HEAD: 2, "cls_token": 3}
SHAPED = {**AXES, **dict.fromkeys(TABLES, 3)}
OTHERS = ("reg_token", "blocks.0.ls1.gamma")  # of other networks
SHOWN = 6  # names in a message
COLOURS = 3
BLOCK = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.")
SECOND_HEAD = re.compile(r"(?:.*\.)?(head_dist|cls_classifier|distillation_classifier)\.weight")

# names and types ----------------------------------------------------------------------------------


def to_own_names(file: WeightFile) -> dict[str, Tensor]:
    """A file's tensors under this model's names: timm's and some additions; in the file's types.

    Tensors of which a model is built are floating-point numbers.
    """
    own = file.layout.to_own(file.tensors)
    for name, tensor in of_a_model(own).items():
        if tensor.dtype not in FLOATS:
            kinds = ", ".join(map(_word, FLOATS))
            got = f"entries of type {_word(tensor.dtype)} where {kinds} are read"
            raise CHECKPOINT.refusal(file.path, got, name)
    return own


def of_a_model(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names a model of this package can have."""
    return {name: tensor for name, tensor in state.items() if TIMM.own_names(name)}


def _word(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


# what the tensors show ----------------------------------------------------------------------------


def shape_of(
    state: Mapping[str, Tensor], source: str, *, classifies: bool = True
) -> dict[str, Any]:
    """The architecture that tensors under own names show, by field of `ModelSpec`, and its `grid`:
    how many patches its position table is for, None without one. The number of heads does not show.

    classifies  whether a network without a head is refused: a file must hold a classifier
    """
    _check_plain(state, source, classifies=classifies)
    blocks = sorted({int(match[1]) for name in state if (match := BLOCK.match(name))})
    if blocks != list(range(len(blocks))):
        raise UserError(
            f"{source} holds blocks of the numbers {shown(', '.join(map(str, blocks)), 60)}: "
            "expected 0, 1, … without a gap. Give a whole checkpoint."
        )
    width, table = state[PATCHES].shape[0], state.get("pos_embed")
    linear = "linear" if "dal_regressor.layers.weight" in state else "none"
    return {
        "embed_dim": width,
        "depth": len(blocks),
        "patch_size": state[PATCHES].shape[-1],
        "num_classes": state[HEAD].shape[0] if HEAD in state else 0,
        # timm computes int(embed_dim * ratio), which must not round down: take the next float up.
        "mlp_ratio": math.nextafter(state[FC1].shape[0] / width, math.inf),
        "grid": None if table is None else rows_of_patches(table, "pos_embed", source),
        "unknown_embedding": "unk_embed" in state,
        "index_embedding": "index_embed" in state,
        "dal": "nonlinear" if "dal_regressor.layers.0.weight" in state else linear,
        "pre_norm": {"norm_pre.weight", "norm_pre.bias"} <= state.keys(),
        "patch_bias": "patch_embed.proj.bias" in state,
        "qkv_bias": any(f"blocks.{block}.attn.qkv.bias" in state for block in blocks),
        "head_bias": HEAD not in state or "head.bias" in state,
        "distillation_token": "dist_token" in state,
    }


def _check_plain(state: Mapping[str, Tensor], source: str, *, classifies: bool) -> None:
    """Raise unless the tensors are those of a plain ViT in one of the known layouts."""
    needed = [name for name in AXES if classifies or name != HEAD]
    if second := [match[1] for name in state if (match := SECOND_HEAD.fullmatch(name))]:
        heads = ", ".join(dict.fromkeys([*(["head"] if HEAD in state else []), *second]))
        fault = f"has two heads, {heads}, with which it was distilled"
    elif missing := [name for name in needed if name not in state]:
        fault = f"lacks a tensor {missing[0]!r}, it has {first_of(sorted(state), SHOWN)}"
    elif strange := [name for name in OTHERS if name in state]:
        fault = f"holds {strange[0]!r}"
    elif "dist_token" in state and "dist_pos_embed" not in state:
        fault = "holds 'dist_token' without a position of its own"  # as timm's, with two heads
    else:
        fault = ""
        for name, shape in ((n, tuple(state[n].shape)) for n in SHAPED if n in state):
            if len(shape) != SHAPED[name] or not state[name].numel():
                fault = (
                    f"has {name!r} of shape {shape} in place of {SHAPED[name]} axes with numbers"
                )
            elif name == PATCHES and (shape[1] != COLOURS or shape[2] != shape[3]):
                fault = f"embeds patches of {shape[2]}×{shape[3]} pixels in {shape[1]} colours"
            if fault:
                break
    if fault:
        raise UserError(
            f"{source} {shown(fault)}: expected a plain ViT{' classifier' * classifies} with one "
            "class token, one head and no layer scale, of RGB pictures (ViT, DeiT without "
            "distillation, MJP), in the layout of "
            f"{'; '.join(layout.title for layout in LAYOUTS)}."
        )


# tables that a model reads otherwise --------------------------------------------------------------


def rows_of_patches(table: Tensor, name: str, source: str) -> int:
    """N of a table (1, N+1, D)."""
    if table.shape[0] != 1 or table.shape[1] < 2:
        raise UserError(
            f"{source}: {name} has {table.shape[1]} rows: expected one class row and those of "
            f"patches, in the shape (1, rows, width); got {tuple(table.shape)}."
        )
    return table.shape[1] - 1


def resampled(table: Tensor, grid: Grid, name: str, notes: list[str], source: str) -> Tensor:
    """The table (1, N+1, D) for another grid, with a note; as it is for its own. A table of as many
    patches is the grid's own, one of others is of a square."""
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    old, shown = (
        math.isqrt(count := rows_of_patches(table, name, source)),
        f"{grid.rows}×{grid.columns}",
    )
    if count == grid.patches:
        if grid.rows != grid.columns and old**2 == count:
            notes.append(f"{name} of {count} positions taken as one of {shown}, not resampled")
        return table
    if old * old != count:
        raise UserError(
            f"{source}: {name} has rows of {count} patches, and no square of them: expected "
            f"{grid.patches}, of {shown}. Give the img_size of its pictures."
        )
    notes.append(f"{name} resampled from {old}×{old} to {shown} (bicubic, antialiased)")
    class_row, rows = table[:, :1], table[:, 1:]
    picture = rows.float().reshape(1, old, old, -1).permute(0, 3, 1, 2)
    picture = interpolate(picture, size=grid, mode="bicubic", antialias=True)
    rows = picture.permute(0, 2, 3, 1).reshape(1, grid.patches, -1).to(table.dtype)
    return torch.cat((class_row, rows), dim=1)


E_UNK_SET = "unk_embed is not trained"
"""How the note begins of a model that was not trained with MJP and is run as if it had been."""


def filled_unknown(
    positions: Tensor, unknown_init: UnknownInit | None, source: str, notes: list[str]
) -> Tensor:
    """E_unk (1, 1, D) for a checkpoint without one, as `unknown_init` says, with a note.

    positions  (1, N, D) the patches' rows of its table
    """
    if unknown_init is None:
        raise UserError(
            f"{source} holds no unknown embedding (unk_embed, or an MJP table pos_embed.weight "
            "with N+2 rows), which this model needs. Give an MJP checkpoint, or say how to fill "
            "it: `unknown_init: mean_position` (the row will say so)."
        )
    positions = positions.to(torch.promote_types(positions.dtype, torch.float32))
    mean = positions.mean(1, keepdim=True)
    if unknown_init == "zeros":
        notes.append(f"{E_UNK_SET}: set to zeros")
        return torch.zeros_like(mean)
    if unknown_init == "random":
        notes.append(f"{E_UNK_SET}: drawn from N(0, 1), torch's start of a table")
        drawn = torch.randn(mean.shape, generator=torch_generator("unknown embedding"))
        return drawn.to(mean)
    notes.append(f"{E_UNK_SET}: set to the mean position embedding")
    return mean


# into the model -----------------------------------------------------------------------------------


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
    stored_as: str = ""  # the type of the file's numbers where it is not float32


def load_into(
    model: MJPVisionTransformer,
    state: Mapping[str, Tensor],
    file: WeightFile,
    *,
    unknown_init: UnknownInit | None = None,
) -> CheckpointReport:
    """Copy every tensor of the model from `state`: those of `file` under this model's names.

    A tensor that is missing, misshapen or of a layer that the model lacks is an error; but E_unk is
    filled as `unknown_init` says, and an `exposed` position table with zeros."""
    source, layout = file.shown, file.layout
    kinds = {_word(tensor.dtype) for tensor in of_a_model(state).values()}
    state, notes, missing = dict(state), list[str](), list[str]()
    table = state.get("pos_embed")
    known = table is not None and not table.is_meta  # of an outline no value is known
    if model.position_embedding != "learned" and known and bool(table.any()):  # type: ignore[union-attr]
        notes.append(
            "position embeddings removed from weights that were trained with them "
            "(the paper trained this model without)"
        )
    if model.unk_embed is None and "unk_embed" in state:
        notes.append("the checkpoint's unknown embedding is not used")
    if model.position_embedding == "exposed":
        if table is None:
            notes.append("pos_embed is not in the checkpoint: fixed at zero")
            missing.append("pos_embed")
        state["pos_embed"] = torch.zeros_like(model.table)
    for name in TABLES:
        if name in state and getattr(model, name) is not None:
            state[name] = resampled(state[name], model.grid, name, notes, source)
    if model.unk_embed is not None and "unk_embed" not in state and "pos_embed" in state:
        state["unk_embed"] = filled_unknown(state["pos_embed"][:, 1:], unknown_init, source, notes)
        missing.append("unk_embed")
    expected = dict(model.named_parameters())
    _check_complete(expected, state, source, layout.unknown(file.tensors))
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(state[name])
    return CheckpointReport(
        file.path.name,
        file.sha256,
        layout.name,
        missing=tuple(missing),
        unexpected=tuple(sorted(set(state) - set(expected))),
        beside=file.beside,
        notes=tuple(notes),
        stored_as="" if kinds <= {"float32"} else " and ".join(sorted(kinds)),
    )


def _check_complete(
    expected: dict[str, torch.nn.Parameter],
    state: dict[str, Tensor],
    source: str,
    unknown: Sequence[str],
) -> None:
    """Raise unless the tensors are the model's; the layout does not know the names `unknown`."""
    missing = sorted(set(expected) - set(state))
    unused = set(state) - set(expected)
    surplus = sorted(name for name in unused if name.startswith(LAYERS) or name in unknown)
    if missing or surplus:
        what = "lacks" if missing else "has beyond them"
        names = missing or surplus
        raise UserError(
            f"{source}: of the model's {len(expected)} tensors it {what} {len(names)}: "
            f"{shown(first_of(names, SHOWN))}. Expected a complete checkpoint of this network, for "
            "without a tensor it would be another; check that depth, dal and index_embedding are "
            "the file's."
        )
    for name, parameter in expected.items():
        came, wanted = tuple(state[name].shape), tuple(parameter.shape)
        if came == wanted:
            continue
        advice = "Give the dimensions of the checkpoint's own model."
        if len(came) == len(wanted) and state[name].numel():
            if name in ("cls_token", *TABLES):
                advice = f"Set embed_dim: {came[-1]}, or give a checkpoint of this model."
            elif name.startswith("head."):
                advice = f"Set num_classes: {came[0]}, or give a checkpoint with {wanted[0]}."
            elif name == PATCHES:
                advice = f"Set patch_size: {came[-1]} and embed_dim: {came[0]}."
        raise UserError(f"{source}: tensor {name!r} has shape {came}, expected {wanted}. {advice}")


def check_same(
    network: nn.Module, came: Mapping[str, Tensor], needed: Iterable[str], source: str
) -> None:
    """Raise unless the tensors of a file are those of a network that is no plain ViT.

    needed  the names that the file must hold; others of the network may be left out
    """
    own = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    for key in [*needed, *came]:
        wanted = own.get(key, "no such tensor")
        got = tuple(came[key].shape) if key in came else "no such tensor"
        if wanted != got:
            raise UserError(
                f"{source} does not hold the tensors of the network that it is said to hold: "
                f"{shown(key, 60)}: expected {wanted}, got {got}. Give that network's weights, and "
                "its img_size where its table is for other pictures."
            )
