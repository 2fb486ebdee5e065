"""The Vision Transformer beside timm's own, what MJP adds to it, and other libraries' variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel, MJPVisionTransformer, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block
from mjp_privacy.models.sizes import Variant
from mjp_privacy.models.spec import METADATA
from mjp_privacy.models.zoo import spec_by_name
from tests.helpers.models import (
    ARCHITECTURE,
    MEAN,
    PATCHES,
    SMALL,
    STD,
    some_images,
    some_labels,
    some_masks,
    tiny,
)

# timm's own ---------------------------------------------------------------------------------------

TIMM_NAMES = {
    "vit_small": "vit_small_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "vit_base_patch8_224": "vit_base_patch8_224",
    "vit_large_patch16_224": "vit_large_patch16_224",
    "deit_base_patch16_384": "deit_base_patch16_384",
}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def on_meta(name: str, **changes: Any) -> MJPVisionTransformer:
    """The named model without memory for its weights."""
    known = {"num_classes": 1000, "mean": 0.5, "std": 0.5, **changes}
    with torch.device("meta"):
        return load_model(name, checkpoint="random", **known)


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_parameter_names_and_shapes_are_timms(name: str) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(TIMM_NAMES[name])
    ours = on_meta(name)
    assert list(shapes(ours).items()) == list(shapes(theirs).items())
    assert ours.blocks[0].attn.num_heads == theirs.blocks[0].attn.num_heads
    assert ours.norm.eps == theirs.norm.eps
    assert not list(ours.buffers())


def test_the_models_of_mjp_stand_beside_timms_names() -> None:
    plain = shapes(on_meta("deit_small"))
    mjp = shapes(on_meta("deit_small_mjp", dal="nonlinear", index_embedding=True))
    added = {
        "unk_embed": (1, 1, 384),
        "index_embed": (1, 197, 384),
        "dal_regressor.layers.0.weight": (384, 384),
        "dal_regressor.layers.0.bias": (384,),
        "dal_regressor.layers.2.weight": (2, 384),
        "dal_regressor.layers.2.bias": (2,),
    }
    assert mjp == {**plain, **added}
    assert shapes(on_meta("deit_small_mjp_no_unk")) == plain
    assert shapes(on_meta("deit_small_no_pe")) == plain  # exposed: the table's gradient is uploaded
    strict = shapes(on_meta("deit_small_no_pe", position_embedding="strict"))
    assert strict == {name: shape for name, shape in plain.items() if name != "pos_embed"}


@pytest.mark.parametrize("image", [32, 48])
@pytest.mark.parametrize("train", [False, True])
def test_the_same_weights_give_timms_logits(image: int, train: bool) -> None:
    model = tiny(img_size=image).train(train)
    arguments = {**ARCHITECTURE, "img_size": image}
    theirs = VisionTransformer(**arguments).double().train(train)
    theirs.load_state_dict(model.state_dict(), strict=True)
    x = some_images(2, image)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-12, atol=1e-12)
    features = model.forward_features(x)
    torch.testing.assert_close(features, theirs.forward_features(x), rtol=1e-12, atol=1e-12)


def test_random_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = load_model(checkpoint="random", mean=0.5, std=0.5, **ARCHITECTURE)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    second = load_model(checkpoint="random", mean=0.5, std=0.5, **ARCHITECTURE)
    other = load_model(checkpoint="random", mean=0.5, std=0.5, seed=1, **ARCHITECTURE)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.pos_embed, second.pos_embed)
    assert not torch.equal(first.pos_embed, other.pos_embed)
    assert (first.card.checkpoint.layout, first.card.checkpoint.sha256) == ("random", "random-0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize_works_in_the_precision_of_the_images(dtype: torch.dtype) -> None:
    model, x = tiny(), some_images(2).to(dtype)
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (MEAN, STD))
    expected = (x.double().numpy() - mean) / std
    found = model.normalize(x)
    assert found.dtype == dtype
    tolerance = 1e-14 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(found.numpy(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model.denormalize(found), x)


# the unknown embedding ----------------------------------------------------------------------------


def gradient_of_z(model: MJPVisionTransformer, x: Tensor, mask: Tensor | None) -> Tensor:
    """Backward through the cross-entropy; the gradient at z, the input of block 0."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        kept.append(inputs[0])

    handle = model.blocks[0].register_forward_pre_hook(keep)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x, mask), some_labels(len(x)), reduction="sum")
    loss.backward()
    handle.remove()
    assert kept[0].grad is not None
    return kept[0].grad


