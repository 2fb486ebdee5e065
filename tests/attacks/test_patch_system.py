"""Reading an upload: masks, weight differences, and what the recipe adds to the gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.equations import PATCH, TABLE
from attacks.equations.patch_system import (
    drowned_rows,
    lacks_gradients,
    patch_system,
    weights,
    zero_rows,
)
from attacks.equations.sent_gradients import clip_factors
from attacks.patch_gradient import PatchGradient
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.upload import make_upload
from mjp_privacy.client.upload import noisy as noisy_upload
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_view


def view_of(
    model: LoadedModel, setting: str = "b", **client: object
) -> tuple[AttackerView, ClientInput]:
    return planted_view(
        model,
        PatchGradient(),
        setting,
        client=ClientConfig(**client),  # type: ignore[arg-type]
    )


def difference(update: ClientUpdate, model: LoadedModel, lr: float, decay: float) -> ClientUpdate:
    """The same step of plain SGD, sent as a weight difference."""
    own = dict(model.named_parameters())
    sent = {n: -lr * (g + decay * own[n].detach()) for n, g in update.grads.items()}
    return replace(update, grads=sent, kind="weight_difference", lr=lr, weight_decay=decay)


def solves(view: AttackerView, inputs: ClientInput) -> Tensor:
    """How far A^T X of the true patches is from G, relative."""
    system = patch_system(view, view.updates[0])
    x = to_patches(view.model.normalize(inputs.images), view.model.patch_size)
    visible = torch.where(system.hidden.unsqueeze(-1), 0.0, x)
    masked = system.total - system.rows.mT @ visible
    return masked.flatten(1).norm(dim=1) / system.total.flatten(1).norm(dim=1)


def test_the_true_patches_solve_a_plain_upload() -> None:
    view, inputs = view_of(planted_model(), "a")
    assert solves(view, inputs).max() < 1e-12
    assert not patch_system(view, view.updates[0]).hidden.any()


@pytest.mark.parametrize("kind", ["linear", "nonlinear", "pca"])
def test_dal_in_the_loss_is_subtracted(kind: str) -> None:
    model = planted_model(unknown_embedding=True, dal=kind)
    with_dal, inputs = view_of(model, dal=True, dal_lambda=0.5)
    without, _ = view_of(model)
    ours, plain = (patch_system(v, v.updates[0]) for v in (with_dal, without))
    sent = with_dal.updates[0].grads[TABLE][:, 0, 1:]
    assert not torch.allclose(sent, plain.rows, atol=1e-6)  # the client did send something else
    assert torch.allclose(ours.rows, plain.rows, atol=1e-12)
    assert torch.equal(ours.hidden, inputs.mask)


@pytest.mark.parametrize("kind", ["nonlinear", "pca"])
@pytest.mark.parametrize("setting", ["a", "b"])
def test_dal_is_subtracted_as_far_as_it_was_clipped(kind: str, setting: str) -> None:
    model = planted_model(unknown_embedding=True, dal=kind)
    with_dal, inputs = view_of(model, setting, dal=True, dal_lambda=0.5)
    whole = FedSGDClient(model, ClientConfig(dal=True, dal_lambda=0.5)).gradients(inputs)
    norm = torch.stack([g.flatten(1).square().sum(1) for g in whole.values()]).sum(0).sqrt()
    clip = float(norm.median()) / 3
    names = [*with_dal.updates[0].grads]
    client = ClientConfig(
        dal=True,
        dal_lambda=0.5,
        defenses=({"dp_sgd": {"noise": 0, "clip": clip}},),  # type: ignore[arg-type]
    )
    sent = make_upload(model, [inputs], client, names=names)
    ours = patch_system(replace(with_dal, updates=[sent]), sent)
    plain = patch_system(with_dal, with_dal.updates[0])
    shrunk = (clip / norm).clamp(max=1)
    assert shrunk.min() < 0.5
    assert sent.clipped
    assert torch.allclose(ours.rows, shrunk.view(-1, 1, 1) * plain.rows, rtol=1e-5, atol=1e-9)
    full = patch_system(with_dal, replace(sent, clipped=False))
    assert not torch.allclose(full.rows, ours.rows, rtol=1e-2, atol=1e-6)


def test_where_anything_explains_the_upload_no_clip_is_assumed() -> None:
    rows, part = torch.randn(2, 5, 6).double()
    total, hidden = torch.randn(6, 4).double(), torch.tensor([False] * 4 + [True])
    factors = clip_factors(rows[None], part[None], total[None], hidden[None])
    assert factors.isfinite().all()
    hidden[2:] = True  # 2 visible rows and 3 masked patches of 4 pixels: 4 of 6 dimensions are free
    assert clip_factors(rows[None], part[None], total[None], hidden[None]) != 1
    assert clip_factors(rows[None, :, :4], part[None, :, :4], total[None, :4], hidden[None]) == 1


def test_weak_rows_of_a_model_that_cannot_mask_are_no_masked_ones() -> None:
    view, inputs = view_of(planted_model(), "a")
    client = ClientConfig(defenses=({"gaussian_noise": 3.0},))  # type: ignore[arg-type]
    update = make_upload(view.model, [inputs], client, names=[TABLE, PATCH])
    assert not patch_system(view, update).hidden.any()
    masks = planted_model(unknown_embedding=True)
    assert patch_system(replace(view, model=masks), update).hidden.any()


def test_the_mask_is_in_the_zero_rows() -> None:
    view, inputs = view_of(planted_model(unknown_embedding=True))
    assert torch.equal(patch_system(view, view.updates[0]).hidden, inputs.mask)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_a_weight_difference_of_one_step_is_a_gradient(decay: float) -> None:
    view, inputs = view_of(planted_model(unknown_embedding=True))
    update = view.updates[0]
    sent = replace(view, updates=[difference(update, view.model, 0.1, decay)])
    ours, plain = patch_system(sent, sent.updates[0]), patch_system(view, update)
    assert torch.equal(ours.hidden, inputs.mask)
    assert torch.allclose(ours.rows, plain.rows, atol=1e-12)
    assert torch.allclose(ours.total, plain.total, atol=1e-12)


def test_weights_that_moved_are_those_the_decay_is_taken_from() -> None:
    view, inputs = view_of(planted_model(unknown_embedding=True))
    update = difference(view.updates[0], view.model, 0.1, 0.05)
    before = {name: p.detach().clone() for name, p in view.model.named_parameters()}
    with torch.no_grad():  # the server's model has gone on since
        for parameter in view.model.parameters():
            parameter.add_(1.0)
    late = replace(view, updates=[replace(update, weights_before=before)])
    assert torch.equal(patch_system(late, late.updates[0]).hidden, inputs.mask)
    wrong = replace(view, updates=[update])
    assert not torch.equal(patch_system(wrong, wrong.updates[0]).hidden, inputs.mask)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "adamw", "steps": 2}, "2 AdamW steps"),
        ({"optimizer": "lion"}, "difference of lion"),
        ({"lr": None}, "unknown learning rate"),
    ],
)
def test_other_weight_differences_hold_no_gradient(change: dict[str, object], said: str) -> None:
    view, _ = view_of(planted_model())
    update = replace(difference(view.updates[0], view.model, 0.1, 0.0), **change)  # type: ignore[arg-type]
    assert said in str(lacks_gradients(replace(view, updates=[update]), TABLE))


def test_a_missing_gradient_is_named() -> None:
    view, _ = view_of(planted_model())
    grads = {name: g for name, g in view.updates[0].grads.items() if name != PATCH}
    lacking = replace(view, updates=[replace(view.updates[0], grads=grads)])
    assert "no gradient of patch_embed.proj.weight" in str(PatchGradient().unsupported(lacking))


def noisy(strength: float) -> tuple[Tensor, Tensor]:
    """A table (2, 41, 64), class row first and ten times as large, of which ten patch rows are
    masked, with dense noise; and the mask."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(2, 41, 1, generator=generator, dtype=torch.float64) * 2 + 0.2
    table = scale * torch.randn(2, 41, 64, generator=generator, dtype=torch.float64)
    table[:, 0] *= 10
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, 5:15], mask[1, 20:30] = True, True
    table[:, 1:][mask] = 0
    noise = torch.randn(table.shape, generator=generator, dtype=torch.float64)
    level = torch.stack([one[one != 0].square().mean().sqrt() for one in table])
    return table + strength * level.view(2, 1, 1) * noise, mask


