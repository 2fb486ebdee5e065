"""Reading an upload: masks, weight differences, and what the recipe adds to the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.equations import PATCH, TABLE
from attacks.equations.least_squares import (
    condition_and_rank,
    for_each_in_threads,
    minimum_norm_solve,
)
from attacks.equations.patch_system import (
    drowned_rows,
    patch_system,
    weights,
    zero_rows,
)
from attacks.equations.sent_gradients import (
    clip_factors,
    pseudo_gradient,
    weight_rounding,
)
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
        client=ClientConfig(**client),
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
        defenses=({"dp_sgd": {"noise": 0, "clip": clip}},),
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
    client = ClientConfig(defenses=({"gaussian_noise": 3.0},))
    update = make_upload(view.model, [inputs], client, names=[TABLE, PATCH])
    assert not patch_system(view, update).hidden.any()
    masks = planted_model(unknown_embedding=True)
    assert patch_system(replace(view, model=masks), update).hidden.any()


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


# the batched least-squares solver against LAPACK's gelsd, where rows are zero or dependent --------


def systems(rows: int, condition: float, number: int = 3) -> tuple[Tensor, Tensor]:
    """a (n, rows, 30) of this condition number, b (n, 30, 5) that it explains but for 1e-9."""
    generator = torch.Generator().manual_seed(rows)
    left, right = (
        torch.linalg.qr(torch.randn(number, size, size, generator=generator).double()).Q
        for size in (rows, 30)
    )
    values = torch.logspace(0, -torch.tensor(condition).log10(), min(rows, 30)).double()
    a = left[..., : len(values)] * values @ right.mT[:, : len(values)]
    b = a.mT @ torch.randn(number, rows, 5, generator=generator).double()
    return a, b + 1e-9 * torch.randn(b.shape, generator=generator).double()


def gelsd(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.lstsq(a.mT, b, driver="gelsd").solution


@pytest.mark.parametrize("rows", [1, 20, 30, 40])
@pytest.mark.parametrize("condition", [1e1, 1e5, 1e9])
def test_it_is_gelsd(rows: int, condition: float) -> None:
    a, b = systems(rows, condition)
    z, values = minimum_norm_solve(a, b)
    expected = gelsd(a, b)
    assert float((z - expected).norm() / expected.norm()) < 1e-14 * condition
    torch.testing.assert_close(values, torch.linalg.svdvals(a), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("change", ["zero", "equal", "all zero", "dependent"])
def test_rows_that_say_nothing_of_their_own(change: str) -> None:
    a, b = systems(20, 10.0)
    if change == "zero":
        a[1, 3:7] = 0
    elif change == "equal":
        a[1, 3] = a[1, 4]
    elif change == "all zero":
        a[1] = 0
    else:
        mixed = torch.randn(5, 15, generator=torch.Generator().manual_seed(2)).double()
        a[:, 15:] = mixed @ a[:, :15]
    z, values = minimum_norm_solve(a, b)
    expected = gelsd(a, b)
    assert torch.allclose(z, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    assert z[1, 3:7].any() == (change not in ("zero", "all zero"))
    torch.testing.assert_close(values, torch.linalg.svdvals(a), rtol=1e-9, atol=1e-13)
    facts = condition_and_rank(a, torch.float64, values)
    lost = {"zero": 4, "equal": 1, "all zero": 20, "dependent": 5}
    assert facts["rank_a"][1] == 20 - lost[change]


@pytest.mark.parametrize("dependent", [False, True])
def test_a_right_hand_side_given_as_a_product(dependent: bool) -> None:
    a, _ = systems(20, 100.0)
    if dependent:
        a[0, 1] = a[0, 2]
    generator = torch.Generator().manual_seed(1)
    factor = torch.randn(50, 30, generator=generator)
    right = torch.randn(3, 50, 5, generator=generator)
    z, _ = minimum_norm_solve(a, right, factor=factor)
    expected, _ = minimum_norm_solve(a, factor.double().mT @ right.double())
    torch.testing.assert_close(z, expected, rtol=1e-9, atol=1e-9)


def test_the_number_of_threads_and_of_systems_changes_no_bit() -> None:
    a, b = systems(20, 1e6, number=7)
    before = torch.get_num_threads()
    solutions = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            solutions.append(minimum_norm_solve(a, b)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*solutions)
    assert torch.equal(solutions[0][4], minimum_norm_solve(a[4:5], b[4:5])[0][0])
    assert minimum_norm_solve(a[:0], b[:0])[0].shape == (0, 20, 5)


EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize(("small", "counts"), [(0.5, False), (1.0, False), (2.0, True)])
def test_a_singular_value_must_exceed_the_bound(small: float, counts: bool) -> None:
    a = torch.diag(torch.tensor([1.0, small * 4 * EPS, 1.0, 1.0]).double())[None]
    z, _ = minimum_norm_solve(a, torch.ones(1, 4, 1).double())
    assert z[0, :, 0].tolist() == pytest.approx(
        [1.0, 1 / (small * 4 * EPS) if counts else 0.0, 1.0, 1.0]
    )


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_an_error_comes_out_and_the_threads_come_back(threads: int) -> None:
    def fails(index: int) -> None:
        if index == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        for_each_in_threads(fails, 4)
    assert torch.get_num_threads() == threads


# the factor of the clip, planted over its whole range ---------------------------------------------

PATCHES, WIDTH, VALUES, MASKED = 6, 20, 30, 2


def clipped(factor: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, part, total, hidden) of one upload: G = A^T X with the masked patches in it, and the
    public part in the rows with this factor."""
    draws = torch.Generator().manual_seed(seed)
    rows, part, x = (
        torch.randn(PATCHES, size, generator=draws, dtype=torch.float64)
        for size in (WIDTH, WIDTH, VALUES)
    )
    hidden = torch.arange(PATCHES) < MASKED
    return rows + factor * part, part, rows.mT @ x, hidden


