"""The span of hidden patches: planted systems, one upload and several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations import PATCH, QKV
from attacks.equations import filling as noisy_span
from attacks.equations import span as tokens
from attacks.equations.filling import NoisyUpload, most_probable, noisy_upload
from attacks.equations.patch_system import PatchSystem, located, patch_system
from attacks.equations.span import (
    ABOVE_NOISE,
    Knowledge,
    TokenEquations,
    combine,
    noise_edge,
    refine,
    token_equations,
    upload_span,
)
from attacks.masked_span import TokenSpan
from attacks.prior.files import find_prior
from attacks.prior.gaussian import PatchPrior, noise_variance, posterior_patches
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.night import nightly
from tests.helpers.planted import planted_images, planted_view

N, D, P = 10, 16, 30


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def system(x: Tensor, hidden: list[int], seed: int) -> PatchSystem:
    """What an upload holds: the rows of hidden patches are missing, their share of G is not."""
    rows = draw(N, D, seed=seed)
    total = rows.mT @ x
    mask = torch.zeros(1, N, dtype=torch.bool)
    mask[0, hidden] = True
    return PatchSystem(torch.where(mask.unsqueeze(-1), 0.0, rows[None]), total[None], mask)


def with_sum(x: Tensor, hidden: list[int], seed: int) -> PatchSystem:
    """The same with the gradient of E_unk, the sum of the hidden rows."""
    total = draw(N, D, seed=seed)[hidden].sum(0)
    return replace(system(x, hidden, seed), hidden_sum=total[None])


ALL = [*range(N)]


def holds(knowledge: Knowledge, x: Tensor) -> None:
    """known + a basis = x for some a."""
    part = x @ knowledge.basis.mT
    assert torch.allclose(knowledge.known + part @ knowledge.basis, x, atol=1e-8)
    assert torch.allclose(knowledge.known @ knowledge.basis.mT, torch.zeros_like(part), atol=1e-8)


@pytest.mark.parametrize(
    ("made", "hidden", "open_directions"),
    [
        (system, [[1, 4, 7]], 3),
        (system, [[]], 0),
        (system, [ALL], N),
        (system, [[1, 4, 7], [4, 2], [4]], 1),
        (system, [[1, 4, 7], [0, 2, 3]], 0),
        (with_sum, [[1, 4, 7]], 2),
        (with_sum, [[1, 4, 7], [4, 2], [4]], 0),
    ],
)
def test_uploads_leave_the_span_of_the_patches_that_were_always_hidden(
    made: Callable[..., PatchSystem], hidden: list[list[int]], open_directions: int
) -> None:
    """Of their differences, where the sum of the hidden rows is sent."""
    x = draw(N, P, seed=0)
    spans = [upload_span(made(x, places, seed=seed), 0) for seed, places in enumerate(hidden, 1)]
    knowledge, always = combine(spans), sorted(set.intersection(*map(set, hidden)))
    assert knowledge.hidden.nonzero().flatten().tolist() == always
    assert len(knowledge.basis) == open_directions
    holds(knowledge, x)
    apart = x[always] if made is system else x[always] - x[always[:1]]
    assert torch.allclose(apart @ knowledge.basis.mT @ knowledge.basis, apart, atol=1e-8)


@pytest.mark.parametrize("hidden", [[], [2, 5, 9]])
def test_a_model_as_wide_as_there_are_patches_holds_them(hidden: list[int]) -> None:
    """What the visible rows leave free is as much as is hidden."""
    x, rows = draw(N, P, seed=22), draw(N, N, seed=23)
    mask = torch.zeros(1, N, dtype=torch.bool)
    mask[0, hidden] = True
    seen = torch.where(mask.unsqueeze(-1), 0.0, rows[None])
    knowledge = combine([upload_span(PatchSystem(seen, (rows.mT @ x)[None], mask), 0)])
    assert len(knowledge.basis) == len(hidden)
    holds(knowledge, x)


def test_a_visible_row_that_carries_nothing_gets_the_least_norm() -> None:
    """Such as one that quantisation rounded away in one upload and not in another."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    rows[3] = 0
    patches = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    system = PatchSystem(rows[None], (rows.mT @ patches)[None], torch.zeros(1, 4, dtype=torch.bool))
    found = combine([upload_span(system, 0)]).known
    assert torch.allclose(found[:3], patches[:3])
    assert not found[3].any()


