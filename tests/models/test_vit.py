"""The Vision Transformer beside timm's own, bit for bit; what MJP adds to it, its localization
against NumPy; low-rank adapters; and torch's own attention, called."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer as TimmTransformer
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import MJPVisionTransformer, load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.live.parts import CalledAttention
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.mjp_vit import (
    LocalizationRegressor,
    with_adapters,
    with_closed_form_block,
)
from mjp_privacy.models.sizes import LowRank, Variant
from mjp_privacy.models.vit import token_norm
from mjp_privacy.uploads.record import save_weights
from tests.helpers.models import (
    ARCHITECTURE,
    PATCHES,
    SMALL,
    some_images,
    some_labels,
    some_masks,
    tiny,
)

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

# timm's own ---------------------------------------------------------------------------------------

SIZES = {**ARCHITECTURE, "embed_dim": 48, "depth": 3, "num_classes": 7}
CLIPS = Variant(pre_norm=True, patch_bias=False, norm_eps=1e-5, activation="quick_gelu")
TIMMS_CLIP = {"pre_norm": True, "norm_layer": partial(nn.LayerNorm, eps=1e-5)}
NETWORKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # our arguments, timm's
    "plain": ({}, {}),
    "narrow": ({"mlp_ratio": 1.5}, {"mlp_ratio": 1.5}),
    "drop path": ({"drop_path_rate": 0.6}, {"drop_path_rate": 0.6}),
    "no positions": ({"position_embedding": "strict"}, {"pos_embed": "none"}),
    "no classes": ({"num_classes": 0}, {"num_classes": 0}),
    "no qkv bias": ({"variant": Variant(qkv_bias=False)}, {"qkv_bias": False}),
    "tanh": ({"variant": Variant(activation="gelu_tanh")}, {"act_layer": "gelu_tanh"}),
    "relu": ({"variant": Variant(activation="relu")}, {"act_layer": "relu"}),
    "CLIP's": ({"variant": CLIPS}, {**TIMMS_CLIP, "act_layer": "quick_gelu"}),
}


def logits(network: Any, images: Tensor) -> Tensor:
    """The logits, in training mode with the same draws for every network."""
    torch.manual_seed(6)
    return network(images)


@pytest.mark.parametrize("kind", NETWORKS)
def test_start_outputs_and_gradients_are_timms_bit_for_bit(kind: str) -> None:
    """Each made from the same seed; with torch's attention kernel and with plain products."""
    torch.manual_seed(5)
    ours = MJPVisionTransformer(**{**SIZES, **NETWORKS[kind][0]}).train()
    torch.manual_seed(5)
    theirs = TimmTransformer(**{**SIZES, **NETWORKS[kind][1]}).train()
    assert list(map(str, dict(ours.named_parameters()))) == list(dict(theirs.named_parameters()))
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    spared = ours.no_weight_decay() & dict(ours.named_parameters()).keys()
    assert spared <= theirs.no_weight_decay()
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(7))
    for fused in (True, False):
        for module in [*ours.modules(), *theirs.modules()]:
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        found, expected = logits(ours, images), logits(theirs, images)
        assert torch.equal(found, expected)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(8))
        (found * weights).sum().backward()
        (expected * weights).sum().backward()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad), name
    if kind == "drop path":
        assert not torch.equal(found, logits(ours.eval(), images))
    with pytest.raises(UserError, match=r"32, 32.*40, 40"):
        ours.patch_embed(torch.rand(1, 3, 40, 40))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_names_and_shapes_are_timms_and_mjps_stand_beside_them() -> None:
    def on_meta(name: str, **changes: Any) -> MJPVisionTransformer:
        known = {"num_classes": 1000, "mean": 0.5, "std": 0.5, **changes}
        return outline_model(name, checkpoint="random", **known)

    plain = on_meta("deit_small")
    with torch.device("meta"):
        theirs = timm.create_model("deit_small_patch16_224")
    assert list(shapes(plain).items()) == list(shapes(theirs).items())
    assert plain.blocks[0].attn.num_heads == theirs.blocks[0].attn.num_heads
    assert plain.norm.eps == theirs.norm.eps
    added = {"unk_embed": (1, 1, 384), "index_embed": (1, 197, 384)}
    mjp = shapes(on_meta("deit_small_mjp", index_embedding=True))
    assert mjp == {**shapes(plain), **added}
    assert shapes(on_meta("deit_small_mjp_no_unk")) == shapes(plain)
    assert shapes(on_meta("deit_small_no_pe")) == shapes(plain)  # the table's gradient is uploaded


