"""Networks that differ from timm's plain ViT: built, described, saved and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.sizes import Variant
from mjp_privacy.models.spec import METADATA
from tests.helpers.models import SMALL, some_images, some_masks, tiny

CLIP = {"pre_norm": True, "patch_bias": False, "head_bias": False, "norm_eps": 1e-5}
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "pre-norm": ({"pre_norm": True}, ", pre-norm"),
    "CLIP": (
        {**CLIP, "activation": "quick_gelu"},
        ", pre-norm, no patch bias, no head bias, eps 1e-05, quick_gelu",
    ),
    "no biases": ({"patch_bias": False, "qkv_bias": False}, ", no patch bias, no qkv bias"),
    "distilled": (
        {"distillation_token": True, "norm_eps": 1e-12},
        ", distillation token, eps 1e-12",
    ),
}
each_variant = pytest.mark.parametrize(("fields", "words"), VARIANTS.values(), ids=list(VARIANTS))


def metadata(model: LoadedModel) -> dict[str, str]:
    """As a recorded upload's weights carry it: what the card states."""
    facts = {name: getattr(model.card, name, None) for name in METADATA} | {"num_heads": 3}
    return {name: json.dumps(value) for name, value in facts.items() if value is not None}


@each_variant
def test_a_variant_is_described_and_survives_a_file(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    model = tiny(torch.float32, unknown_embedding=True, **fields)
    assert model.card.architecture == f"vit d24 l2 h3 p8@32{words}"
    path = tmp_path / "weights.safetensors"
    state = {name: p.detach().contiguous() for name, p in model.state_dict().items()}
    assert ("norm_eps" in metadata(model)) == bool(fields)  # files of plain ViTs stay as they were
    save_file(state, path, metadata(model))
    again = load_model(checkpoint=path)
    assert again.variant == model.variant == Variant(**fields)
    assert again.card.architecture == model.card.architecture
    assert again.state_dict().keys() == state.keys()
    x, mask = some_images(2).float(), some_masks(2)
    assert torch.equal(again(x, mask), model(x, mask))
    assert not torch.equal(model(x, mask), model(x))


def test_the_parameters_of_a_variant() -> None:
    plain = tiny().state_dict().keys()
    clip = tiny(**CLIP).state_dict().keys()
    assert plain - clip == {"patch_embed.proj.bias", "head.bias"}
    assert clip - plain == {"norm_pre.weight", "norm_pre.bias"}
    distilled = tiny(distillation_token=True)
    assert distilled.state_dict().keys() - plain == {"dist_token", "dist_pos_embed"}
    assert {"dist_token", "dist_pos_embed"} <= distilled.no_weight_decay()
    assert (tiny().tokens, distilled.tokens) == (17, 18)
    assert distilled.embed(some_images(1)).shape == (1, 18, 24)
    assert torch.equal(tiny(**CLIP).patch_bias, torch.zeros(24, dtype=torch.float64))
    assert tiny().patch_bias is tiny().patch_embed.proj.bias or bool(tiny().patch_bias.any())


def test_a_norm_before_block_0_and_the_class_row_come_as_in_clip() -> None:
    model, x = tiny(**CLIP), some_images(1)
    plain = tiny(patch_bias=False, head_bias=False, norm_eps=1e-5)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model.embed(x), model.norm_pre(plain.embed(x)))


def test_random_weights_of_plain_models_are_drawn_as_before() -> None:
    """Rows that were made from them stay finished: their digest is the seed's alone."""
    stated = load_model(checkpoint="random", **SMALL, activation="gelu", norm_eps=1e-6)
    model = load_model(checkpoint="random", **SMALL)
    assert stated.card == model.card
    assert model.card.architecture == "vit d24 l2 h3 p8@32"
    assert all(
        torch.equal(a, b) for a, b in zip(stated.parameters(), model.parameters(), strict=True)
    )
