"""A file's tensors and what it says of its model: read, renamed, and copied into a network, or
refused where they do not fit.

What no tensor shows stands in the metadata of this package's own files, or in JSON files that
libraries save beside the weights:

    timm           config.json: mean, std, size, crop; the architecture's name states the heads
    transformers   config.json: heads, eps, activation; preprocessor_config.json: mean, std, sizes
    open_clip      open_clip_config.json: heads, activation, mean, std
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AliasChoices, AliasPath, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.read import FileKind, is_there, json_value, read_json, read_json_value, typed
from mjp_privacy.core.schema import Positive, Side, Switch, Width
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, CONFIG, JSON_FILES, WeightFile
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.layouts import LAYOUTS, TIMM, Layout
from mjp_privacy.models.mjp_vit import CheckpointReport, MJPVisionTransformer
from mjp_privacy.models.sizes import Activation
from mjp_privacy.models.zoo import (
    PICTURES,
    Epsilon,
    Interpolation,
    Mean,
    ModelSpec,
    Std,
    architecture,
    filled,
    is_timm_network,
)

UnknownInit = Literal["mean_position", "zeros", "random"]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAYERS = (
    *("patch_embed.", "norm_pre.", "blocks.", "norm.", "fc_norm.", "pre_logits.", "head."),
    "head_dist.",  # of a distilled network
)
TABLES = ("pos_embed", "index_embed")
HEAD, PATCHES, FC1 = "head.weight", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"
AXES = {PATCHES: 4, FC1: 2, "cls_token": 3}
SHAPED = {**AXES, HEAD: 2, **dict.fromkeys(TABLES, 3)}
OTHERS = ("reg_token", "blocks.0.ls1.gamma")  # of other networks
SHOWN = 6  # names in a message
CLIP_EPS = 1e-5
BLOCK = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.")

# names and types ----------------------------------------------------------------------------------


def to_own_names(file: WeightFile) -> dict[str, Tensor]:
    """A file's tensors under this model's names: timm's and some additions; in the file's types."""
    own = file.layout.to_own(file.tensors)
    for name, tensor in of_a_model(own).items():
        if tensor.dtype not in FLOATS:
            got = f"entries of type {tensor.dtype} where {', '.join(map(str, FLOATS))} are read"
            raise CHECKPOINT.refusal(file.path, got, name)
    return own


def of_a_model(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names a model of this package can have."""
    return {name: tensor for name, tensor in state.items() if TIMM.own_names(name)}


# what the tensors show ----------------------------------------------------------------------------


def shape_of(state: Mapping[str, Tensor], source: str) -> dict[str, Any]:
    """The architecture that tensors under own names show, by field of `ModelSpec`, and its `grid`:
    how many patches its position table is for, None without one. The number of heads does not show.
    """
    _check_plain(state, source)
    blocks = {match[1] for name in state if (match := BLOCK.match(name))}
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