def test_random_weights_come_from_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (load_model(checkpoint="random", seed=n, **SMALL) for n in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.pos_embed, other.pos_embed)


# masks --------------------------------------------------------------------------------------------


def gradient_of_z(model: MJPVisionTransformer, x: Tensor, mask: Tensor | None) -> Tensor:
    """Backward through the cross-entropy; the gradient at z, the input of block 0."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        kept.append(inputs[0])

    handle = model.blocks[0].register_forward_pre_hook(keep)
    model.zero_grad()
    nn.functional.cross_entropy(model(x, mask), some_labels(len(x)), reduction="sum").backward()
    handle.remove()
    return kept[0].grad


@pytest.mark.parametrize("batch", [1, 3])
def test_masked_patches_have_the_unknown_embedding_and_its_gradient(batch: int) -> None:
    """z row by row; what the rows of the table and E_unk get of the gradient at z."""
    model, x, mask = tiny(unknown_embedding=True), some_images(batch), some_masks(batch)
    z, tokens = model.embed(x, mask), model.patch_embed(x)
    close(z[:, 0], (model.cls_token[0] + model.table[:, 0]).expand(batch, -1))
    rows = torch.where(mask[..., None], model.unk_embed, model.table[:, 1:])
    close(z[:, 1:], tokens + rows)
    alone = torch.cat([model(x[i : i + 1], mask[i]) for i in range(batch)])
    close(model(x, mask), alone)  # each row of a mask is its image's
    close(model(x, torch.zeros(PATCHES, dtype=torch.bool)), model(x))
    g = gradient_of_z(model, x, mask)
    table, unknown = model.pos_embed.grad[0], model.unk_embed.grad[0, 0]
    everywhere = mask.all(0)
    assert (table[1:][everywhere] == 0).all()
    assert (table[1:][~everywhere].abs().sum(-1) > 0).all()
    close(unknown, g[:, 1:][mask].sum(0))
    close(table[1:], (g[:, 1:] * (~mask).unsqueeze(-1)).sum(0))
    close(table[0], g[:, 0].sum(0))


def test_a_wrong_mask_is_refused() -> None:
    model = tiny(unknown_embedding=True, dal="linear")
    for shape in ((PATCHES + 1,), (3, PATCHES), (2, 1, PATCHES), ()):
        mask = torch.zeros(shape, dtype=torch.bool)
        with pytest.raises(UserError, match=re.escape(str(shape))):
            model(some_images(2), mask)
        if shape != (3, PATCHES):  # which fits a batch of another size
            with pytest.raises(UserError, match=re.escape(str(shape))):
                model.dal_loss(mask)
    with pytest.raises(UserError, match="float32"):
        model(some_images(2), torch.zeros(PATCHES))


# no table, one of zeros, a second one; the altered block ------------------------------------------


def test_without_position_embeddings_exposed_and_strict() -> None:
    exposed, strict = tiny(position_embedding="exposed"), tiny(position_embedding="strict")
    assert not exposed.pos_embed.any()
    g = gradient_of_z(exposed, some_images(1), None)
    close(exposed.pos_embed.grad, g)
    assert (g.abs().sum(-1) > 0).all()
    assert strict.pos_embed is None
    strict.load_state_dict({n: p for n, p in exposed.state_dict().items() if n != "pos_embed"})
    x = some_images(2)
    close(strict(x), exposed(x))
    assert torch.equal(strict(x, some_masks(2)), strict(x))
    for reading in ("exposed", "strict"):
        for asked in ({"unknown_embedding": True}, {"dal": "linear"}):
            with pytest.raises(UserError, match=reading):
                tiny(position_embedding=reading, **asked)


def test_the_index_embedding_is_added_and_never_masked() -> None:
    model = tiny(unknown_embedding=True, index_embedding=True)
    x, mask, index = some_images(1), some_masks(1), model.index_embed.detach().clone()
    z, g = model.embed(x, mask), gradient_of_z(model, x, mask)
    close(model.index_embed.grad, g)
    with torch.no_grad():
        model.index_embed.zero_()
    torch.testing.assert_close(z, model.embed(x, mask) + index)


def test_the_closed_form_block_has_neither_norm1_nor_residuals() -> None:
    model, x, mask = tiny(unknown_embedding=True), some_images(2), some_masks(2)
    before, altered, block = model(x, mask), with_closed_form_block(model), model.blocks[0]
    expected = block.mlp(block.norm2(block.attn(model.embed(x, mask))))
    rest = model.forward_head(model.norm(model.blocks[1](expected)))
    torch.testing.assert_close(altered(x, mask), rest)
    with torch.no_grad():
        altered.pos_embed.zero_()
    assert torch.equal(model(x, mask), before)
    lacking = {f"blocks.0.norm1.{kind}" for kind in ("weight", "bias")}
    assert shapes(altered).keys() == shapes(model).keys() - lacking
    assert with_closed_form_block(altered).first_block == "closed_form"


# variants -----------------------------------------------------------------------------------------

CLIP = {"pre_norm": True, "patch_bias": False, "head_bias": False, "norm_eps": 1e-5}
VARIANTS: list[dict[str, Any]] = [
    {},
    {**CLIP, "activation": "quick_gelu"},
    {"patch_bias": False, "qkv_bias": False},
    {"distillation_token": True, "norm_eps": 1e-12},
]


@pytest.mark.parametrize("fields", VARIANTS)
def test_a_variant_survives_a_file(tmp_path: Path, fields: dict[str, Any]) -> None:
    """As a recorded upload's weights carry it."""
    model = tiny(torch.float32, unknown_embedding=True, **fields)
    path = tmp_path / "weights.safetensors"
    save_weights(path, model)
    assert ("norm_eps" in read_metadata(path)) == bool(fields)  # plain ViTs' stay as they were
    again = load_model(checkpoint=path)
    assert again.variant == model.variant == Variant(**fields)
    assert again.card.architecture == model.card.architecture
    x, mask = some_images(2).float(), some_masks(2)
    assert torch.equal(again(x, mask), model(x, mask))


