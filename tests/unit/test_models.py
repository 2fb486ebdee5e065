"""The Vision Transformer beside timm's own, what MJP adds to it, and the localization regressor."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from model_fixtures import (
    ARCHITECTURE,
    CLASSES,
    DIM,
    MEAN,
    PATCH,
    PATCHES,
    SIZE,
    STD,
    some_images,
    some_labels,
    some_masks,
    tiny,
)
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mjp_privacy.errors import UserError
from mjp_privacy.models import MJPVisionTransformer, load_model
from mjp_privacy.models.closed_form_block import with_closed_form_block
from mjp_privacy.models.localization import LocalizationRegressor, masked_l1
from mjp_privacy.models.zoo import spec_by_name

# timm's own ---------------------------------------------------------------------------------------

TIMM_NAMES = {
    "vit_small": "vit_small_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "vit_tiny_patch16_224": "vit_tiny_patch16_224",
    "vit_small_patch32_384": "vit_small_patch32_384",
    "vit_base_patch16_224": "vit_base_patch16_224",
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


@pytest.mark.parametrize("changes", [{"img_size": 64}, {"patch_size": 32}, {"num_classes": 10}])
def test_other_sizes_of_a_named_model_are_timms(changes: dict[str, int]) -> None:
    with torch.device("meta"):
        theirs = timm.create_model("deit_small_patch16_224", **changes)
    assert shapes(on_meta("deit_small", **changes)) == shapes(theirs)


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


def test_a_model_is_loaded_in_eval_mode_without_dropout() -> None:
    model = tiny()
    assert not model.training
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert rates
    assert set(rates) == {0.0}
    assert not [m for m in model.modules() if type(m).__name__ == "DropPath"]
    x = some_images(2)
    assert torch.equal(model(x), model(x))
    torch.testing.assert_close(model.train()(x), model.eval()(x))


def test_tables_are_kept_from_weight_decay() -> None:
    names = tiny(unknown_embedding=True, index_embedding=True).no_weight_decay()
    assert {"pos_embed", "cls_token", "unk_embed", "index_embed"} <= names


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


def test_one_mask_of_a_batch_is_the_same_as_a_row_for_each() -> None:
    model, x, mask = tiny(unknown_embedding=True), some_images(3), some_masks(1)[0]
    expected = model(x, mask.expand(3, -1))
    assert torch.equal(model(x, mask), expected)
    assert torch.equal(model(x, mask[None]), expected)
    assert torch.equal(model(x, mask=mask), expected)
    assert not torch.allclose(model(x), expected)


def test_each_row_of_a_mask_is_its_images() -> None:
    model, x, mask = tiny(unknown_embedding=True), some_images(3), some_masks(3)
    alone = torch.cat([model(x[i : i + 1], mask[i]) for i in range(3)])
    torch.testing.assert_close(model(x, mask), alone, rtol=1e-12, atol=1e-12)


def test_no_mask_and_an_empty_mask_are_the_same() -> None:
    model, x = tiny(unknown_embedding=True), some_images(2)
    empty = torch.zeros(PATCHES, dtype=torch.bool)
    torch.testing.assert_close(model(x, empty), model(x), rtol=1e-14, atol=1e-14)


def test_without_an_unknown_embedding_the_mask_is_ignored() -> None:
    model, x = tiny(), some_images(2)
    assert model.unk_embed is None
    assert torch.equal(model(x, some_masks(2)), model(x))


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
        (torch.zeros(PATCHES), r"torch.float32 of \(16,\)"),
        (torch.zeros(PATCHES, dtype=torch.int64), r"torch.int64 of \(16,\)"),
        (torch.zeros(PATCHES + 1, dtype=torch.bool), r"torch.bool of \(17,\)"),
        (torch.zeros(3, PATCHES, dtype=torch.bool), r"torch.bool of \(3, 16\)"),
        (torch.zeros(2, PATCHES + 1, dtype=torch.bool), r"torch.bool of \(2, 17\)"),
        (torch.zeros(2, 4, 4, dtype=torch.bool), r"torch.bool of \(2, 4, 4\)"),
        (torch.tensor(True), r"torch.bool of \(\)"),
    ],
)
@pytest.mark.parametrize("unknown", [True, False])
def test_a_wrong_mask_is_refused(mask: Tensor, came: str, unknown: bool) -> None:
    model = tiny(unknown_embedding=unknown)
    expected = r"bool mask over the 16 patches \(no class position\), shape \(16,\) or \(2, 16\)"
    with pytest.raises(UserError, match=f"{expected}; got {came}"):
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
    with pytest.raises(UserError, match=f"expected unknown_embedding=False.*'{reading}', got"):
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


# localization -------------------------------------------------------------------------------------

ROWS_AND_COLUMNS = np.array([(row, column) for row in range(4) for column in range(4)])


@pytest.mark.parametrize("kind", ["linear", "nonlinear"])
@pytest.mark.parametrize("normalize", [False, True])
def test_dal_is_the_regressor_on_the_unmasked_rows(kind: str, normalize: bool) -> None:
    model = tiny(unknown_embedding=True, dal=kind)
    mask = some_masks(1)[0]
    target, prediction = model.dal(mask, normalize=normalize)
    rows = model.pos_embed.detach().numpy()[0, 1:][~mask.numpy()]
    weights = {k: p.detach().numpy() for k, p in model.dal_regressor.named_parameters()}
    if kind == "linear":
        expected = rows @ weights["layers.weight"].T + weights["layers.bias"]
    else:
        hidden = np.maximum(rows @ weights["layers.0.weight"].T + weights["layers.0.bias"], 0)
        expected = hidden @ weights["layers.2.weight"].T + weights["layers.2.bias"]
    grid = ROWS_AND_COLUMNS[~mask.numpy()] / (4 if normalize else 1)
    np.testing.assert_allclose(prediction.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(target.numpy(), grid, rtol=1e-15)
    loss = model.dal_loss(mask, normalize=normalize).item()
    assert loss == pytest.approx(np.abs(expected - grid).mean(), rel=1e-12)


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
    rows = spectral_rows(49, 12)
    visible = np.arange(49) >= hidden
    regressor = LocalizationRegressor(12, "pca")
    assert not list(regressor.parameters())
    found = regressor(torch.tensor(rows), torch.tensor(visible)).numpy()[visible]
    shown = rows[visible]
    _, values, directions = np.linalg.svd(shown - shown.mean(0), full_matrices=False)
    assert values[1] > 3 * values[2]
    expected = shown @ directions[:2].T  # torch.pca_lowrank's way: directions of the centred rows
    signs = np.sign((found * expected).sum(0))
    np.testing.assert_allclose(found, expected * signs, rtol=1e-6, atol=1e-6)
    lowrank = torch.pca_lowrank(torch.tensor(shown), q=2, niter=5)[-1].numpy()
    np.testing.assert_allclose(np.abs(lowrank.T @ directions[:2].T), np.eye(2), atol=1e-6)


def test_pca_has_the_same_signs_for_the_same_directions() -> None:
    rows, visible = torch.tensor(spectral_rows(49, 12)), torch.ones(49, dtype=torch.bool)
    regressor = LocalizationRegressor(12, "pca")
    assert torch.equal(regressor(rows, visible), regressor(rows, visible))
    order = torch.randperm(49, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(regressor(rows[order], visible), regressor(rows, visible)[order])


def test_pca_is_differentiable_and_a_batch_of_masks_is_row_by_row() -> None:
    model, masks = tiny(unknown_embedding=True, dal="pca"), some_masks(3)
    losses = torch.stack([model.dal_loss(mask) for mask in masks])
    torch.testing.assert_close(model.dal_loss(masks), losses.mean())
    rows = torch.tensor(spectral_rows(9, 4), requires_grad=True)
    visible, regressor = torch.arange(9) > 1, LocalizationRegressor(4, "pca")
    assert torch.autograd.gradcheck(lambda rows: regressor(rows, visible), rows, rtol=1e-4)


@pytest.mark.parametrize("kind", ["pca", "linear", "nonlinear"])
@pytest.mark.parametrize("visible", [0, 1, 2, 3])
def test_few_visible_patches_give_finite_gradients(kind: str, visible: int) -> None:
    model = tiny(unknown_embedding=True, dal=kind)
    mask = torch.arange(PATCHES) >= visible
    loss = model.dal_loss(mask)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if visible == 0:
        assert loss == 0
        assert not model.pos_embed.grad.any()


@pytest.mark.parametrize("kind", ["pca", "linear", "nonlinear"])
def test_the_gradient_of_dal_holds_nothing_of_the_image(kind: str) -> None:
    """The attacker can compute it from the model and the mask, and subtract it."""
    model, mask = tiny(unknown_embedding=True, dal=kind), some_masks(1)
    found = []
    for x in (some_images(2)[:1], some_images(2)[1:]):
        model.zero_grad()
        logits = model(x, mask)
        nn.functional.cross_entropy(logits, some_labels(1)).backward()
        without = model.pos_embed.grad.clone()
        assert model.unk_embed.grad.any()
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x, mask), some_labels(1)) + model.dal_loss(mask)
        loss.backward()
        found.append(model.pos_embed.grad - without)
    assert found[0].any()
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    assert not found[0][0, 1:][mask[0]].any()
    assert not found[0][0, 0].any()


@pytest.mark.parametrize("kind", ["pca", "linear", "nonlinear"])
def test_shapes_of_dal(kind: str) -> None:
    model = tiny(unknown_embedding=True, dal=kind)
    masks = some_masks(3)
    for mask, shape in [(None, (16, 2)), (masks[0], (11, 2)), (masks, (3, 11, 2))]:
        target, prediction = model.dal(mask)
        assert target.shape == prediction.shape == shape
        assert target.dtype == prediction.dtype == torch.float64
    batched = model.dal(masks)
    for row, mask in enumerate(masks):
        for one, many in zip(model.dal(mask), batched, strict=True):
            torch.testing.assert_close(many[row], one)


def test_dal_of_uneven_rows_is_refused_but_its_loss_is_not() -> None:
    model = tiny(unknown_embedding=True, dal="linear")
    masks = torch.arange(PATCHES) < torch.tensor([[3], [5]])
    with pytest.raises(UserError, match=r"same number of patches; got \[13, 11\].*dal_loss\(\)"):
        model.dal(masks)
    expected = (model.dal_loss(masks[0]) + model.dal_loss(masks[1])) / 2
    torch.testing.assert_close(model.dal_loss(masks), expected)


@pytest.mark.parametrize("method", ["dal", "dal_loss"])
def test_dal_without_a_regressor_says_how_to_have_one(method: str) -> None:
    with pytest.raises(UserError, match=r"no localization regressor.*dal='linear'.*dlocr"):
        getattr(tiny(unknown_embedding=True), method)()


@pytest.mark.parametrize("method", ["dal", "dal_loss"])
@pytest.mark.parametrize(
    ("mask", "came"),
    [
        (torch.zeros(PATCHES, dtype=torch.int64), "int64"),
        (torch.zeros(PATCHES + 1, dtype=torch.bool), r"\(17,\)"),
        (torch.zeros(1, 2, PATCHES, dtype=torch.bool), r"\(1, 2, 16\)"),
    ],
)
def test_dal_refuses_a_wrong_mask(method: str, mask: Tensor, came: str) -> None:
    model = tiny(unknown_embedding=True, dal="linear")
    with pytest.raises(UserError, match=f"bool mask over the 16 patches.*{came}"):
        getattr(model, method)(mask)


def test_the_masked_error_is_the_mean_of_what_is_visible() -> None:
    rng = np.random.default_rng(0)
    target, prediction = rng.standard_normal((2, 5, 2)), rng.standard_normal((2, 5, 2))
    visible = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=bool)
    found = masked_l1(*map(torch.tensor, (target, prediction, visible)))
    expected = np.abs(target - prediction)[0][visible[0]].mean()
    np.testing.assert_allclose(found.numpy(), [expected, 0.0], rtol=1e-12)


# names --------------------------------------------------------------------------------------------


def test_the_card_says_what_the_model_is() -> None:
    card = load_model("deit_small_mjp", checkpoint="random", depth=1, img_size=32).card
    assert (card.name, card.architecture) == ("deit_small_mjp", "vit d384 l1 h6 p16@32")
    assert (card.mean, card.std, card.num_classes) == (MEAN, STD, 1000)
    assert (card.interpolation, card.trained_gamma) == ("bicubic", 0.03)
    assert tiny().patch_size == PATCH
    assert tiny().grid == SIZE // PATCH
    assert tiny().embed_dim == DIM
    assert tiny().num_classes == CLASSES


def test_the_normalisation_of_named_models_is_known() -> None:
    half = (0.5, 0.5, 0.5)
    assert spec_by_name("vit_small").mean == spec_by_name("vit_small").std == half
    for name in ("deit_small", "deit_small_no_pe", "deit_small_mjp", "deit_small_mjp_no_unk"):
        assert (spec_by_name(name).mean, spec_by_name(name).std) == (MEAN, STD)
    tagged = spec_by_name("vit_base_patch16_384.augreg_in21k_ft_in1k")
    assert (tagged.mean, tagged.std, tagged.img_size, tagged.resize) == (half, half, 384, 384)
    assert spec_by_name("deit_tiny_patch16_224.fb_in1k").mean == MEAN
    assert spec_by_name("vit_base_patch16_224").mean is None  # an architecture is no checkpoint
