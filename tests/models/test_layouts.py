"""Layouts by hand: what each rule does to a tensor, and names that fit none or two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.layouts import LAYOUTS, recognised

OLD_BLOCK = "vit.encoder.layer.3."
NAMES = {
    "official_mjp": ("pos_embed.weight", "dlocr.layers.0.weight", "module.pos_embed.weight"),
    "timm": ("cls_token", "blocks.11.attn.qkv.bias", "model.patch_embed.proj.weight", "pos_embed"),
    "torchvision": ("class_token", "conv_proj.bias", "encoder.layers.encoder_layer_1.ln_1.bias"),
    "hf_deit": ("deit.embeddings.cls_token", "embeddings.distillation_token"),
    "hf_vit": (
        "embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.layers.0.attention.q_proj.weight",
        f"{OLD_BLOCK}attention.attention.query.weight",
        f"module.{OLD_BLOCK}layernorm_before.bias",
    ),
    "hf_clip": ("vision_model.pre_layrnorm.weight", "embeddings.class_embedding"),
    "open_clip": ("visual.class_embedding", "positional_embedding", "module.visual.ln_pre.bias"),
}


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.tensor(shape).prod())).reshape(shape)


@pytest.mark.parametrize(("layout", "name"), [(k, n) for k, names in NAMES.items() for n in names])
def test_one_name_tells_the_layout(layout: str, name: str) -> None:
    assert recognised([name]).name == layout


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_shapes_become_the_own_ones(axes: int) -> None:
    lead = (2, 3)[:axes]
    for sent, own in (
        ({"visual.class_embedding": (6,)}, {"cls_token": (1, 1, 6)}),
        ({"positional_embedding": (5, 6)}, {"pos_embed": (1, 5, 6)}),
        ({"ln_pre.bias": (6,), "proj": (6, 4)}, {"norm_pre.bias": (6,), "head.weight": (4, 6)}),
        ({"pos_embed.weight": (6, 4)}, {"pos_embed": (1, 5, 4), "unk_embed": (1, 1, 4)}),
        (
            {"deit.embeddings.position_embeddings": (1, 6, 4)},
            {"pos_embed": (1, 5, 4), "dist_pos_embed": (1, 1, 4)},
        ),
        ({"heads.head.weight": (3, 4), "class_token": (1, 1, 4)}, {"head.weight": (3, 4)}),
    ):
        tensors = {name: numbers(*lead, *shape) for name, shape in sent.items()}
        found = recognised(tensors).to_own(tensors, axes=axes)
        assert {n: tuple(found[n].shape) for n in own} == {n: (*lead, *s) for n, s in own.items()}


def test_rows_of_tables_go_where_they_belong() -> None:
    table = numbers(1, 6, 2)
    own = recognised(["deit.embeddings.cls_token"]).to_own(
        {"deit.embeddings.position_embeddings": table}
    )
    assert torch.equal(own["pos_embed"], table[:, [0, 2, 3, 4, 5]])
    assert torch.equal(own["dist_pos_embed"], table[:, 1:2])
    rows = numbers(6, 2)
    own = recognised(["pos_embed.weight"]).to_own({"pos_embed.weight": rows})
    assert torch.equal(own["pos_embed"][0], rows[:5])
    assert torch.equal(own["unk_embed"][0], rows[5:])


@pytest.mark.parametrize("axes", [0, 1])
def test_query_key_and_value_are_joined_when_all_are_there(axes: int) -> None:
    lead = (2,)[:axes]
    parts = {
        f"{OLD_BLOCK}attention.attention.{part}.{kind}": index + numbers(*lead, *shape)
        for kind, shape in {"weight": (4, 4), "bias": (4,)}.items()
        for index, part in enumerate(("value", "query", "key"))
    }
    own = recognised(parts).to_own(parts, axes=axes)
    assert own.keys() == {"blocks.3.attn.qkv.weight", "blocks.3.attn.qkv.bias"}
    expected = [
        parts[f"{OLD_BLOCK}attention.attention.{p}.bias"] for p in ("query", "key", "value")
    ]
    assert torch.equal(own["blocks.3.attn.qkv.bias"], torch.cat(expected, dim=axes))
    del parts[f"{OLD_BLOCK}attention.attention.key.weight"]
    assert recognised(parts).to_own(parts, axes=axes).keys() == {"blocks.3.attn.qkv.bias"}


def test_precision_is_kept_and_unknown_names_stay() -> None:
    tensors = {
        "module.conv_proj.weight": torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16),
        "module.heads.pre_logits.weight": torch.zeros(2, 2),
    }
    layout = recognised(tensors)
    own = layout.to_own(tensors)
    assert own.keys() == {"patch_embed.proj.weight", "module.heads.pre_logits.weight"}
    assert own["patch_embed.proj.weight"].dtype == torch.bfloat16
    assert layout.unknown(tensors) == ["module.heads.pre_logits.weight"]


def test_poolers_and_text_towers_stand_beside() -> None:
    vit = ["vit.embeddings.cls_token", "vit.pooler.dense.weight", "vit.embeddings.mask_token"]
    assert recognised(vit).unknown(vit) == []
    clip = ["vision_model.embeddings.class_embedding", "text_model.final_layer_norm.bias", "x"]
    assert recognised(clip).unknown(clip) == ["x"]
    whole = ["visual.class_embedding", "transformer.resblocks.0.ln_1.bias", "visual.attn_pool.q"]
    assert recognised(whole).unknown(whole) == ["visual.attn_pool.q"]


def test_two_names_of_one_parameter_are_refused() -> None:
    both = {"cls_token": torch.zeros(1), "module.cls_token": torch.ones(1)}
    with pytest.raises(UserError) as caught:
        recognised(both).to_own(both)
    assert "'cls_token' and 'module.cls_token'" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "came"),
    [
        ([], "got no names"),
        (["conv1.weight", "layer1.0.conv1.weight"], "got conv1.weight, layer1.0.conv1.weight."),
        ([f"bert.encoder.layer.{n}.attention.self.query.weight" for n in range(9)], "weight, …."),
    ],
)
def test_names_that_fit_no_layout(names: list[str], came: str) -> None:
    with pytest.raises(UserError) as error:
        recognised(names)
    assert came in str(error.value)
    assert all(layout.title in str(error.value) for layout in LAYOUTS)