# localization -------------------------------------------------------------------------------------

ROWS_AND_COLUMNS = np.array([(row, column) for row in range(4) for column in range(4)])


@pytest.mark.parametrize("kind", ["linear", "nonlinear"])
@pytest.mark.parametrize("normalize", [False, True])
def test_dal_is_the_regressor_on_the_unmasked_rows(kind: str, normalize: bool) -> None:
    model = tiny(unknown_embedding=True, dal=kind)
    mask = some_masks(1)[0]
    target, prediction, visible = model.localize(mask, normalize=normalize)
    assert visible.equal(~mask)
    rows = model.pos_embed.detach().numpy()[0, 1:][~mask.numpy()]
    weights = {k: p.detach().numpy() for k, p in model.dal_regressor.named_parameters()}
    if kind == "linear":
        expected = rows @ weights["layers.weight"].T + weights["layers.bias"]
    else:
        hidden = np.maximum(rows @ weights["layers.0.weight"].T + weights["layers.0.bias"], 0)
        expected = hidden @ weights["layers.2.weight"].T + weights["layers.2.bias"]
    grid = ROWS_AND_COLUMNS[~mask.numpy()] / (4 if normalize else 1)
    np.testing.assert_allclose(prediction[visible].detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(target[visible].numpy(), grid, rtol=1e-15)
    loss = model.dal_loss(mask, normalize=normalize).item()
    assert loss == pytest.approx(np.abs(expected - grid).mean(), rel=1e-12)
    masks = torch.arange(PATCHES) < torch.tensor([[3], [5]])  # rows of unequal numbers
    each = torch.stack([model.dal_loss(one) for one in masks])
    torch.testing.assert_close(model.dal_loss(masks), each.mean())
    with pytest.raises(UserError, match="dal='linear'"):
        tiny(unknown_embedding=True).dal_loss(mask)


def spectral_rows(number: int, dim: int) -> np.ndarray:
    """Rows with singular values 8, 4, 1, .5, ... around a mean of 3."""
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((number, dim))
    left, _ = np.linalg.qr(columns - columns.mean(0))
    right, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    values = np.array([8, 4, *(0.5 ** np.arange(dim - 2))])
    return (left * values) @ right.T + 3


@pytest.mark.parametrize("hidden", [0, 9])
def test_pca_projects_onto_the_leading_directions_of_the_visible_rows(hidden: int) -> None:
    """torch.pca_lowrank's way: directions of the centred rows; their signs are of the rows alone,
    and the projection has a gradient."""
    rows, visible = spectral_rows(49, 12), np.arange(49) >= hidden
    regressor = LocalizationRegressor(12, "pca")
    given, seen = torch.tensor(rows), torch.tensor(visible)
    found = regressor(given, seen).numpy()[visible]
    shown = rows[visible]
    directions = np.linalg.svd(shown - shown.mean(0), full_matrices=False)[2]
    expected = shown @ directions[:2].T
    signs = np.sign((found * expected).sum(0))
    np.testing.assert_allclose(found, expected * signs, rtol=1e-6, atol=1e-6)
    order = torch.randperm(49, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(regressor(given[order], seen[order]), regressor(given, seen)[order])
    few = torch.tensor(spectral_rows(9, 4), requires_grad=True)
    some, regressor = torch.arange(9) > 1, LocalizationRegressor(4, "pca")
    assert torch.autograd.gradcheck(lambda rows: regressor(rows, some), few, rtol=1e-4)


@pytest.mark.parametrize("kind", ["pca", "linear", "nonlinear"])
def test_the_gradient_of_dal_is_finite_and_of_visible_rows_alone(kind: str) -> None:
    """The attacker can compute it from the model and the mask, and subtract it."""
    model, mask = tiny(unknown_embedding=True, dal=kind), some_masks(1)
    model.dal_loss(mask).backward()
    gradient = model.pos_embed.grad[0]
    assert gradient[1:][~mask[0]].any()
    assert not gradient[1:][mask[0]].any()
    assert not gradient[0].any()
    for visible in range(4):
        model.zero_grad()
        loss = model.dal_loss(torch.arange(PATCHES) >= visible)
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        assert visible or (loss == 0 and not model.pos_embed.grad.any())


# low-rank adapters --------------------------------------------------------------------------------

BOTH = LowRank(4, ("qkv", "fc2"), alpha=6.0, spread=0.3)


def test_adapters_start_as_pefts_do_from_the_seed_and_the_layer_alone() -> None:
    """B is zero, so that nothing changes at first; A is uniform within 1 / sqrt(in)."""
    model, images = tiny(), some_images(2)
    adapted = with_adapters(model, LowRank(4, ("qkv", "proj", "fc1", "fc2")), seed=1)
    assert torch.equal(adapted(images), model(images))
    assert len(set(shapes(adapted)) - set(shapes(model))) == 16  # two of four layers in two blocks
    first, bound = adapted.get_parameter("blocks.0.mlp.fc2.lora_A.weight"), 96**-0.5
    assert first.shape == (4, 96)
    assert 0.9 * bound < first.abs().max() <= bound
    assert float(first.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    name = "blocks.1.attn.qkv.lora_A.weight"
    drawn = adapted.get_parameter(name)
    assert torch.equal(drawn, with_adapters(tiny(), BOTH, seed=1).get_parameter(name))
    assert not torch.equal(drawn, with_adapters(tiny(), LowRank(4), seed=2).get_parameter(name))
    assert not torch.equal(drawn, adapted.get_parameter(name.replace("1", "0")))


def test_a_file_of_weights_keeps_its_adapters(tmp_path: Path) -> None:
    adapted = with_adapters(tiny(torch.float32), BOTH, seed=0)
    path, images = tmp_path / "weights.safetensors", some_images(2).float()
    save_weights(path, adapted)
    loaded = load_model(checkpoint=path)
    assert loaded.adapters == BOTH
    assert torch.equal(loaded(images), adapted(images))
    assert list(shapes(outline_model(checkpoint=path))) == list(shapes(adapted))
    again = with_adapters(loaded, LowRank(4, ("qkv", "fc2"), alpha=6.0), seed=5)
    assert all(map(torch.equal, again.parameters(), loaded.parameters()))  # a tuned model keeps its
    tensors = {name: p.detach().contiguous() for name, p in adapted.named_parameters()}
    save_file(tensors, path, {"mean": "0.5", "std": "0.5", "num_heads": "3"})
    with pytest.raises(UserError, match="lora_A"):  # adapters that are not stated
        load_model(checkpoint=path)
    with pytest.raises(UserError, match=r"alpha: 6\.0.*rank: 2"):
        with_adapters(loaded, LowRank(2), seed=0)
    with pytest.raises(UserError, match=r"24.*blocks.0.attn.qkv.weight.*25"):
        with_adapters(tiny(), LowRank(25), seed=0)


# norms of tokens ----------------------------------------------------------------------------------


def test_what_is_no_norm_of_tokens_is_none() -> None:
    """Norms of all kinds are in tests/uploads/test_own_networks."""
    rotary, pooled = nn.Module(), nn.Module()
    rotary.freqs, pooled.query = nn.Parameter(torch.rand(12)), nn.Parameter(torch.rand(12))
    rotary.forward = lambda x: x[..., None] * rotary.freqs  # type: ignore[method-assign]
    pooled.forward = lambda x: (x @ pooled.query)[:, None]  # type: ignore[method-assign]
    others = [
        *(nn.Linear(12, 12), nn.BatchNorm1d(12).eval(), nn.GroupNorm(3, 12), nn.LayerNorm([3, 4])),
        *(nn.PReLU(12), nn.Embedding(12, 12), nn.Sequential(nn.LayerNorm(12)), rotary, pooled),
    ]
    assert [token_norm(part) for part in others] == [None] * len(others)


# torch's attention --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["plain", "each head's", "of others", "masked", "padded"])
def test_attention_that_is_called_is_torchs(first: bool, kind: str) -> None:
    """Also where it is not of tokens to one another, or some are not seen."""
    own = nn.MultiheadAttention(12, 3, batch_first=first).double().eval()
    called, (x, y) = CalledAttention(own), torch.randn(2, 4, 5, 12).double()
    count, others = (5, 4) if first else (4, 5)
    options: dict[str, Any] = {
        "each head's": {"average_attn_weights": False},
        "masked": {"attn_mask": torch.ones(count, count).triu(1).bool()},
        "padded": {"key_padding_mask": torch.arange(count).expand(others, -1) > 2},
    }.get(kind, {})
    given = (x, y, y) if kind == "of others" else (x, x, x)
    assert {id(p) for p in called.parameters()} == {id(p) for p in own.parameters()}
    for one, other in zip(called(*given, **options), own(*given, **options), strict=True):
        close(one, other)