def test_noise_reaches_the_edge_of_its_singular_values() -> None:
    noise = 0.3 * draw(300, 200, seed=24)
    strongest = torch.linalg.svdvals(noise)[0]
    assert noise_edge(0.3, 300, 200) == pytest.approx(float(strongest), rel=0.03)


@pytest.mark.parametrize("level", [-1.0, 0.0, 1.0])
def test_copies_of_one_patch_hidden_every_time_leave_nothing_open(level: float) -> None:
    """Letterbox bars: another bar patch is hidden each time, but they are all equal. At level 0
    they are the zero vector, which the span does not see."""
    x = draw(N, P, seed=0)
    x[:6] = level
    hidden = ([0, 1, 7], [2, 3, 8], [4, 5, 9])
    knowledge = combine(
        [upload_span(with_sum(x, h, seed=s), 0, above_noise=10) for s, h in enumerate(hidden)]
    )
    assert not len(knowledge.basis)
    assert torch.allclose(knowledge.known, x, atol=1e-7)
    without = combine(
        [upload_span(system(x, h, seed=s), 0, above_noise=10) for s, h in enumerate(hidden)]
    )
    assert len(without.basis) == int(level != 0)


def test_the_rank_of_equal_patches_is_told_from_float32_noise() -> None:
    x, hidden = draw(N, P, seed=0), [0, 1, 2, 3, 4]
    x[:4] = 1.0
    exact = with_sum(x, hidden, seed=1)
    rounded = replace(
        exact,
        rows=exact.rows.float().double(),
        total=exact.total.float().double(),
        hidden_sum=exact.hidden_sum.float().double(),
    )
    assert len(upload_span(rounded, 0, above_noise=ABOVE_NOISE).basis) == 1
    assert len(upload_span(rounded, 0).basis) == 4  # kept where directions may be weak


# block 0's equations: exact without the position table's gradient where there are enough ----------

ENOUGH = {"embed_dim": 160}  # 160 - 64 - 2 equations against 65 unknowns


@pytest.mark.parametrize(
    ("model", "least", "most"),
    [
        (ENOUGH, 90, 1000),
        ({"patch_size": 8, **ENOUGH}, 90, 1000),  # longer than they are many
        ({"embed_dim": 96}, 11, 40),  # directions are left to the prior
    ],
)
def test_a_frozen_position_table_hides_nothing_from_a_wide_model(
    model: dict[str, Any], least: float, most: float
) -> None:
    attack = TokenSpan(prior="stationary")
    view, _ = planted_view(planted_model(**model), attack, "a")
    assert sorted(view.updates[0].grads) == sorted((PATCH, QKV))  # no pos_embed
    found = attack.run(view, generator=torch.Generator())
    reached = psnr(found.images, planted_images())
    assert (reached.min() > least) if most > 100 else (least < reached.mean() < most)


def test_masks_are_told_by_which_embedding_fits() -> None:
    attack = TokenSpan(prior="stationary")
    model = planted_model(unknown_embedding=True, embed_dim=160)
    view, inputs = planted_view(model, attack, "c")
    found = attack.run(view, generator=torch.Generator())
    assert torch.equal(found.mask, inputs.mask)


def test_the_equations_hold_for_the_true_patches() -> None:
    model = planted_model(unknown_embedding=True, embed_dim=160)
    attack = TokenSpan()
    view, inputs = planted_view(model, attack, "c")
    equations = token_equations(view, view.updates[0], 0)
    x = to_patches(model.normalize(inputs.images), 4)[0]
    added = torch.where(inputs.mask[0].unsqueeze(1), equations.unknown, equations.own)
    z = x @ equations.weight.mT + added
    spread = z.var(-1, unbiased=False).add(model.blocks[0].norm1.eps).sqrt()
    shift = equations.shift.unsqueeze(1) * spread
    assert (equations.system @ z.mT + shift).abs().max() < 1e-10
    others = x @ equations.weight.mT + equations.own  # as if nothing had been masked
    hidden = inputs.mask[0]
    assert (equations.system @ others.mT + shift)[:, hidden].abs().max() > 1e-3


