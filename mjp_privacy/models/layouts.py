r"""How libraries name a Vision Transformer's parameters, and those names in this package's own.

A rule moves numbers and never changes them (it renames, cuts, transposes or joins), so what it does
to a parameter is right for its gradient and for a difference of weights too.

To add a layout, describe it below and put it into LAYOUTS: `recognised`, checkpoints, live modules
and the table of README.md follow. Own names are timm's, with `unk_embed`, `index_embed`,
`dal_regressor.*` (MJP) and `dist_token`, `dist_pos_embed` (a distillation token and its row of the
position table, which stand apart so that the table has one row for the class and one a patch).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown

WRAPPERS = (
    *("module", "_orig_mod", "_fsdp_wrapped_module"),  # DataParallel, torch.compile, FSDP
    *("model", "base_model", "backbone", "network", "net"),  # training scripts
    *("vit", "deit", "vision_model"),  # transformers: the network in a classifier
)
"""What stands before names of the same parameters."""
_WRAPPED = re.compile(rf"(?:(?:{'|'.join(WRAPPERS)})\.)*")
JOINED = 3  # query, key and value


def unwrapped(name: str) -> str:
    """A parameter's name without wrappers: `module._orig_mod.cls_token` is `cls_token`."""
    return name[_WRAPPED.match(name).end() :]  # type: ignore[union-attr]


@dataclass(frozen=True)
class Rule:
    r"""Names that `pattern` matches as a whole become `own`, a template such as `blocks.\1.norm1`.

    take   the numbers that are taken, in the own parameter's shape; it counts axes from the end,
           so that leading axes (a step, an image) pass through
    part   0, 1, 2: the tensor is the query, key or value of a joined parameter
    """

    pattern: str
    own: str
    take: Callable[[Tensor], Tensor] = lambda tensor: tensor
    part: int | None = None

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def own_name(self, name: str) -> str | None:
        """The own name of a library's name, or None where the rule is not about it."""
        match = self._compiled.fullmatch(name)
        return match.expand(self.own) if match else None


UNRULED = Rule("", "")  # of a name that no rule is about: the tensor stays as it is


@dataclass(frozen=True)
class Layout:
    """One way of naming a Vision Transformer's parameters.

    sign    a pattern that matches as a whole at least one name of every such model, and of a part
            of its gradients, and no name of another layout that stands later in the list
    tower   what stands before the names in a model of pictures and text, where the same names
            without it mean the text's parameters
    beside  a pattern of names that a whole model may hold and that the way from a picture to the
            output does not touch, such as a pooler's
    norm_eps, activation   what the library's networks have by default, which no tensor shows; no
            activation: there are several, and which one must be known
    """

    name: str
    title: str
    sign: str
    rules: tuple[Rule, ...] = ()
    tower: str = ""
    beside: str = r"(?!)"
    norm_eps: float = 1e-6
    activation: str | None = "gelu"

    def to_own(self, tensors: Mapping[str, Tensor], *, axes: int = 0) -> dict[str, Tensor]:
        """The tensors under this package's names, in the shapes of its parameters.

        `axes` leading axes stand before the parameter's own. The tensors may be a part of the
        model's: a joined qkv appears where query, key and value are all there. A name that the
        layout does not know stays as it is.

            recognised(grads).to_own(grads)["blocks.0.attn.qkv.weight"]
        """
        own: dict[str, Tensor] = {}
        source: dict[str, str] = {}
        parts: dict[str, dict[int, Tensor]] = {}
        towered = self._has_tower(tensors)
        for name, tensor in tensors.items():
            for rule, target in self._applied(name, towered) or [(UNRULED, name)]:
                taken = _taken(rule, name, tensor)
                place = target if rule.part is None else f"{target}, part {rule.part}"
                if place in source:
                    raise UserError(
                        f"The names {shown(source[place])!r} and {shown(name)!r} both mean "
                        f"{shown(place)!r}: expected "
                        "the parameters of one model, got two. Leave one of them out."
                    )
                source[place] = name
                if rule.part is None:
                    own[target] = taken
                else:
                    parts.setdefault(target, {})[rule.part] = taken
        for target, pieces in parts.items():
            if len(pieces) == JOINED:
                own[target] = _joined([pieces[part] for part in range(JOINED)], axes, target)
        return own

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Names that are neither parameters of this layout nor known to stand beside them."""
        names = list(names)
        towered = self._has_tower(names)
        of_the_picture = [n for n in names if self._in_tower(n, towered) is not None]
        strange = (n for n in of_the_picture if not self._applied(n, towered))
        return [n for n in strange if not re.fullmatch(self.beside, unwrapped(n))]

    def own_names(self, name: str) -> list[str]:
        """What one name is called here; a table that holds two kinds of rows has two names."""
        return [target for _, target in self._applied(name, self._has_tower((name,)))]

    def _has_tower(self, names: Iterable[str]) -> bool:
        return bool(self.tower) and any(unwrapped(n).startswith(self.tower) for n in names)

    def _in_tower(self, name: str, towered: bool) -> str | None:
        """The name without wrappers; None where it is of the text's tower."""
        bare = unwrapped(name)
        if towered and not bare.startswith(self.tower):
            return None
        return bare.removeprefix(self.tower)

    def _applied(self, name: str, towered: bool) -> list[tuple[Rule, str]]:
        """The rules that are about a name, each with the own name that it gives."""
        bare = self._in_tower(name, towered)
        if bare is None:
            return []
        given = ((rule, rule.own_name(bare)) for rule in self.rules)
        return [(rule, target) for rule, target in given if target is not None]


