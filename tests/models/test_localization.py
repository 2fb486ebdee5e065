"""Dense absolute localization against NumPy: the regressors, their gradient and their loss."""

import numpy as np
import pytest
import torch
from torch import nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.mjp_vit import (
    LocalizationRegressor,
    principal_directions,
)
from tests.helpers.models import (
    PATCHES,
    some_images,
    some_labels,
    some_masks,
    tiny,
)

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
    order = torch.randperm(49, generator=torch.Generator().manual_seed(0))
    regressor = LocalizationRegressor(12, "pca")
    torch.testing.assert_close(regressor(rows[order], visible), regressor(rows, visible)[order])
    for turned in (rows, -rows, rows.flip(-1), rows @ torch.tensor(spectral_rows(12, 12))):
        directions = principal_directions(turned, visible)
        assert (directions.max(0).values > -directions.min(0).values).all()
        torch.testing.assert_close(directions.T @ directions, torch.eye(2).double())


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


def test_dal_of_uneven_rows_is_refused_but_its_loss_is_not() -> None:
    model = tiny(unknown_embedding=True, dal="linear")
    masks = torch.arange(PATCHES) < torch.tensor([[3], [5]])
    with pytest.raises(UserError, match=r"\[13, 11\].*dal_loss"):
        model.dal(masks)
    expected = (model.dal_loss(masks[0]) + model.dal_loss(masks[1])) / 2
    torch.testing.assert_close(model.dal_loss(masks), expected)


@pytest.mark.parametrize("method", ["dal", "dal_loss"])
@pytest.mark.parametrize(
    ("dal", "mask", "named"),
    [
        ("none", torch.zeros(PATCHES, dtype=torch.bool), "dal='linear'"),
        ("linear", torch.zeros(PATCHES, dtype=torch.int64), "int64"),
        ("linear", torch.zeros(PATCHES + 1, dtype=torch.bool), r"\(17,\)"),
        ("linear", torch.zeros(1, 2, PATCHES, dtype=torch.bool), r"\(1, 2, 16\)"),
    ],
)
def test_no_regressor_and_wrong_masks_are_refused(
    method: str, dal: str, mask: torch.Tensor, named: str
) -> None:
    with pytest.raises(UserError, match=named):
        getattr(tiny(unknown_embedding=True, dal=dal), method)(mask)
