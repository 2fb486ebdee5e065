"""Copies a file's tensors into a model: renames them, and reports or refuses what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, WeightFile
from mjp_privacy.models.checkpoint_tables import (
    UnknownInit,
    filled_unknown,
    position_notes,
    resampled,
)
from mjp_privacy.models.layouts import Layout, fitting
from mjp_privacy.models.layouts.known import TIMM
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.shape import TABLES

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
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
    stored_as: str = ""  # the type of the file's numbers where it is not float32


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of a file's tensors; timm's for names that fit none, which `shape_of` refuses."""
    return fitting(tensors) or TIMM


def to_own_names(file: WeightFile) -> dict[str, Tensor]:
    """A file's tensors under this model's names: timm's and some additions; in the file's types.

    Tensors of which a model is built are floating-point numbers.
    """
    layout = layout_of(file.tensors)
    own = layout.to_own(file.tensors)
    for name, tensor in of_a_model(own).items():
        if tensor.dtype not in FLOATS:
            kinds = ", ".join(map(_word, FLOATS))
            got = f"entries of type {_word(tensor.dtype)} where {kinds} are read"
            raise CHECKPOINT.refusal(file.path, got, name)
    return own


def of_a_model(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names a model of this package can have."""
    return {name: tensor for name, tensor in state.items() if TIMM.own_names(name)}


def stored_as(state: Mapping[str, Tensor]) -> str:
    """The types of a model's tensors in words, such as `float16`; empty for float32."""
    kinds = {_word(tensor.dtype) for tensor in of_a_model(state).values()}
    return "" if kinds <= {"float32"} else " and ".join(sorted(kinds))


def _word(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


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
    stored = stored_as(state)
    state, notes, filled = dict(state), list[str](), list[str]()
    position_notes(model, state, notes)
    if model.position_embedding == "exposed":
        if "pos_embed" not in state:
            notes.append("pos_embed is not in the checkpoint: fixed at zero")
            filled.append("pos_embed")
        state["pos_embed"] = torch.zeros_like(model.table)
    for name in TABLES:
        if name in state and getattr(model, name) is not None:
            state[name] = resampled(state[name], model.grid, name, notes, source)
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
        stored,
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
            f"{shown(', '.join(surplus[:5]))}{', …' if len(surplus) > 5 else ''}. Leaving them out "
            "would give a different network; check that the model's depth is the file's and that "
            "the file holds a plain ViT."
        )
    for name, parameter in expected.items():
        if state[name].shape != parameter.shape:
            raise UserError(_shape_message(name, state[name], parameter, source))


def _shape_message(name: str, tensor: Tensor, parameter: Tensor, source: str) -> str:
    advice = "Give the dimensions of the checkpoint's own model."
    if tensor.ndim == parameter.ndim and tensor.numel():
        if name in ("cls_token", *TABLES):
            advice = f"Set embed_dim: {tensor.shape[-1]}, or give a checkpoint of this model."
        elif name.startswith("head."):
            classes = f"{tensor.shape[0]}, or give a checkpoint with {parameter.shape[0]}"
            advice = f"Set num_classes: {classes}."
        elif name == "patch_embed.proj.weight":
            advice = f"Set patch_size: {tensor.shape[-1]} and embed_dim: {tensor.shape[0]}."
    return (
        f"{source}: tensor {name!r} has shape {tuple(tensor.shape)}, expected "
        f"{tuple(parameter.shape)}. {advice}"
    )
