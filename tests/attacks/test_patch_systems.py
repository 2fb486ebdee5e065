"""Reading an upload: masks, weight differences, what the recipe adds to the gradient; and the
least-squares solver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.equations import TABLE
from attacks.equations.least_squares import (
    condition_and_rank,
    for_each_in_threads,
    minimum_norm_solve,
)
from attacks.equations.patch_system import patch_system
from attacks.equations.sent_gradients import clip_factors, pseudo_gradient, weight_rounding
from attacks.patch_gradient import PatchGradient
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.client.upload import make_upload, noisy
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel
from tests.helpers.models import planted_model
from tests.helpers.planted import changed, planted_view


def view_of(
    model: LoadedModel, setting: str = "b", **client: object
) -> tuple[AttackerView, ClientInput]:
    return planted_view(model, PatchGradient(), setting, client=ClientConfig(**client))


def hidden(view: AttackerView) -> Tensor:
    return patch_system(view, view.updates[0]).hidden


@pytest.mark.parametrize("kind", ["linear", "nonlinear", "pca"])
def test_dal_in_the_loss_is_subtracted(kind: str) -> None:
    model = planted_model(unknown_embedding=True, dal=kind)
    (with_dal, inputs), (without, _) = view_of(model, dal=True, dal_lambda=0.5), view_of(model)
    ours, plain = (patch_system(v, v.updates[0]) for v in (with_dal, without))
    sent = with_dal.updates[0].grads[TABLE][:, 0, 1:]
    assert not torch.allclose(sent, plain.rows, atol=1e-6)  # the client did send something else
    assert torch.allclose(ours.rows, plain.rows, atol=1e-12)
    assert torch.equal(ours.hidden, inputs.mask)


@pytest.mark.parametrize("kind", ["nonlinear", "pca"])
@pytest.mark.parametrize("setting", ["a", "b"])
def test_dal_is_subtracted_as_far_as_it_was_clipped(kind: str, setting: str) -> None:
    model, dal = planted_model(unknown_embedding=True, dal=kind), {"dal": True, "dal_lambda": 0.5}
    view, inputs = view_of(model, setting, **dal)
    whole = FedSGDClient(model, ClientConfig(**dal)).gradients(inputs)
    norm = torch.stack([g.flatten(1).square().sum(1) for g in whole.values()]).sum(0).sqrt()
    clip = float(norm.median()) / 3
    client = ClientConfig(**dal, defenses=({"dp_sgd": {"noise": 0, "clip": clip}},))
    sent = make_upload(model, [inputs], client, names=[*view.updates[0].grads])
    ours, full = (patch_system(view, one) for one in (sent, replace(sent, clipped=False)))
    shrunk = (clip / norm).clamp(max=1)
    assert shrunk.min() < 0.5
    assert sent.clipped
    expected = shrunk.view(-1, 1, 1) * patch_system(view, view.updates[0]).rows
    assert torch.allclose(ours.rows, expected, rtol=1e-5, atol=1e-9)
    assert not torch.allclose(full.rows, ours.rows, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("factor", [0.0, 1e-5, 0.003, 0.3, 0.51, 0.77, 1.0])
def test_a_planted_clip_factor_is_found(factor: float) -> None:
    """G = A^T X with the masked patches in it, and the public part in the rows with this factor;
    where anything explains the upload, no clip is assumed."""
    draws = torch.Generator().manual_seed(0)
    rows, part, x = (
        torch.randn(3, 6, size, generator=draws, dtype=torch.float64) for size in (20, 20, 30)
    )
    masked = torch.arange(6).expand(3, 6) < 2
    found = clip_factors(rows + factor * part, part, rows.mT @ x, masked)
    assert found.tolist() == pytest.approx([factor] * 3, abs=3e-8)
    narrow = [one[..., :6] for one in (rows, part, rows)]  # 4 visible rows and 2 masked: all of 6
    assert clip_factors(narrow[0], narrow[1], narrow[2].mT @ x, masked).tolist() == [1.0] * 3


def test_weak_rows_of_a_model_that_cannot_mask_are_no_masked_ones() -> None:
    view, inputs = view_of(planted_model(), "a")
    client = ClientConfig(defenses=({"gaussian_noise": 3.0},))
    view = replace(view, updates=[make_upload(view.model, [inputs], client)])
    assert not hidden(view).any()
    assert hidden(replace(view, model=planted_model(unknown_embedding=True))).any()


@pytest.mark.parametrize("strength", [1e-6, 1e-3, 0.03])
def test_masks_are_found_in_a_clients_dense_noise_of_known_strength(strength: float) -> None:
    view, inputs = view_of(planted_model(unknown_embedding=True))
    update = noisy(view.updates[0], strength, ["0", "1", "2", "3"], seed=0)
    assert (update.grads[TABLE] != 0).all()
    assert torch.equal(hidden(replace(view, updates=[update])), inputs.mask)


def test_weights_that_moved_are_those_the_decay_is_taken_from() -> None:
    view, inputs = view_of(planted_model(unknown_embedding=True))
    before = {name: p.detach().clone() for name, p in view.model.named_parameters()}
    grads = view.updates[0].grads.items()
    sent = {name: -0.1 * (g + 0.05 * before[name]) for name, g in grads}
    view = changed(view, grads=sent, kind="weight_difference", lr=0.1, weight_decay=0.05)
    with torch.no_grad():  # the server's model has gone on since
        for parameter in view.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(hidden(changed(view, weights_before=before)), inputs.mask)
    assert not torch.equal(hidden(view), inputs.mask)


def test_what_adamw_rounded_away_is_bounded() -> None:
    """g / (|g| + eps) of a large gradient is 1: the answer is as large as can be resolved. That
    differences of weights are read as torch's optimizers make them is asked in tests/client."""
    rate, weight = 1e-3, torch.full((1, 2), 0.5).double()
    facts = {"kind": "weight_difference", "lr": rate, "dtype": torch.float32}
    update = ClientUpdate({TABLE: weight}, **facts, optimizer="adamw")
    sent = -rate * torch.tensor([[1.0, -1.0]]).double()
    resolved = torch.finfo(torch.float32).eps * 0.5 / rate
    found = pseudo_gradient(update, sent, {TABLE: weight}, TABLE)
    assert found[0].tolist() == pytest.approx([1e-8 / resolved, -1e-8 / resolved])
    assert weight_rounding(update, 1e-6) == pytest.approx(1e-11, rel=1e-9)
    assert weight_rounding(ClientUpdate({}, **facts), 1e-6) == pytest.approx(1e-3, rel=1e-9)