def _check_plain(state: Mapping[str, Tensor], source: str) -> None:
    """Raise unless the tensors from which sizes are read are there; all others are compared where
    they are copied."""
    shapes = {name: tuple(state[name].shape) for name in SHAPED if name in state}
    if missing := [name for name in AXES if name not in state]:
        fault = f"lacks a tensor {missing[0]!r}, it has {first_of(sorted(state), SHOWN)}"
    elif strange := [name for name in OTHERS if name in state]:
        fault = f"holds {strange[0]!r}"
    elif odd := [n for n, shape in shapes.items() if len(shape) != SHAPED[n] or 0 in shape]:
        axes = SHAPED[odd[0]]
        fault = f"has {odd[0]!r} of shape {shapes[odd[0]]} in place of {axes} axes with numbers"
    else:
        return
    raise UserError(
        f"{source} {shown(fault)}: expected a plain ViT with one class token, one head and no "
        "layer scale, of RGB pictures, in the layout of "
        f"{'; '.join(layout.title for layout in LAYOUTS)}. A network of your own code: "
        "give it, with its gradients, to attack_gradients in Python."
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
    count = rows_of_patches(table, name, source)
    old, shown = math.isqrt(count), f"{grid.rows}×{grid.columns}"
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


# what files say -----------------------------------------------------------------------------------

STATES = replace(CHECKPOINT, expected="metadata of weights that state their model")
METADATA = (
    *("mean", "std", "num_heads", "img_size", "resize", "interpolation", "position_embedding"),
    *("first_block", "dal", "norm_eps", "activation", "trained_gamma", "adapters"),
)
"""Keys of a file's metadata that describe its model; their values are JSON."""


def stated(file: WeightFile) -> dict[str, Any]:
    """The facts that a file's metadata states, by field of `ModelSpec`: what our own exports carry
    (mean, num_heads, gamma, …). None: it states that there is none.

    Of anybody else's metadata only these entries are read, each of them JSON.
    """
    content = {
        key: json_value(file.metadata[key], file.path, replace(STATES, expected=f"JSON of {key!r}"))
        for key in METADATA
        if key in file.metadata
    }
    facts = typed({"name": file.path.name, **content}, file.path, STATES, ModelSpec)
    return {key: getattr(facts, key) for key in content}


def completed(spec: ModelSpec, shape: Mapping[str, Any], layout: Layout, source: str) -> ModelSpec:
    """The spec with its open fields (None) read off the checkpoint's tensors and their names.

    Networks with a norm before block 0 are CLIP's, whatever the names: their activation is open.
    """
    facts = dict(shape)
    grid, patch = facts.pop("grid"), spec.patch_size or shape["patch_size"]
    if grid and spec.img_size is None:
        if (side := math.isqrt(grid)) ** 2 != grid:
            raise UserError(
                f"{source}: its table has {grid} positions of patches, of no square picture: "
                "expected height and width in pixels. Give img_size: [height, width]."
            )
        facts["img_size"] = side * patch
    if spec.position_embedding != "learned":
        facts |= {"unknown_embedding": False, "dal": "none"}
    clip = shape["pre_norm"]
    facts["norm_eps"] = CLIP_EPS if clip else layout.norm_eps
    facts["activation"] = None if clip else layout.activation
    return filled(spec, facts)


BESIDE = FileKind(
    "the JSON file that a library saves beside weights",
    "Copy or download it again, or remove it and give the facts yourself.",
    4 << 20,
)
READ = frozenset(
    {
        *("num_classes", "in_chans", "img_size", "patch_size", "embed_dim", "depth", "mlp_ratio"),
        *("init_values", "reg_tokens", "class_token", "qkv_bias", "weight_init"),
        *("layers", "width", "head_width", "image_size", "ls_init_value", "output_tokens"),
        *("patch_dropout", "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"),
        *("attn_drop_rate", "drop_path_rate", "dynamic_img_size"),
        *("attn_pooler_queries", "attn_pooler_heads"),
    }
)
"""Arguments of networks that tensors show, that are read here or that change nothing once it is
trained; any other must be as the library has it by default (`AS_USUAL`, or nothing)."""
AS_USUAL = ("tok", "token", "gelu", "learnable", "learn")
RESAMPLING = {None: None, 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ACTIVATIONS = {"gelu_python": "gelu", **dict.fromkeys(TANH, "gelu_tanh")}
"""transformers' names of activations that have others here."""
HEAD_WIDTH = 64  # open_clip's, where its config states none
Word = Annotated[str, Field(strict=True, max_length=200)]


def _at(*places: str) -> Any:
    """A field that stands at the first of these places that the file has: `vision_config.x`."""
    paths: Any = ([int(x) if x.isdigit() else x for x in place.split(".")] for place in places)
    aliases = AliasChoices(*(AliasPath(*path) for path in paths))
    return Field(default=None, validation_alias=aliases)


def _side(size: Any) -> Any:
    """The short side of {"shortest_edge": 224}, {"height": 224, "width": 224}, [224, 224] or
    224."""
    if isinstance(size, list):
        size = dict(zip(("height", "width"), size, strict=False))
    if not isinstance(size, Mapping):
        return size
    sides = [size[name] for name in ("height", "width") if isinstance(size.get(name), int)]
    return size.get("shortest_edge", min(sides, default=None))


@dataclass(frozen=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class Stated:
    """What one of these files may state, in the words of the three libraries."""

    architecture: Word | None = None
    pool: Word | None = _at("model_args.global_pool", "global_pool")
    arguments: Mapping[str, Any] | None = _at("model_args", "model_cfg.vision_cfg")
    heads: Width | None = _at(
        "vision_config.num_attention_heads", "num_attention_heads", "model_args.num_heads"
    )
    width: Width | None = _at(
        "vision_config.hidden_size", "hidden_size", "model_cfg.vision_cfg.width"
    )
    head_width: Width | None = _at("model_cfg.vision_cfg.head_width")
    eps: Epsilon | None = _at("vision_config.layer_norm_eps", "layer_norm_eps")
    activation: Annotated[
        Activation | None, BeforeValidator(lambda name: ACTIVATIONS.get(str(name), name))
    ] = _at("vision_config.hidden_act", "hidden_act")
    quick_gelu: Switch | None = _at("model_cfg.quick_gelu")
    mean: Mean = _at("pretrained_cfg.mean", "preprocess_cfg.mean", "image_mean", "mean")
    std: Std = _at("pretrained_cfg.std", "preprocess_cfg.std", "image_std", "std")
    tall: Side | None = _at("pretrained_cfg.input_size.1", "input_size.1")
    side: Side | None = _at("pretrained_cfg.input_size.2", "input_size.2")
    crop: Positive | None = _at("pretrained_cfg.crop_pct", "crop_pct")
    size: Annotated[Side | None, BeforeValidator(_side)] = _at(
        "size", "preprocess_cfg.size", "model_cfg.vision_cfg.image_size"
    )
    interpolation: Interpolation | None = _at(
        "pretrained_cfg.interpolation", "preprocess_cfg.interpolation", "interpolation"
    )
    resample: Literal[2, 3] | None = None
    normalised: Switch | None = _at("do_normalize")
    rescaled: Switch | None = _at("do_rescale")
    factor: Positive | None = _at("rescale_factor")

    def check(self, path: Path, *more: str) -> None:
        """Raise where the network has arguments that change what it computes and that are not read,
        but for `more`, or where pixels do not come to it from 0 to 1."""
        for name, value in (self.arguments or {}).items():
            if name not in READ and name not in more and value and value not in AS_USUAL:
                raise _not_as_usual(path, name, value)
        if self.rescaled is False or abs((self.factor or 1 / 255) * 255 - 1) > 1e-3:
            raise _not_as_usual(path, "do_rescale, rescale_factor", "pixels not divided by 255")


def _not_as_usual(path: Path, name: str, got: Any) -> UserError:
    return UserError(
        f"{shown(path)}, {shown(name)}: expected what its library has by default, got "
        f"{shown(str(got))}: the network then computes something else, which is not read from "
        "files. Give the live network: attack_gradients and save_upload take one."
    )


def with_facts_beside(
    spec: ModelSpec, file: Path, layout: Layout, shape: Mapping[str, Any]
) -> ModelSpec:
    """The spec with the facts in the JSON files beside a file of weights, where there are any.

    They win over the defaults that come with a model's name.
    """
    facts = _facts(file, layout.name)
    width = facts.pop("width", shape["embed_dim"])
    if width != shape["embed_dim"]:
        raise UserError(
            f"{shown(file.name)} is of width {shape['embed_dim']}, the JSON file beside it of "
            f"width {width}: expected both of one model. Give a folder that holds one model alone."
        )
    side = math.isqrt(shape["grid"] or 0)
    if "resize" in facts and side and side**2 == shape["grid"]:  # which is for the file's own size
        facts.setdefault("img_size", side * (spec.patch_size or shape["patch_size"]))
    return replace(spec, **facts)


def timm_beside(file: Path) -> tuple[str, dict[str, Any]] | None:
    """The architecture in timm's config.json beside a file of weights, and what else it states of
    the model; None without one, and for a plain ViT."""
    path = file.parent / CONFIG
    name = _architecture(path) if is_there(file) else None
    if name is None or not is_timm_network(name):
        return None
    import timm

    said = read_json(path, BESIDE, Stated)
    said.check(path, "global_pool")
    if (pool := said.pool) is not None:
        with torch.device("meta"):
            own = getattr(timm.create_model(name), "global_pool", "")
        if pool != own:
            got = f"global_pool {shown(pool)}, and this timm's {name} has {own}"
            raise BESIDE.refusal(path, got, "global_pool")
    facts = _facts(file, "timm")
    return name, {field: facts[field] for field in ("img_size", *PICTURES) if field in facts}


def _architecture(path: Path) -> str | None:
    """The architecture that a config.json of timm's states; None in any other program's."""
    content = read_json_value(path, BESIDE) if is_there(path) else {}
    named = isinstance(content, Mapping) and content.get("architecture") is not None
    return str(content["architecture"]) if named else None


def _facts(file: Path, layout: str) -> dict[str, Any]:
    """What is stated beside a file, by field of `ModelSpec`, and the `width`."""
    names = JSON_FILES.get(layout, ())
    paths = [path for name in names if is_there(path := file.parent / name)]
    if not is_there(file) or (layout == "timm" and _architecture(file.parent / CONFIG) is None):
        return {}
    facts: dict[str, Any] = {}
    for path in paths:
        said = read_json(path, BESIDE, Stated)
        named = architecture(said.architecture or "")
        if not (said.architecture and is_timm_network(said.architecture)):
            said.check(path, "num_heads")
            if said.pool not in (None, "", "token"):
                raise _not_as_usual(path, "global_pool", said.pool)
        plain = (0.0,) * 3, (1.0,) * 3
        mean, std = plain if said.normalised is False else (said.mean, said.std)
        sides = [side for side in (said.tall, said.side) if side]
        heads = said.width // (said.head_width or HEAD_WIDTH) if said.width else None
        own = {
            "num_heads": heads if layout == "open_clip" else said.heads or named.num_heads,
            "width": said.width or named.embed_dim,
            "norm_eps": said.eps,
            "activation": said.activation,
            "mean": mean,
            "std": std,
            "img_size": (said.tall, said.side) if said.tall and said.side else said.side,
            "resize": int(min(sides) / said.crop) if sides and said.crop else said.size,
            "interpolation": said.interpolation or RESAMPLING[said.resample],
        }
        if layout == "open_clip":
            own["activation"] = "quick_gelu" if said.quick_gelu else "gelu"
        facts |= {name: value for name, value in own.items() if value is not None}
    return facts


# into the model -----------------------------------------------------------------------------------


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
    of_model = of_a_model(state).values()
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in of_model}
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
    unknown = layout.unknown(file.tensors)
    of_layers = (name for name in state if name.startswith(LAYERS) or name in unknown)
    used = {name: state[name] for name in (*of_layers, *expected) if name in state}
    fill(model, used, expected, source)
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


OWN_SIZES = (
    "Give this network's weights; or leave name and sizes out, so that they are read off the file."
)


def fill(
    network: nn.Module, came: Mapping[str, Tensor], needed: Collection[str], source: str
) -> None:
    """Copy the tensors of a file into a network, in the network's types, but into no outline; see
    `check_same`."""
    check_same(network, came, needed, source)
    if not next(network.parameters()).is_meta:
        network.load_state_dict(dict(came), strict=False)


def check_same(
    network: nn.Module, came: Mapping[str, Tensor], needed: Collection[str], source: str
) -> None:
    """Raise unless the tensors of a file are those of a network.

    needed  the names that the file must hold; others of the network, such as buffers, may be left
            out
    """
    own = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    misshapen = [name for name in own if name in came and tuple(came[name].shape) != own[name]]
    fitting = set(needed) & set(came) - set(misshapen)
    if len(fitting) < len(needed) / 2:
        source = f"{source} is of another network"
    missing, surplus = sorted(set(needed) - set(came)), sorted(set(came) - set(own))
    if missing or surplus:
        what = "lacks" if missing else "has beyond them"
        names = missing or surplus
        raise UserError(
            f"{source}: of the network's {len(needed)} tensors it {what} {len(names)}: "
            f"{shown(first_of(names, SHOWN))}. Expected a complete checkpoint of this network, for "
            f"without a tensor it would be another. {OWN_SIZES}"
        )
    if misshapen:
        name, got = misshapen[0], tuple(came[misshapen[0]].shape)
        raise UserError(
            f"{source}: tensor {name!r} has shape {got}, expected {own[name]}. {OWN_SIZES}"
        )