def test_they_close_a_direction_that_the_span_leaves_open() -> None:
    from attacks.masked_span import MaskedSpan

    model = planted_model(unknown_embedding=True, embed_dim=160)
    view, inputs = planted_view(model, MaskedSpan(), "b")
    system = replace(patch_system(view, view.updates[0]), hidden_sum=None)  # it closes it too
    before = upload_span(system, 0)
    after = refine(before, token_equations(view, view.updates[0], 0))
    assert len(after.basis) < len(before.basis)
    x = to_patches(model.normalize(inputs.images), 4)[0]
    visible = ~inputs.mask[0]
    closed = after.complement + (x @ after.basis.mT) @ after.basis
    # A direction that stands out of the noise by little more than MARGIN may be off by 1 / MARGIN.
    assert (closed - x)[visible].norm() < 0.05 * x[visible].norm()


# whether the equations are believed ---------------------------------------------------------------


def told(error: float, noise: float = 0.0) -> TokenEquations:
    empty = torch.zeros(0).double()
    return TokenEquations(empty, empty, empty, empty, None, error=error, noise=noise)


def test_equations_are_believed_where_they_explain_the_visible_patches() -> None:
    """Three unknowns, of which the last is 2e-5 of the first: weak, or rounding."""
    matrix = torch.zeros(5, 3).double()
    matrix[0, 0], matrix[1, 1], matrix[2, 2] = 1.0, 1e-3, 2e-5
    right = torch.zeros(5, 4).double()
    right[2] = 1.0  # within reach of the weakest direction alone
    assert tokens._trusted(matrix, right, told(error=2e-5 / 3 / 1.1))
    assert not tokens._trusted(matrix, right, told(error=2e-5 / 3 * 1.1))
    right[4] = 1.0  # out of reach
    assert not tokens._trusted(matrix, right, told(error=1e-9))


# attacks that know a defence's noise against the same attacks that do not -------------------------


# At 0.03 some visible rows are weaker than the noise, and nobody can tell them from masked ones.
@pytest.mark.parametrize("defense", [{"gaussian_noise": 0.01}, {"dp_sgd": 0.00003}])
def test_knowing_the_noise_helps(defense: dict[str, float]) -> None:
    attack = find_attack("masked_span", {"prior": "stationary"})
    model = planted_model(unknown_embedding=True)
    view, inputs = planted_view(model, attack, "c")
    names = [*view.updates[0].grads]
    client = ClientConfig(defenses=(defense,))
    update = make_upload(model, [inputs], client, names=names)
    scores = {}
    for told in (True, False):
        sent = update if told else replace(update, noise={})
        known = replace(view, updates=[sent])
        found = attack.run(known, generator=torch.Generator())
        scores[told] = psnr(found.images, planted_images()).mean()
        assert located(known, sent).equal(inputs.mask) == told
    assert scores[True] > scores[False] + 1


LEVEL = 0.03


def noisy_uploads(setting: str) -> tuple[NoisyUpload, Tensor, Tensor]:
    """One upload of a planted image, and the patch prior."""
    attack = find_attack("masked_span", {"prior": "stationary"})
    model = planted_model(unknown_embedding=setting != "a")
    view, inputs = planted_view(model, attack, setting)
    client = ClientConfig(defenses=({"gaussian_noise": LEVEL},))
    update = make_upload(model, [inputs], client, names=[*view.updates[0].grads])
    system = patch_system(view, update)
    prior = find_prior("stationary", patch=model.patch_size, size=view.pixels.size)
    mean, covariance = (part.double() for part in prior.patch(model.patch_size, view.pixels))
    return noisy_upload(update, system, 0, mean, covariance), mean, covariance