def test_z_has_the_unknown_embedding_at_masked_patches_and_the_class_row_kept() -> None:
    model, x, mask = tiny(unknown_embedding=True), some_images(3), some_masks(3)
    z = model.embed(x, mask)
    tokens = model.patch_embed(x)
    for image in range(3):
        torch.testing.assert_close(z[image, 0], model.cls_token[0, 0] + model.table[0, 0])
        for patch in range(PATCHES):
            row = model.unk_embed[0, 0] if mask[image, patch] else model.table[0, patch + 1]
            torch.testing.assert_close(z[image, patch + 1], tokens[image, patch] + row)
    positions = model.positions(mask)
    assert torch.equal(positions[:, 0], model.table[:, 0].expand(3, -1))


@pytest.mark.parametrize("batch", [1, 3])
def test_masked_rows_of_the_table_get_no_gradient_and_the_unknown_gets_their_sum(
    batch: int,
) -> None:
    model, x, mask = tiny(unknown_embedding=True), some_images(batch), some_masks(batch)
    g = gradient_of_z(model, x, mask)
    table, unknown = model.pos_embed.grad[0], model.unk_embed.grad[0, 0]
    everywhere = mask.all(0)
    if batch == 1:
        assert torch.equal(everywhere, mask[0])
        assert (table[1:][everywhere] == 0).all()
    torch.testing.assert_close(unknown, g[:, 1:][mask].sum(0), rtol=1e-12, atol=1e-14)
    visible = (~mask).unsqueeze(-1)
    torch.testing.assert_close(table[1:], (g[:, 1:] * visible).sum(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(table[0], g[:, 0].sum(0), rtol=1e-12, atol=1e-14)
    assert (table[~torch.cat((torch.tensor([False]), everywhere))].abs().sum(-1) > 0).all()


def test_each_row_of_a_mask_is_its_images() -> None:
    model, x, mask = tiny(unknown_embedding=True), some_images(3), some_masks(3)
    alone = torch.cat([model(x[i : i + 1], mask[i]) for i in range(3)])
    torch.testing.assert_close(model(x, mask), alone, rtol=1e-12, atol=1e-12)


def test_no_mask_and_an_empty_mask_are_the_same() -> None:
    model, x = tiny(unknown_embedding=True), some_images(2)
    empty = torch.zeros(PATCHES, dtype=torch.bool)
    torch.testing.assert_close(model(x, empty), model(x), rtol=1e-14, atol=1e-14)


def test_the_answer_depends_on_the_masked_patches_as_a_set() -> None:
    """Permuting masked patches among themselves changes nothing but rounding: only order hides."""
    model, x, mask = tiny(unknown_embedding=True), some_images(1), some_masks(1)[0]
    patches = x.reshape(1, 3, 4, 8, 4, 8).permute(0, 2, 4, 1, 3, 5).reshape(1, 16, -1).clone()
    patches[:, mask] = patches[:, mask].roll(1, 1)
    moved = patches.reshape(1, 4, 4, 3, 8, 8).permute(0, 3, 1, 4, 2, 5).reshape(1, 3, 32, 32)
    assert not torch.allclose(moved, x)
    torch.testing.assert_close(model(moved, mask), model(x, mask), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(moved), model(x))


@pytest.mark.parametrize(
    ("mask", "came"),
    [
        (torch.zeros(PATCHES), r"float32.*\(16,\)"),
        (torch.zeros(PATCHES + 1, dtype=torch.bool), r"\(17,\)"),
        (torch.zeros(3, PATCHES, dtype=torch.bool), r"\(3, 16\)"),
        (torch.zeros(2, 4, 4, dtype=torch.bool), r"\(2, 4, 4\)"),
        (torch.tensor(True), r"\(\)"),
    ],
)
@pytest.mark.parametrize("unknown", [True, False])
def test_a_wrong_mask_is_refused(mask: Tensor, came: str, unknown: bool) -> None:
    model = tiny(unknown_embedding=unknown)
    with pytest.raises(UserError, match=f"16 patches.*{came}"):
        model(some_images(2), mask)


# without position embeddings ----------------------------------------------------------------------


def test_exposed_has_a_table_of_zeros_whose_gradient_is_the_one_at_z() -> None:
    model = tiny(position_embedding="exposed")
    assert not model.pos_embed.any()
    g = gradient_of_z(model, some_images(1), None)
    torch.testing.assert_close(model.pos_embed.grad, g, rtol=1e-12, atol=1e-14)
    assert (g.abs().sum(-1) > 0).all()


def test_strict_has_no_table_and_gives_the_same_logits() -> None:
    exposed, strict = tiny(position_embedding="exposed"), tiny(position_embedding="strict")
    assert strict.pos_embed is None
    assert "pos_embed" not in dict(strict.named_parameters())
    with torch.no_grad():
        for name, parameter in strict.named_parameters():
            parameter.copy_(exposed.get_parameter(name))
    x = some_images(2)
    torch.testing.assert_close(strict(x), exposed(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(strict(x, some_masks(2)), strict(x))


@pytest.mark.parametrize("reading", ["exposed", "strict"])
@pytest.mark.parametrize("asked", [{"unknown_embedding": True}, {"dal": "linear"}])
def test_nothing_can_be_masked_or_localized_without_a_table(
    reading: str, asked: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=f"unknown_embedding.*'{reading}'"):
        tiny(position_embedding=reading, **asked)


# the index embedding ------------------------------------------------------------------------------


def test_the_index_embedding_is_added_and_never_masked() -> None:
    model, x, mask = tiny(unknown_embedding=True, index_embedding=True), some_images(1), None
    index = model.index_embed.detach().clone()
    mask = some_masks(1)
    z = model.embed(x, mask)
    with torch.no_grad():
        model.index_embed.zero_()
    torch.testing.assert_close(z, model.embed(x, mask) + index)
    g = gradient_of_z(model, x, mask)
    torch.testing.assert_close(model.index_embed.grad, g, rtol=1e-12, atol=1e-14)


# the altered block --------------------------------------------------------------------------------


def test_the_closed_form_block_has_neither_norm1_nor_residuals() -> None:
    model = tiny(unknown_embedding=True)
    altered = with_closed_form_block(model)
    block = model.blocks[0]
    x, mask = some_images(2), some_masks(2)
    z = model.embed(x, mask)
    expected = block.mlp(block.norm2(block.attn(z)))
    torch.testing.assert_close(altered.blocks[0](z), expected)
    rest = model.forward_head(model.norm(model.blocks[1](expected)))
    torch.testing.assert_close(altered(x, mask), rest)


def test_the_closed_form_block_leaves_the_model_alone_and_keeps_names() -> None:
    model = tiny()
    before = model(some_images(1))
    altered = with_closed_form_block(model)
    with torch.no_grad():
        altered.pos_embed.zero_()
    assert torch.equal(model(some_images(1)), before)
    missing = set(shapes(model)) - set(shapes(altered))
    assert missing == {"blocks.0.norm1.weight", "blocks.0.norm1.bias"}
    assert set(shapes(altered)) <= set(shapes(model))
    assert altered.card == model.card


# names --------------------------------------------------------------------------------------------


def test_the_normalisation_of_named_models_is_known() -> None:
    half = (0.5, 0.5, 0.5)
    assert spec_by_name("vit_small").mean == spec_by_name("vit_small").std == half
    for name in ("deit_small", "deit_small_no_pe", "deit_small_mjp", "deit_small_mjp_no_unk"):
        assert (spec_by_name(name).mean, spec_by_name(name).std) == (MEAN, STD)
    tagged = spec_by_name("vit_base_patch16_384.augreg_in21k_ft_in1k")
    assert (tagged.mean, tagged.std, tagged.img_size, tagged.resize) == (half, half, 384, 384)
    assert spec_by_name("deit_tiny_patch16_224.fb_in1k").mean == MEAN
    assert spec_by_name("vit_base_patch16_224").mean is None  # an architecture is no checkpoint


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
