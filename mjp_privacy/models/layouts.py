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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import first_of, shown

WRAPPERS = (
    *("module", "_orig_mod", "_fsdp_wrapped_module"),  # DataParallel, torch.compile, FSDP
    *("model", "base_model", "backbone", "network", "net"),  # training scripts
    *("vit", "deit", "vision_model"),  # transformers: the network in a classifier
)
"""What stands before names of the same parameters."""
_WRAPPED = re.compile(rf"(?:(?:{'|'.join(WRAPPERS)})\.)*")
PARTS = ("query", "key", "value")  # of a joined parameter
SHOWN = 6  # names shown of a set that fits no layout


def unwrapped(name: str) -> str:
    """A parameter's name without wrappers: `module._orig_mod.cls_token` is `cls_token`."""
    return name[_WRAPPED.match(name).end() :]  # type: ignore[union-attr]


# rules, which are lines of a text -----------------------------------------------------------------

TAKES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda tensor: tensor,
    "token": lambda vector: vector[..., None, None, :],
    "table": lambda rows: rows.unsqueeze(-3),
    "transposed": lambda matrix: matrix.mT,
    "but the last": lambda rows: rows[..., None, :-1, :],
    "the last": lambda rows: rows[..., None, -1:, :],
    "but the second": lambda table: table[..., [0, *range(2, table.shape[-2])], :],
    "the second": lambda table: table[..., 1:2, :],
}
"""The numbers that a rule takes, in the own parameter's shape. Axes are counted from the end, so
that leading axes (a step, an image) pass through."""


class Rule(NamedTuple):
    r"""Names that `pattern` matches as a whole become `own`, a template such as `blocks.\1.norm1`.

    part   0, 1, 2: the tensor is the query, key or value of a joined parameter
    """

    pattern: re.Pattern[str]
    own: str
    take: Callable[[Tensor], Tensor] = TAKES[""]
    part: int | None = None


AS_IS = Rule(_WRAPPED, "")
"""Of a name that no rule is about."""


def rules(text: str) -> tuple[Rule, ...]:
    """The rules of a text whose lines are `their name, own name, what is taken of it`.

    # is a block's number and * a weight or a bias, of both names; what stands in [] may be missing;
    what is taken may also be the query, key or value of a joined parameter.

    rules("encoder.layers.#.ln_1.*, blocks.#.norm1.*")
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        theirs, own, how = (part.strip() for part in f"{line},,".split(",")[:3])
        pattern = re.escape(theirs).replace(r"\#", r"(\d+)").replace(r"\*", "(weight|bias)")
        pattern = pattern.replace(r"\[", "(?:").replace(r"\]", ")?")
        last = 2 if "#" in own else 1  # the group of a weight or a bias
        own = own.replace("#", r"\1").replace("*", rf"\{last}")
        part = PARTS.index(how) if how in PARTS else None
        found.append(Rule(re.compile(pattern), own, TAKES["" if how in PARTS else how], part))
    return tuple(found)


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
        joined: dict[str, dict[int, Tensor]] = {}
        for name, bare in self._bare(tensors).items():
            for rule, target in self._applied(bare) or [(AS_IS, name)]:
                tensor = tensors[name]
                place = target if rule.part is None else f"{target}, the {PARTS[rule.part]}"
                if source.setdefault(place, name) != name:
                    raise UserError(
                        f"The names {shown(source[place])!r} and {shown(name)!r} both mean "
                        f"{shown(place)!r}: expected the parameters of one model, got two. Leave "
                        "one of them out."
                    )
                try:
                    taken = rule.take(tensor)
                except (IndexError, RuntimeError) as error:  # without such rows or axes
                    raise UserError(
                        f"{shown(name)} has the shape {tuple(tensor.shape)}: expected one that "
                        f"holds {rule.own!r}. Give the parameters of a whole Vision Transformer."
                    ) from error
                if rule.part is None:
                    own[target] = taken
                else:
                    joined.setdefault(target, {})[rule.part] = taken
        for target, by_part in joined.items():
            if len(by_part) < len(PARTS):
                continue
            parts = [by_part[part] for part in sorted(by_part)]
            if len({(part.shape, part.dtype) for part in parts}) > 1 or parts[0].ndim <= axes:
                shapes = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in parts)
                raise UserError(
                    f"The query, key and value of {target!r} have the shapes {shapes}: expected "
                    "three of one shape and type. Give the parameters of a whole Vision "
                    "Transformer."
                )
            own[target] = torch.cat(parts, dim=axes)
        return own

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Names that are neither parameters of this layout nor known to stand beside them."""
        bare_names = self._bare(names).items()
        strange = (
            name for name, bare in bare_names if bare is not None and not self._applied(bare)
        )
        return [name for name in strange if not re.fullmatch(self.beside, unwrapped(name))]

    def own_names(self, name: str) -> list[str]:
        """What one name is called here; a table that holds two kinds of rows has two names."""
        return [target for _, target in self._applied(self._bare((name,))[name])]

    def _bare(self, names: Iterable[str]) -> Mapping[str, str | None]:
        """Each name without wrappers and tower; None where it is of the text's tower."""
        bare, tower = {name: unwrapped(name) for name in names}, self.tower
        if not tower or not any(own.startswith(tower) for own in bare.values()):
            return bare
        return {
            name: own.removeprefix(tower) if own.startswith(tower) else None
            for name, own in bare.items()
        }

    def _applied(self, bare: str | None) -> list[tuple[Rule, str]]:
        """The rules that are about a bare name, each with the own name that it gives."""
        matches = ((rule, rule.pattern.fullmatch(bare or "")) for rule in self.rules)
        return [(rule, match.expand(rule.own)) for rule, match in matches if match]