def _taken(rule: Rule, name: str, tensor: Tensor) -> Tensor:
    try:
        return rule.take(tensor)
    except (IndexError, RuntimeError) as error:  # of a shape that has no such rows or axes
        raise UserError(
            f"{shown(name)} has the shape {tuple(tensor.shape)}: expected one that holds "
            f"{rule.own!r}. Give the parameters of a whole Vision Transformer."
        ) from error


def _joined(parts: Sequence[Tensor], axes: int, target: str) -> Tensor:
    """Query, key and value as one parameter."""
    if len({(part.shape, part.dtype) for part in parts}) > 1 or parts[0].ndim <= axes:
        shapes = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in parts)
        raise UserError(
            f"The query, key and value of {target!r} have the shapes {shapes}: expected three of "
            "one shape and type. Give the parameters of a whole Vision Transformer."
        )
    return torch.cat(list(parts), dim=axes)


# what rules are made of ---------------------------------------------------------------------------

PAIR = r"\.(weight|bias)"


def as_token(vector: Tensor) -> Tensor:
    """(…, D) as a token (…, 1, 1, D)."""
    return vector[..., None, None, :]


def as_table(rows: Tensor) -> Tensor:
    """(…, N+1, D) as a position table (…, 1, N+1, D)."""
    return rows.unsqueeze(-3)


def block(prefix: str, names: dict[str, str]) -> tuple[Rule, ...]:
    """Rules for one block: own layer -> the library's, each with a weight and a bias."""
    return tuple(
        Rule(rf"{prefix}\.{theirs}{PAIR}", rf"blocks.\1.{own}.\2") for own, theirs in names.items()
    )


def query_key_value(prefix: str, query: str, key: str, value: str) -> tuple[Rule, ...]:
    """Rules that join the library's three layers into one."""
    return tuple(
        Rule(rf"{prefix}\.{theirs}{PAIR}", r"blocks.\1.attn.qkv.\2", part=part)
        for part, theirs in enumerate((query, key, value))
    )


def layers(names: dict[str, str]) -> tuple[Rule, ...]:
    """Rules for layers outside the blocks: own layer -> the library's."""
    return tuple(Rule(rf"{theirs}{PAIR}", rf"{own}.\1") for own, theirs in names.items())


# the layouts that are known, most telling names first ---------------------------------------------

_OWN_NAMES = (
    r"cls_token|pos_embed|unk_embed|index_embed|dist_token|dist_pos_embed",
    r"(?:patch_embed\.proj|norm_pre|norm|head|dal_regressor\.layers(?:\.\d+)?)\.(?:weight|bias)",
    r"blocks\.\d+\.(?:norm[12]|attn\.(?:qkv|proj)|mlp\.fc[12])\.(?:weight|bias)",
    r"blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.fc[12])\.lora_[AB]\.weight",
)
_OWN = tuple(Rule(f"({names})", r"\1") for names in _OWN_NAMES)