# the batched least-squares solver against LAPACK's gelsd, where rows are zero or dependent --------

EPS = torch.finfo(torch.float64).eps


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


@pytest.mark.parametrize(
    ("change", "lost"), [("zero", 4), ("equal", 1), ("all zero", 20), ("dependent", 5)]
)
def test_rows_that_say_nothing_of_their_own(change: str, lost: int) -> None:
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
    assert condition_and_rank(a, torch.float64, values)["rank_a"][1] == 20 - lost


@pytest.mark.parametrize(("small", "counts"), [(0.5, False), (1.0, False), (2.0, True)])
def test_a_singular_value_must_exceed_the_bound(small: float, counts: bool) -> None:
    least = small * 4 * EPS
    a = torch.diag(torch.tensor([1.0, least, 1.0, 1.0]).double())[None]
    z, _ = minimum_norm_solve(a, torch.ones(1, 4, 1).double())
    assert z[0, :, 0].tolist() == pytest.approx([1.0, 1 / least if counts else 0.0, 1.0, 1.0])


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_the_number_of_threads_and_of_systems_changes_no_bit(threads: int) -> None:
    a, b = systems(20, 1e6, number=7)
    several = minimum_norm_solve(a, b)[0]
    torch.set_num_threads(1)
    assert torch.equal(minimum_norm_solve(a, b)[0], several)
    assert torch.equal(several[4], minimum_norm_solve(a[4:5], b[4:5])[0][0])
    assert minimum_norm_solve(a[:0], b[:0])[0].shape == (0, 20, 5)


def test_an_error_comes_out_and_the_threads_come_back(threads: int) -> None:
    def fails(index: int) -> None:
        if index == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        for_each_in_threads(fails, 4)
    assert torch.get_num_threads() == threads