# the layouts that are known, most telling names first ---------------------------------------------

_OWN_BLOCK = r"blocks\.\d+\.(?:norm[12]|attn\.(?:qkv|proj)|mlp\.fc[12])\.(?:weight|bias)"
_OWN_NAMES = (
    r"cls_token|pos_embed|unk_embed|index_embed|dist_token|dist_pos_embed",
    r"(?:patch_embed\.proj|norm_pre|norm|head|dal_regressor\.layers(?:\.\d+)?)\.(?:weight|bias)",
    _OWN_BLOCK,
    r"blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.fc[12])\.lora_[AB]\.weight",
)
_OWN = tuple(Rule(re.compile(f"({names})"), r"\1") for names in _OWN_NAMES)

TIMM = Layout(
    name="timm",
    title="timm, DeiT's authors, and this package",
    sign=rf"cls_token|pos_embed|patch_embed\.proj\.(?:weight|bias)|{_OWN_BLOCK}",
    rules=_OWN,
    beside=".*",
)
OFFICIAL_MJP = Layout(  # its lookup table (N+2, D) has the patches' rows, and E_unk in the last
    name="official_mjp",
    title="the authors' MJP",
    sign=r"pos_embed\.weight|dlocr\..*",
    rules=rules(
        """
        pos_embed.weight, pos_embed, but the last
        pos_embed.weight, unk_embed, the last
        dlocr.layers.*, dal_regressor.layers.*
        dlocr.layers.#.*, dal_regressor.layers.#.*
        """
    )
    + _OWN,
    beside=".*",
)
TORCHVISION = Layout(
    name="torchvision",
    title="torchvision (vit_b_16)",
    sign=r"class_token|conv_proj\..*|encoder\.pos_embedding|encoder\.layers\.encoder_layer_\d+\..*",
    rules=rules(
        """
        class_token, cls_token
        encoder.pos_embedding, pos_embed
        conv_proj.*, patch_embed.proj.*
        encoder.ln.*, norm.*
        heads.head.*, head.*
        encoder.layers.encoder_layer_#.ln_1.*, blocks.#.norm1.*
        encoder.layers.encoder_layer_#.self_attention.in_proj_*, blocks.#.attn.qkv.*
        encoder.layers.encoder_layer_#.self_attention.out_proj.*, blocks.#.attn.proj.*
        encoder.layers.encoder_layer_#.ln_2.*, blocks.#.norm2.*
        encoder.layers.encoder_layer_#.mlp.0.*, blocks.#.mlp.fc1.*
        encoder.layers.encoder_layer_#.mlp.3.*, blocks.#.mlp.fc2.*
        encoder.layers.encoder_layer_#.mlp.linear_1.*, blocks.#.mlp.fc1.*
        encoder.layers.encoder_layer_#.mlp.linear_2.*, blocks.#.mlp.fc2.*
        """
    ),
)