@pytest.mark.parametrize(
    ("setting", "contrast"), [nightly("a", 1.0), nightly("c", 1.0), ("c", 1e-4)]
)
def test_the_solution_is_that_of_the_dense_system(
    setting: str, contrast: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noisy_span, "PASSES", 0)
    monkeypatch.setattr(noisy_span, "TOLERANCE", 1e-12)
    upload, mean, covariance = noisy_uploads(setting)
    covariance = contrast * covariance
    found = most_probable([upload], mean, covariance, None)
    patches, length = found.shape
    weight = covariance + noisy_span.JITTER * covariance.diagonal().mean() * torch.eye(length)
    eye = torch.eye(patches * length, dtype=torch.float64).view(-1, patches, length)
    forces = [upload.force(one) + one @ torch.linalg.inv(weight) for one in eye]
    dense = torch.stack([force.flatten() for force in forces], dim=1)
    right = upload.pull() + mean.expand_as(found) @ torch.linalg.inv(weight)
    wanted = torch.linalg.solve(dense, right.flatten()).view_as(found)
    assert torch.allclose(found, wanted, atol=1e-5 * contrast**0.5)


def test_rows_beside_a_guess_are_those_of_dense_conditioning() -> None:
    """g_1 ... g_N and G = A^T X jointly Gaussian around what was sent, a column of D at a time."""
    upload, mean, covariance = noisy_uploads("a")
    guess = most_probable([upload], mean, covariance, None)
    found = upload.with_rows(guess).rows
    length = guess.shape[1]
    a, g, sent = upload.error.rows, upload.error.total, upload.error.sent
    joint = a * guess.mT @ guess + g * torch.eye(length)  # of G's row, given the rows sent
    gain = a * guess @ torch.linalg.inv(joint)
    wanted = sent + gain @ (upload.total - sent.mT @ guess).mT
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-7 * float(sent.abs().max()))
    assert not torch.allclose(found, sent, rtol=1e-2)


