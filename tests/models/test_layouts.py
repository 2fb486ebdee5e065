"""Layouts: what rules do to a tensor, and which attack applies to which library's networks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mjp_privacy.models
from attacks import ATTACKS, find_attack
from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.layouts import LAYOUTS, recognised
from mjp_privacy.models.modules import load_module
from tests.helpers.libraries import SOURCES, mjp_vit, randomised
from tests.helpers.models import planted_model
from tests.helpers.planted import attacked, planted_view

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


SHAPES: list[tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = [
    ({"visual.class_embedding": (6,)}, {"cls_token": (1, 1, 6)}),
    ({"positional_embedding": (5, 6)}, {"pos_embed": (1, 5, 6)}),
    ({"ln_pre.bias": (6,), "proj": (6, 4)}, {"norm_pre.bias": (6,), "head.weight": (4, 6)}),
    ({"pos_embed.weight": (6, 4)}, {"pos_embed": (1, 5, 4), "unk_embed": (1, 1, 4)}),
    (
        {"deit.embeddings.position_embeddings": (1, 6, 4)},
        {"pos_embed": (1, 5, 4), "dist_pos_embed": (1, 1, 4)},
    ),
    ({"heads.head.weight": (3, 4), "class_token": (1, 1, 4)}, {"head.weight": (3, 4)}),
]


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_shapes_become_the_own_ones_and_rows_go_where_they_belong(axes: int) -> None:
    lead = (2, 3)[:axes]
    for sent, own in SHAPES:
        tensors = {name: numbers(*lead, *shape) for name, shape in sent.items()}
        found = recognised(tensors).to_own(tensors, axes=axes)
        assert {n: tuple(found[n].shape) for n in own} == {n: (*lead, *s) for n, s in own.items()}
    table, rows = numbers(1, 6, 2), numbers(6, 2)
    own = recognised(["deit.embeddings.cls_token"]).to_own(
        {"deit.embeddings.position_embeddings": table}
    )
    assert torch.equal(own["pos_embed"], table[:, [0, 2, 3, 4, 5]])
    assert torch.equal(own["dist_pos_embed"], table[:, 1:2])
    own = recognised(["pos_embed.weight"]).to_own({"pos_embed.weight": rows})
    assert torch.equal(torch.cat((own["pos_embed"][0], own["unk_embed"][0])), rows)


@pytest.mark.parametrize("axes", [0, 1])
def test_query_key_and_value_are_joined_when_all_are_there(axes: int) -> None:
    lead, attention = (2,)[:axes], f"{OLD_BLOCK}attention.attention"
    parts = {
        f"{attention}.{part}.{kind}": index + numbers(*lead, *shape)
        for kind, shape in {"weight": (4, 4), "bias": (4,)}.items()
        for index, part in enumerate(("value", "query", "key"))
    }
    own = recognised(parts).to_own(parts, axes=axes)
    assert own.keys() == {"blocks.3.attn.qkv.weight", "blocks.3.attn.qkv.bias"}
    expected = [parts[f"{attention}.{part}.bias"] for part in ("query", "key", "value")]
    assert torch.equal(own["blocks.3.attn.qkv.bias"], torch.cat(expected, dim=axes))
    odd = {**parts, f"{attention}.key.bias": numbers(*lead, 5)}
    with pytest.raises(UserError, match=r"blocks.3.attn.qkv.bias"):
        recognised(odd).to_own(odd, axes=axes)
    del parts[f"{attention}.key.weight"]
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
    for names, unknown in (  # poolers and text towers stand beside
        (["vit.embeddings.cls_token", "vit.pooler.dense.weight", "vit.embeddings.mask_token"], []),
        (["vision_model.embeddings.class_embedding", "text_model.ln.bias", "x"], ["x"]),
        (
            ["visual.class_embedding", "transformer.resblocks.0.ln_1.bias", "visual.pool.q"],
            ["visual.pool.q"],
        ),
    ):
        assert recognised(names).unknown(names) == unknown


def test_names_that_fit_no_layout_or_mean_the_same() -> None:
    bert = [f"bert.encoder.layer.{n}.attention.self.query.weight" for n in range(9)]
    for names, came in (
        ([], "no names"),
        (["conv1.weight", "layer1.0.conv1.weight"], "conv1.weight, layer1.0.conv1.weight."),
        (bert, "weight, …."),
    ):
        with pytest.raises(UserError) as error:
            recognised(names)
        assert came in str(error.value)
        assert all(layout.title in str(error.value) for layout in LAYOUTS)
    both = {"cls_token": torch.zeros(1), "module.cls_token": torch.ones(1)}
    with pytest.raises(UserError, match=r"'cls_token' and 'module.cls_token'"):
        recognised(both).to_own(both)


README = Path(mjp_privacy.models.__file__).parent / "README.md"
BEGIN, END = "<!-- attacks:begin -->", "<!-- attacks:end -->"
NETWORKS = {  # one of each layout
    "official_mjp": "MJP",
    "timm": "timm",
    "torchvision": "torchvision",
    "hf_vit": "ViT",
    "hf_deit": "DeiT",
    "hf_clip": "CLIP of transformers",
    "open_clip": "open_clip's tower",
}
REASONS = {  # a refusal's kind, and the words that stand for it in the table
    "unknown_embedding": "without MJP",
    "missing_gradient": "no bias",
    "block": "ln_pre",
    "model": "distillation token",
}
TINY_PRIOR = {"prior": "stationary"}


@cache
def network(layout: str) -> LoadedModel:
    built = mjp_vit() if NETWORKS[layout] == "MJP" else SOURCES[NETWORKS[layout]].build()
    return load_module(randomised(built), mean=0.5, std=0.5).double()


def refused(layout: str) -> str:
    """The attacks that refuse an upload of the layout's network, by why: `a`, `b` (reason)."""
    reasons: dict[str, list[str]] = {}
    for name in ATTACKS:
        attack = find_attack(name)
        view, _ = planted_view(network(layout), attack, "a", images=torch.zeros(1, 3, 32, 32))  # type: ignore[arg-type]
        refusal = attack.unsupported(view)  # type: ignore[union-attr]
        if refusal is not None:
            reasons.setdefault(REASONS[refusal.kind], []).append(f"`{name}`")
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()) or "–"