@pytest.mark.parametrize("factor", [0.0, 1e-5, 0.003, 0.3, 0.51, 0.77, 1.0])
def test_a_planted_factor_is_found(factor: float) -> None:
    uploads = [clipped(factor, seed) for seed in range(3)]
    found = clip_factors(*(torch.stack(parts) for parts in zip(*uploads, strict=True)))
    assert found.shape == (3,)
    assert found.tolist() == pytest.approx([factor] * 3, abs=3e-8)


# gradients from differences of weights, against torch's own optimizers ----------------------------

LR, DECAY = 1e-3, 0.05


def sent_by(optimizer: str, gradient: Tensor, weight: Tensor) -> Tensor:
    """The difference that one step of torch's optimizer makes."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    kind([parameter], lr=LR, weight_decay=DECAY).step()
    return parameter.detach() - weight


def update_of(optimizer: str) -> ClientUpdate:
    view, _ = planted_view(planted_model(), PatchGradient(), "a")
    facts = {"kind": "weight_difference", "lr": LR, "weight_decay": DECAY, "optimizer": optimizer}
    return replace(view.updates[0], **facts)


@pytest.mark.parametrize(("optimizer", "scale"), [("sgd", 1.0), ("adamw", 1e-8)])
def test_a_step_of_torchs_optimizer_gives_the_gradient_back(optimizer: str, scale: float) -> None:
    """AdamW's step tells a gradient of its own eps's size: g / (|g| + eps)."""
    draws = torch.Generator().manual_seed(0)
    gradient, weight = (torch.randn(2, 3, 4, generator=draws).double() for _ in range(2))
    gradient = scale * gradient
    update = update_of(optimizer)
    sent = sent_by(optimizer, gradient, weight)
    found = pseudo_gradient(update, sent, {TABLE: weight}, TABLE)
    assert torch.allclose(found, gradient, rtol=1e-6, atol=1e-9 * scale)
    assert weight_rounding(update, 1e-6) == pytest.approx(
        {"sgd": 1e-3, "adamw": 1e-11}[optimizer], rel=1e-9
    )


def test_what_adamw_rounded_away_is_bounded() -> None:
    """g / (|g| + eps) of a large gradient is 1: the answer is as large as can be resolved."""
    weight = torch.full((1, 2), 0.5).double()
    update = replace(update_of("adamw"), dtype=torch.float32)
    sent = sent_by("adamw", torch.tensor([[1.0, -1.0]]).double(), weight)
    found = pseudo_gradient(update, sent, {TABLE: weight}, TABLE)
    resolved = torch.finfo(update.dtype).eps * 0.5 / LR
    assert found[0].tolist() == pytest.approx([1e-8 / resolved, -1e-8 / resolved])