TIMM = Layout(
    name="timm",
    title="timm, DeiT's authors, and this package",
    sign=rf"cls_token|pos_embed|patch_embed\.proj{PAIR}|{_OWN_NAMES[2]}",
    rules=_OWN,
    beside=".*",
)
OFFICIAL_MJP = Layout(  # its lookup table (N+2, D) has the patches' rows, and E_unk in the last
    name="official_mjp",
    title="the authors' MJP",
    sign=r"pos_embed\.weight|dlocr\..*",
    rules=(
        Rule(r"pos_embed\.weight", "pos_embed", lambda rows: as_table(rows[..., :-1, :])),
        Rule(r"pos_embed\.weight", "unk_embed", lambda rows: as_table(rows[..., -1:, :])),
        Rule(rf"dlocr\.(layers(?:\.\d+)?){PAIR}", r"dal_regressor.\1.\2"),
        *_OWN,
    ),
    beside=".*",
)

_TORCHVISION_BLOCK = r"encoder\.layers\.encoder_layer_(\d+)"
TORCHVISION = Layout(
    name="torchvision",
    title="torchvision (vit_b_16)",
    sign=r"class_token|conv_proj\..*|encoder\.pos_embedding|encoder\.layers\.encoder_layer_\d+\..*",
    rules=(
        Rule("class_token", "cls_token"),
        Rule(r"encoder\.pos_embedding", "pos_embed"),
        *layers({"patch_embed.proj": "conv_proj", "norm": r"encoder\.ln", "head": r"heads\.head"}),
        Rule(rf"{_TORCHVISION_BLOCK}\.self_attention\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
        *block(
            _TORCHVISION_BLOCK,
            {
                "norm1": "ln_1",
                "attn.proj": r"self_attention\.out_proj",
                "norm2": "ln_2",
                "mlp.fc1": r"mlp\.(?:0|linear_1)",
                "mlp.fc2": r"mlp\.(?:3|linear_2)",
            },
        ),
    ),
)

_NEW_BLOCK, _OLD_BLOCK = r"(?:encoder\.)?layers\.(\d+)", r"encoder\.layer\.(\d+)"
_HUGGING_FACE = (
    *layers(
        {
            "patch_embed.proj": r"embeddings\.patch_embeddings\.projection",
            "norm": "layernorm",
            "head": "classifier",
        }
    ),
    Rule(r"embeddings\.cls_token", "cls_token"),
    *query_key_value(_NEW_BLOCK, r"attention\.q_proj", r"attention\.k_proj", r"attention\.v_proj"),
    *block(
        _NEW_BLOCK,
        {
            "norm1": "layernorm_before",
            "attn.proj": r"attention\.o_proj",
            "norm2": "layernorm_after",
            "mlp.fc1": r"mlp\.fc1",
            "mlp.fc2": r"mlp\.fc2",
        },
    ),
    *query_key_value(  # before transformers 5, and in files on its hub
        _OLD_BLOCK,
        *(rf"attention\.attention\.{part}" for part in ("query", "key", "value")),
    ),
    *block(
        _OLD_BLOCK,
        {
            "norm1": "layernorm_before",
            "attn.proj": r"attention\.output\.dense",
            "norm2": "layernorm_after",
            "mlp.fc1": r"intermediate\.dense",
            "mlp.fc2": r"output\.dense",
        },
    ),
)
_HUGGING_FACE_SIGN = (
    r"embeddings\.(?:cls_token|position_embeddings|patch_embeddings\.projection\.\w+)"
    rf"|{_NEW_BLOCK}\.(?:attention\.[qkvo]_proj|layernorm_\w+)\.\w+"
    rf"|{_OLD_BLOCK}\.(?:attention\.attention|layernorm_\w+)\..*"
)
_HUGGING_FACE_BESIDE = r"pooler\..*|embeddings\.mask_token"
HF_DEIT = Layout(  # its table has the distillation token's row after the class token's
    name="hf_deit",
    title="Hugging Face DeiT",
    sign=rf"(?:.*\.)?(?:deit\.(?:{_HUGGING_FACE_SIGN})|embeddings\.distillation_token)",
    rules=(
        Rule(
            r"embeddings\.position_embeddings",
            "pos_embed",
            lambda table: table[..., [0, *range(2, table.shape[-2])], :],
        ),
        Rule(
            r"embeddings\.position_embeddings", "dist_pos_embed", lambda table: table[..., 1:2, :]
        ),
        Rule(r"embeddings\.distillation_token", "dist_token"),
        *_HUGGING_FACE,
    ),
    beside=_HUGGING_FACE_BESIDE,
    norm_eps=1e-12,
)
HF_VIT = Layout(
    name="hf_vit",
    title="Hugging Face ViT",
    sign=_HUGGING_FACE_SIGN,
    rules=(Rule(r"embeddings\.position_embeddings", "pos_embed"), *_HUGGING_FACE),
    beside=_HUGGING_FACE_BESIDE,
    norm_eps=1e-12,
)

_CLIP_BLOCK = r"encoder\.layers\.(\d+)"
HF_CLIP = Layout(
    name="hf_clip",
    title="Hugging Face CLIP, visual tower",
    sign=(
        r"embeddings\.(?:class_embedding|patch_embedding\.\w+|position_embedding\.weight)"
        rf"|pre_layrnorm\.\w+|{_CLIP_BLOCK}\.(?:self_attn\..*|layer_norm[12]\.\w+)"
    ),
    rules=(
        Rule(r"embeddings\.class_embedding", "cls_token", as_token),
        Rule(r"embeddings\.position_embedding\.weight", "pos_embed", as_table),
        *layers(
            {
                "patch_embed.proj": r"embeddings\.patch_embedding",
                "norm_pre": "pre_layrnorm",  # as the library spells it
                "norm": "post_layernorm",
                "head": "visual_projection",
            }
        ),
        *query_key_value(
            _CLIP_BLOCK, r"self_attn\.q_proj", r"self_attn\.k_proj", r"self_attn\.v_proj"
        ),
        *block(
            _CLIP_BLOCK,
            {
                "norm1": "layer_norm1",
                "attn.proj": r"self_attn\.out_proj",
                "norm2": "layer_norm2",
                "mlp.fc1": r"mlp\.fc1",
                "mlp.fc2": r"mlp\.fc2",
            },
        ),
    ),
    beside=r"text_model\..*|text_projection\..*|logit_scale|embeddings\.position_ids",
    norm_eps=1e-5,
    activation=None,
)

_RESBLOCK = r"transformer\.resblocks\.(\d+)"
_OPEN_CLIP_SIGN = rf"class_embedding|positional_embedding|ln_pre\.\w+|{_RESBLOCK}\..*"
OPEN_CLIP = Layout(
    name="open_clip",
    title="open_clip and OpenAI's CLIP, visual tower",
    sign=rf"(?:visual\.)?(?:{_OPEN_CLIP_SIGN})",
    rules=(
        Rule("class_embedding", "cls_token", as_token),
        Rule("positional_embedding", "pos_embed", as_table),
        Rule("proj", "head.weight", lambda matrix: matrix.mT),
        *layers({"patch_embed.proj": "conv1", "norm_pre": "ln_pre", "norm": "ln_post"}),
        Rule(rf"{_RESBLOCK}\.attn\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
        *block(
            _RESBLOCK,
            {
                "norm1": "ln_1",
                "attn.proj": r"attn\.out_proj",
                "norm2": "ln_2",
                "mlp.fc1": r"mlp\.c_fc",
                "mlp.fc2": r"mlp\.c_proj",
            },
        ),
    ),
    tower="visual.",
    norm_eps=1e-5,
    activation=None,
)

LAYOUTS = (OFFICIAL_MJP, TIMM, TORCHVISION, HF_DEIT, HF_VIT, HF_CLIP, OPEN_CLIP)


# which layout a set of names has ------------------------------------------------------------------

SHOWN = 6  # names shown of a set that fits no layout


def fitting(names: Iterable[str]) -> Layout | None:
    """The first layout that has one of the names as its sign, or None."""
    names = list(names)
    for layout in LAYOUTS:
        sign = re.compile(layout.sign)
        if any(sign.fullmatch(n) or sign.fullmatch(unwrapped(n)) for n in names):
            return layout
    return None


def recognised(names: Iterable[str]) -> Layout:
    """The layout of a model, a checkpoint or a (partial) gradient, from its names alone.

    recognised(model.state_dict()).name == "torchvision"
    """
    names = list(names)
    layout = fitting(names)
    if layout is None:
        raise UserError(
            f"The names fit no Vision Transformer that is known here: expected those of "
            f"{'; '.join(layout.title for layout in LAYOUTS)}; got {_some_of(names)}. Give the "
            "parameters under the names of one of these (named_parameters() or state_dict())."
        )
    return layout


def _some_of(names: Iterable[str]) -> str:
    """A few of the names, for a message: `a, b, c, …`."""
    names = sorted(names)
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "") or "no names"