@pytest.mark.parametrize("strength", [1e-6, 1e-3, 0.03])
def test_masks_are_found_under_dense_noise_of_known_strength(strength: float) -> None:
    table, mask = noisy(strength)
    assert torch.equal(drowned_rows(table, strength), mask)
    assert not zero_rows(table[:, 1:]).any()


@pytest.mark.parametrize("strength", [1e-3, 0.03])
def test_rows_of_a_picture_without_a_mask_are_all_visible(strength: float) -> None:
    table, mask = noisy(strength)
    visible = torch.cat((torch.ones(1, dtype=torch.bool), ~mask.any(0)))
    assert not drowned_rows(table[:, visible], strength).any()


@pytest.mark.parametrize("strength", [1e-3, 0.03])
def test_masks_are_found_in_a_clients_own_noise(strength: float) -> None:
    model = planted_model(unknown_embedding=True)
    view, inputs = view_of(model)
    update = noisy_upload(view.updates[0], strength, ["0", "1", "2", "3"], seed=0)
    sent = replace(view, updates=[update])
    assert torch.equal(patch_system(sent, update).hidden, inputs.mask)


def test_weights_are_those_that_came_with_the_upload_else_the_models() -> None:
    view, _ = view_of(planted_model(), "a")
    update, own = view.updates[0], dict(view.model.named_parameters())
    assert weights(view, update).keys() == own.keys()
    found = weights(view, update, [TABLE, "unk_embed"])
    assert list(found) == [TABLE]  # this model has no unknown embedding
    assert torch.equal(found[TABLE], own[TABLE])
    assert not found[TABLE].requires_grad
    sent = replace(update, weights_before={TABLE: own[TABLE].detach() + 1})
    assert weights(view, sent) is sent.weights_before
    assert list(weights(view, sent, [PATCH, TABLE])) == [TABLE]
    assert torch.equal(weights(view, sent, [TABLE])[TABLE], own[TABLE] + 1)