_HUGGING_FACE = rules(  # the last blocks as before transformers 5, and in files on its hub
    """
    embeddings.cls_token, cls_token
    embeddings.patch_embeddings.projection.*, patch_embed.proj.*
    layernorm.*, norm.*
    classifier.*, head.*
    [encoder.]layers.#.layernorm_before.*, blocks.#.norm1.*
    [encoder.]layers.#.attention.q_proj.*, blocks.#.attn.qkv.*, query
    [encoder.]layers.#.attention.k_proj.*, blocks.#.attn.qkv.*, key
    [encoder.]layers.#.attention.v_proj.*, blocks.#.attn.qkv.*, value
    [encoder.]layers.#.attention.o_proj.*, blocks.#.attn.proj.*
    [encoder.]layers.#.layernorm_after.*, blocks.#.norm2.*
    [encoder.]layers.#.mlp.fc1.*, blocks.#.mlp.fc1.*
    [encoder.]layers.#.mlp.fc2.*, blocks.#.mlp.fc2.*
    encoder.layer.#.layernorm_before.*, blocks.#.norm1.*
    encoder.layer.#.attention.attention.query.*, blocks.#.attn.qkv.*, query
    encoder.layer.#.attention.attention.key.*, blocks.#.attn.qkv.*, key
    encoder.layer.#.attention.attention.value.*, blocks.#.attn.qkv.*, value
    encoder.layer.#.attention.output.dense.*, blocks.#.attn.proj.*
    encoder.layer.#.layernorm_after.*, blocks.#.norm2.*
    encoder.layer.#.intermediate.dense.*, blocks.#.mlp.fc1.*
    encoder.layer.#.output.dense.*, blocks.#.mlp.fc2.*
    """
)
_HUGGING_FACE_SIGN = (
    r"embeddings\.(?:cls_token|position_embeddings|patch_embeddings\.projection\.\w+)"
    r"|(?:encoder\.)?layers\.\d+\.(?:attention\.[qkvo]_proj|layernorm_\w+)\.\w+"
    r"|encoder\.layer\.\d+\.(?:attention\.attention|layernorm_\w+)\..*"
)
_HUGGING_FACE_BESIDE = r"pooler\..*|embeddings\.mask_token"
HF_DEIT = Layout(  # its table has the distillation token's row after the class token's
    name="hf_deit",
    title="Hugging Face DeiT",
    sign=rf"(?:.*\.)?(?:deit\.(?:{_HUGGING_FACE_SIGN})|embeddings\.distillation_token)",
    rules=rules(
        """
        embeddings.position_embeddings, pos_embed, but the second
        embeddings.position_embeddings, dist_pos_embed, the second
        embeddings.distillation_token, dist_token
        """
    )
    + _HUGGING_FACE,
    beside=_HUGGING_FACE_BESIDE,
    norm_eps=1e-12,
)
HF_VIT = Layout(
    name="hf_vit",
    title="Hugging Face ViT",
    sign=_HUGGING_FACE_SIGN,
    rules=rules("embeddings.position_embeddings, pos_embed") + _HUGGING_FACE,
    beside=_HUGGING_FACE_BESIDE,
    norm_eps=1e-12,
)
HF_CLIP = Layout(  # whose norm before block 0 is spelt so
    name="hf_clip",
    title="Hugging Face CLIP, visual tower",
    sign=(
        r"embeddings\.(?:class_embedding|patch_embedding\.\w+|position_embedding\.weight)"
        r"|pre_layrnorm\.\w+|encoder\.layers\.\d+\.(?:self_attn\..*|layer_norm[12]\.\w+)"
    ),
    rules=rules(
        """
        embeddings.class_embedding, cls_token, token
        embeddings.position_embedding.weight, pos_embed, table
        embeddings.patch_embedding.*, patch_embed.proj.*
        pre_layrnorm.*, norm_pre.*
        post_layernorm.*, norm.*
        visual_projection.*, head.*
        encoder.layers.#.layer_norm1.*, blocks.#.norm1.*
        encoder.layers.#.self_attn.q_proj.*, blocks.#.attn.qkv.*, query
        encoder.layers.#.self_attn.k_proj.*, blocks.#.attn.qkv.*, key
        encoder.layers.#.self_attn.v_proj.*, blocks.#.attn.qkv.*, value
        encoder.layers.#.self_attn.out_proj.*, blocks.#.attn.proj.*
        encoder.layers.#.layer_norm2.*, blocks.#.norm2.*
        encoder.layers.#.mlp.fc1.*, blocks.#.mlp.fc1.*
        encoder.layers.#.mlp.fc2.*, blocks.#.mlp.fc2.*
        """
    ),
    beside=r"text_model\..*|text_projection\..*|logit_scale|embeddings\.position_ids",
    norm_eps=1e-5,
    activation=None,
)
OPEN_CLIP = Layout(
    name="open_clip",
    title="open_clip and OpenAI's CLIP, visual tower",
    sign=(
        r"(?:visual\.)?(?:class_embedding|positional_embedding|ln_pre\.\w+"
        r"|transformer\.resblocks\.\d+\..*)"
    ),
    rules=rules(
        """
        class_embedding, cls_token, token
        positional_embedding, pos_embed, table
        proj, head.weight, transposed
        conv1.*, patch_embed.proj.*
        ln_pre.*, norm_pre.*
        ln_post.*, norm.*
        transformer.resblocks.#.ln_1.*, blocks.#.norm1.*
        transformer.resblocks.#.attn.in_proj_*, blocks.#.attn.qkv.*
        transformer.resblocks.#.attn.out_proj.*, blocks.#.attn.proj.*
        transformer.resblocks.#.ln_2.*, blocks.#.norm2.*
        transformer.resblocks.#.mlp.c_fc.*, blocks.#.mlp.fc1.*
        transformer.resblocks.#.mlp.c_proj.*, blocks.#.mlp.fc2.*
        """
    ),
    tower="visual.",
    norm_eps=1e-5,
    activation=None,
)

LAYOUTS = (OFFICIAL_MJP, TIMM, TORCHVISION, HF_DEIT, HF_VIT, HF_CLIP, OPEN_CLIP)


def recognised(names: Iterable[str], otherwise: Layout | None = None) -> Layout:
    """The layout of a model, a checkpoint or a (partial) gradient, from its names alone: the first
    of which one of the names, wrapped or not, is a sign.

    recognised(model.state_dict()).name == "torchvision"

    otherwise  what is returned for names that fit none; without it they are refused
    """
    names = sorted(names)
    forms = {*names, *map(unwrapped, names)}
    fitting = (layout for layout in LAYOUTS if any(re.fullmatch(layout.sign, f) for f in forms))
    layout = next(fitting, otherwise)
    if layout is None:
        raise UserError(
            f"The names fit no Vision Transformer that is known here: expected those of "
            f"{'; '.join(layout.title for layout in LAYOUTS)}; got "
            f"{first_of(names, SHOWN) or 'no names'}. Give the parameters under the names of one "
            "of these (named_parameters() or state_dict())."
        )
    return layout
