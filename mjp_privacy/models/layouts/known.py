r"""The layouts that are known, most telling names first.

To add one, describe it below and put it into LAYOUTS: `recognised`, checkpoints, live modules and
the table of models/README.md follow. Own names are timm's, with `unk_embed`, `index_embed`,
`dal_regressor.*` (MJP) and `dist_token`, `dist_pos_embed` (a distillation token and its row of the
position table, which stand apart so that the table has one row for the class and one a patch).
"""

from __future__ import annotations

from mjp_privacy.models.layouts.layout import Layout, Rule
from mjp_privacy.models.layouts.moves import (
    PAIR,
    as_table,
    as_token,
    block,
    last_row,
    layers,
    query_key_value,
    second_row,
    transposed,
    without_last_row,
    without_second_row,
)

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
OFFICIAL_MJP = Layout(
    name="official_mjp",
    title="the authors' MJP",
    sign=r"pos_embed\.weight|dlocr\..*",
    rules=(
        Rule(r"pos_embed\.weight", "pos_embed", without_last_row),
        Rule(r"pos_embed\.weight", "unk_embed", last_row),
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
HF_DEIT = Layout(
    name="hf_deit",
    title="Hugging Face DeiT",
    sign=rf"(?:.*\.)?(?:deit\.(?:{_HUGGING_FACE_SIGN})|embeddings\.distillation_token)",
    rules=(
        Rule(r"embeddings\.position_embeddings", "pos_embed", without_second_row),
        Rule(r"embeddings\.position_embeddings", "dist_pos_embed", second_row),
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
        Rule("proj", "head.weight", transposed),
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