def table() -> list[str]:
    """The lines of README's table; layouts that the same attacks refuse stand together."""
    assert NETWORKS.keys() == {layout.name for layout in LAYOUTS}
    titles: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        titles.setdefault(refused(layout.name), []).append(layout.title)
    rows = (f"| {'; '.join(same)} | {which} |" for which, same in titles.items())
    return ["| layout | does not apply |", "|---|---|", *rows]


def test_readme_prints_what_the_attacks_say() -> None:
    printed = README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()
    expected = "\n".join(table())
    assert printed == expected, f"expected this table in {README.name}:\n{expected}"


# what the refusals and the answers rest on --------------------------------------------------------


@pytest.mark.parametrize("layout", ["torchvision", "hf_vit", "hf_deit", "hf_clip", "open_clip"])
def test_the_picture_is_exact_in_every_layout(layout: str) -> None:
    assert attacked("patch_gradient", {}, network(layout), "a", 1).min() == 100
    assert attacked("masked_span", TINY_PRIOR, network(layout), "a", 1).min() == 100


FEW = {"img_size": 16}  # 16 patches: block 0's equations determine them at width 96


@pytest.mark.parametrize(
    "variant",
    [{}, {"distillation_token": True}, {"patch_bias": False}, {"qkv_bias": False}],
    ids=["plain", "distilled", "no patch bias", "no qkv bias"],
)
def test_block_0_counts_the_tokens_that_it_sees(variant: dict[str, bool]) -> None:
    model = planted_model(**FEW, **variant)
    assert attacked("token_span", TINY_PRIOR, model, "a", 2).min() > 99


def test_april_without_a_patch_bias() -> None:
    model = planted_model(patch_bias=False)
    for name, options in (("april", {}), ("april_prior", TINY_PRIOR)):
        assert attacked(name, options, model, "a", 1).min() > 99


def with_and_without_tokens(**variant: bool) -> tuple[list[Tensor], Tensor]:
    """masked_span's pictures of one masked upload with block 0's equations and without, and what
    the client fed. It keeps the gradient of E_unk, whose sum would close the same direction."""
    model = planted_model(**FEW, unknown_embedding=True, **variant)
    pictures = []
    for tokens in (True, False):
        attack: Any = find_attack("masked_span", {**TINY_PRIOR, "tokens": tokens})
        view, inputs = planted_view(model, attack, "b")
        assert attack.unsupported(view) is None
        kept = {n: g for n, g in view.updates[0].grads.items() if n != "unk_embed"}
        view = replace(view, updates=[replace(view.updates[0], grads=kept)])
        pictures.append(attack.run(view, generator=torch.Generator()).images)
    return pictures, inputs.images


def test_a_masked_upload_of_clip_does_without_block_0() -> None:
    """Block 0's equations help on every picture of the plain network that has masked patches; a
    network as CLIP's has none to use."""
    (used, unused), fed = with_and_without_tokens()
    gain = psnr(used, fed) - psnr(unused, fed)
    assert bool((gain[psnr(unused, fed) < 100] > 0.5).all())
    (used, unused), fed = with_and_without_tokens(pre_norm=True, patch_bias=False)
    assert torch.equal(used, unused)
    grey = psnr(torch.full_like(fed, 0.5), fed)
    assert bool((psnr(unused, fed) > grey + 2).all())


def test_several_masked_uploads_of_clip_and_deit_are_exact() -> None:
    for variant in ({"pre_norm": True, "patch_bias": False}, {"distillation_token": True}):
        model = planted_model(unknown_embedding=True, **variant)
        options = {**TINY_PRIOR, "uploads": 8}
        assert attacked("multi_round", options, model, "c", 1).min() > 99