@pytest.mark.parametrize("name", ["masked_span", "multi_round"])
def test_knowing_the_rows_better_helps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain client, whose noise is drawn anew in every round."""
    attack = find_attack(name, {"prior": "stationary"})
    model = planted_model()
    view, inputs = planted_view(model, attack, "a")
    client = ClientConfig(defenses=({"gaussian_noise": LEVEL},))
    names = [*view.updates[0].grads]
    rounds = range(len(view.updates))
    updates = [make_upload(model, [inputs], client, names=names, round=r) for r in rounds]
    known = replace(view, updates=updates)
    scores = {}
    for passes in (0, noisy_span.PASSES):
        monkeypatch.setattr(noisy_span, "PASSES", passes)
        found = attack.run(known, generator=torch.Generator())
        scores[passes] = float(psnr(found.images, planted_images()).mean())
    assert scores[noisy_span.PASSES] > scores[0] + 0.2


@pytest.mark.nightly
@pytest.mark.parametrize("share", [0.01, 0.0001])
@pytest.mark.parametrize("name", ["masked_span", "multi_round", "pixel_lattice"])
def test_an_upload_of_next_to_nothing_gives_a_picture(name: str, share: float) -> None:
    """Fewer directions are left of G than patches are hidden."""
    attack = find_attack(name, {"prior": "stationary"})
    model = planted_model(unknown_embedding=True)
    view, inputs = planted_view(model, attack, "c")
    client = ClientConfig(defenses=({"top_k": share},))
    update = make_upload(model, [inputs], client, names=[*view.updates[0].grads])
    known = replace(view, updates=[update] * len(view.updates))
    found = attack.run(known, generator=torch.Generator())
    assert psnr(found.images, planted_images()).min() > 8
    if name != "pixel_lattice":
        assert found.diagnostics["open_directions"].isnan().all()


# conjugate gradients ------------------------------------------------------------------------------


def steps_and_residual(scale: float) -> tuple[int, float]:
    """How often the matrix was applied, and the share of the residual that is left."""
    draws = torch.Generator().manual_seed(4)
    square = torch.randn(40, 40, generator=draws).double()
    matrix = square @ square.mT + torch.eye(40)
    wanted = scale * torch.randn(40, 1, generator=draws).double()
    asked = []

    def apply(x: Tensor) -> Tensor:
        asked.append(x)
        return matrix @ x

    found = noisy_span._conjugate_gradients(apply, wanted, lambda x: x, None)
    return len(asked), float((matrix @ found - wanted).norm() / wanted.norm())


def test_it_stops_at_the_tolerance_whatever_the_scale() -> None:
    steps, left = steps_and_residual(1.0)
    assert noisy_span.TOLERANCE / 1e3 < left <= noisy_span.TOLERANCE
    for scale in (1e-5, 1e5):
        others, remaining = steps_and_residual(scale)
        assert abs(others - steps) <= 1  # rounding
        assert remaining <= noisy_span.TOLERANCE


def test_a_guess_that_is_worse_than_nothing_is_not_begun_with() -> None:
    """Of x² / 2 - x, whose least value is at 1: at 1.9 it is below 0, at 2.1 above."""
    begun: list[float] = []

    def apply(x: Tensor) -> Tensor:
        begun.append(float(x[0, 0]))
        return x

    wanted = torch.ones(1, 1).double()
    for guess, first_direction in ((1.9, -0.9), (2.1, 1.0)):
        begun.clear()
        found = noisy_span._conjugate_gradients(
            apply, wanted, lambda x: x, torch.full((1, 1), guess).double()
        )
        assert found.item() == pytest.approx(1.0)
        assert begun[1] == pytest.approx(first_direction)


# the posterior in its diagonal form against dense Gaussian conditioning ---------------------------

WIENER_N, WIENER_D, WIENER_P, K = 3, 7, 5, 4


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A (N, D), W (K, p), mean (p,), covariance (p, p)."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    root = draw(WIENER_P, WIENER_P)
    return draw(WIENER_N, WIENER_D), draw(K, WIENER_P), draw(WIENER_P), root @ root.mT


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("noise", [1e-6, 0.1, 10.0])
def test_it_is_the_conditional_mean(embedded: bool, noise: float) -> None:
    rows, weight, mean, covariance = problem()
    weight = weight if embedded else torch.eye(WIENER_P, dtype=torch.float64)
    total = torch.randn(WIENER_D, len(weight), generator=torch.Generator().manual_seed(5)).double()
    prior = PatchPrior(mean, covariance, weight if embedded else None)
    found, values = posterior_patches(rows[None], total[None], prior, torch.tensor([noise]))
    # vec of X row by row: Y = (A^T kron W) vec(X)
    operator = np.kron(rows.mT.numpy(), weight.numpy())
    sigma = np.kron(np.eye(WIENER_N), covariance.numpy())
    centre = np.tile(mean.numpy(), WIENER_N)
    gain = sigma @ operator.T
    inverse = np.linalg.inv(operator @ gain + noise * np.eye(len(operator)))
    expected = centre + gain @ inverse @ (total.numpy().ravel() - operator @ centre)
    assert np.allclose(found[0].numpy().ravel(), expected, atol=1e-7)
    assert torch.allclose(values[0], torch.linalg.svdvals(rows))


def test_without_noise_an_invertible_system_is_solved() -> None:
    rows, _, mean, covariance = problem()
    x = torch.randn(WIENER_N, WIENER_P, generator=torch.Generator().manual_seed(2)).double()
    prior = PatchPrior(mean, covariance)
    found, _ = posterior_patches(rows[None], (rows.mT @ x)[None], prior, torch.zeros(1))
    assert torch.allclose(found[0], x, atol=1e-8)


def test_a_row_that_is_zero_gets_the_prior_mean() -> None:
    rows, _, mean, covariance = problem()
    rows[1] = 0
    total = rows.mT @ torch.ones(WIENER_N, WIENER_P, dtype=torch.float64)
    prior = PatchPrior(mean, covariance)
    found, _ = posterior_patches(rows[None], total[None], prior, torch.tensor([1e-9]))
    assert torch.allclose(found[0, 1], mean)


def test_the_noise_is_read_off_the_upload() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 20, 200, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 20, 100, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, 200, 100, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.01, 0.3]).double()
    total = rows.mT @ x + scale.view(2, 1, 1) * noise
    found = noise_variance(rows, total, torch.float64)
    assert torch.allclose(found, scale.square(), rtol=0.05)


def test_where_nothing_is_left_over_the_noise_is_the_precisions_rounding() -> None:
    rows = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(4)).double()
    total = torch.ones(1, 8, 5, dtype=torch.float64)
    found = noise_variance(rows, total, torch.float32)
    assert torch.allclose(found.sqrt(), torch.tensor([2.0**-23]).double())
