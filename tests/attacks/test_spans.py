"""The span of hidden patches: planted systems, one upload and several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations import PATCH, QKV, tokens
from attacks.equations import noisy as noisy_span
from attacks.equations.noisy import LEAK, NoisyUpload, most_probable, noisy_upload
from attacks.equations.patch_system import PatchSystem, located, patch_system
from attacks.equations.span import ABOVE_NOISE, Knowledge, combine, noise_edge, upload_span
from attacks.equations.tokens import TokenEquations, refine, token_equations
from attacks.masked_span import TokenSpan
from attacks.prior import find_prior
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


def holds(knowledge: Knowledge, x: Tensor) -> None:
    """known + a basis = x for some a."""
    part = x @ knowledge.basis.mT
    assert torch.allclose(knowledge.known + part @ knowledge.basis, x, atol=1e-8)
    assert torch.allclose(knowledge.known @ knowledge.basis.mT, torch.zeros_like(part), atol=1e-8)


def test_one_upload_leaves_the_span_of_the_hidden_patches() -> None:
    x, hidden = draw(N, P, seed=0), [1, 4, 7]
    knowledge = combine([upload_span(system(x, hidden, seed=1), 0)])
    assert knowledge.hidden.nonzero().flatten().tolist() == hidden
    assert len(knowledge.basis) == 3
    assert torch.linalg.matrix_rank(torch.cat((knowledge.basis, x[hidden]))) == 3
    holds(knowledge, x)


def test_no_mask_is_an_exact_picture() -> None:
    x = draw(N, P, seed=0)
    knowledge = combine([upload_span(system(x, [], seed=1), 0)])
    assert knowledge.basis.shape == (0, P)
    assert torch.allclose(knowledge.known, x)


def test_everything_hidden_leaves_everything_open() -> None:
    x = draw(N, P, seed=0)
    knowledge = combine([upload_span(system(x, list(range(N)), seed=1), 0)])
    assert len(knowledge.basis) == N
    holds(knowledge, x)


def test_several_uploads_leave_only_the_patches_that_were_always_hidden() -> None:
    x = draw(N, P, seed=0)
    spans = [upload_span(system(x, h, seed=s), 0) for s, h in enumerate(([1, 4, 7], [4, 2], [4]))]
    knowledge = combine(spans)
    assert knowledge.hidden.nonzero().flatten().tolist() == [4]
    assert len(knowledge.basis) == 1
    assert torch.allclose(knowledge.basis[0].abs(), (x[4] / x[4].norm()).abs(), atol=1e-8)
    holds(knowledge, x)


def test_with_no_patch_always_hidden_the_picture_is_exact() -> None:
    x = draw(N, P, seed=0)
    spans = [upload_span(system(x, h, seed=s), 0) for s, h in enumerate(([1, 4, 7], [0, 2, 3]))]
    assert torch.allclose(combine(spans).known, x, atol=1e-8)


def test_other_pixels_in_each_round_break_it() -> None:
    spans = [
        upload_span(system(draw(N, P, seed=s), h, seed=s), 0)
        for s, h in enumerate(([1, 4, 7], [0, 2, 3]))
    ]
    knowledge = combine(spans)
    error = (knowledge.known - draw(N, P, seed=0)).norm() / draw(N, P, seed=0).norm()
    assert error > 0.3


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


def test_as_many_visible_patches_as_the_model_is_wide_are_all_known() -> None:
    x = draw(N, P, seed=20)
    rows = draw(N, N, seed=21)
    upload = PatchSystem(rows[None], (rows.mT @ x)[None], torch.zeros(1, N, dtype=torch.bool))
    knowledge = combine([upload_span(upload, 0)])
    assert knowledge.basis.shape == (0, P)
    assert torch.allclose(knowledge.known, x, atol=1e-8)


def test_just_enough_free_directions_hold_the_hidden_patches() -> None:
    """As wide as there are patches: what the visible rows leave free is as much as is hidden."""
    x, rows, hidden = draw(N, P, seed=22), draw(N, N, seed=23), [2, 5, 9]
    mask = torch.zeros(1, N, dtype=torch.bool)
    mask[0, hidden] = True
    seen = torch.where(mask.unsqueeze(-1), 0.0, rows[None])
    knowledge = combine([upload_span(PatchSystem(seen, (rows.mT @ x)[None], mask), 0)])
    assert len(knowledge.basis) == 3
    holds(knowledge, x)


def test_noise_reaches_the_edge_of_its_singular_values() -> None:
    noise = 0.3 * draw(300, 200, seed=24)
    strongest = torch.linalg.svdvals(noise)[0]
    assert noise_edge(0.3, 300, 200) == pytest.approx(float(strongest), rel=0.03)


def test_the_sum_of_the_hidden_rows_leaves_their_differences() -> None:
    x, hidden = draw(N, P, seed=0), [1, 4, 7]
    knowledge = combine([upload_span(with_sum(x, hidden, seed=1), 0)])
    assert len(knowledge.basis) == 2
    differences = x[[4, 7]] - x[1]
    assert torch.linalg.matrix_rank(torch.cat((knowledge.basis, differences))) == 2
    holds(knowledge, x)
    assert torch.allclose(knowledge.known[1], knowledge.known[7])  # hidden patches: their hull


def test_one_patch_that_is_always_hidden_is_no_longer_open() -> None:
    x = draw(N, P, seed=0)
    spans = [upload_span(with_sum(x, h, seed=s), 0) for s, h in enumerate(([1, 4, 7], [4, 2], [4]))]
    knowledge = combine(spans)
    assert knowledge.hidden.nonzero().flatten().tolist() == [4]
    assert not len(knowledge.basis)
    assert torch.allclose(knowledge.known, x, atol=1e-8)


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
    assert exact.hidden_sum is not None
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


def found_by(width: dict[str, int], setting: str = "a", **model: object) -> torch.Tensor:
    attack = TokenSpan(prior="stationary")
    view, _ = planted_view(planted_model(**width, **model), attack, setting)
    assert sorted(view.updates[0].grads) == sorted((PATCH, QKV))  # no pos_embed
    assert attack.unsupported(view) is None
    found = attack.run(view, generator=torch.Generator())
    assert found.images is not None
    return psnr(found.images, planted_images())


def test_a_frozen_position_table_hides_nothing_from_a_wide_model() -> None:
    assert found_by(ENOUGH).min() > 90


def test_patches_that_are_longer_than_they_are_many_lie_in_a_span_of_their_number() -> None:
    assert found_by({"patch_size": 8, **ENOUGH}).min() > 90


def test_too_few_equations_leave_directions_to_the_prior() -> None:
    reached = found_by({"embed_dim": 96})
    assert reached.max() < 40
    assert reached.mean() > 12


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
    assert inputs.mask is not None
    assert equations.unknown is not None
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
    assert inputs.mask is not None
    x = to_patches(model.normalize(inputs.images), 4)[0]
    visible = ~inputs.mask[0]
    closed = after.complement + (x @ after.basis.mT) @ after.basis
    # A direction that stands out of the noise by little more than MARGIN may be off by 1 / MARGIN.
    assert (closed - x)[visible].norm() < 0.05 * x[visible].norm()


@pytest.mark.parametrize(
    ("model", "client", "reason"),
    [
        ({"first_block": "closed_form", **ENOUGH}, {}, "no LayerNorm"),
        ({"position_embedding": "strict", **ENOUGH}, {}, "no position embeddings"),
        ({"embed_dim": 64}, {}, "N + 3 = 67 unknowns > D = 64: block 0's equations"),
        (ENOUGH, {"batch": 2}, "batch 1 is needed"),
    ],
)
def test_where_it_does_not_apply(
    model: dict[str, object], client: dict[str, int], reason: str
) -> None:
    attack = TokenSpan()
    config = ClientConfig(**client)  # type: ignore[arg-type]
    view, _ = planted_view(planted_model(**model), attack, "a", client=config)
    assert reason in str(attack.unsupported(view))


def test_a_missing_gradient_is_named() -> None:
    view, _ = planted_view(planted_model(**ENOUGH), TokenSpan(), "a")
    grads = {PATCH: view.updates[0].grads[PATCH]}
    lacking = replace(view, updates=[replace(view.updates[0], grads=grads)])
    assert f"no gradient of {QKV}" in str(TokenSpan().unsupported(lacking))


def test_another_norm_in_block_0_is_refused() -> None:
    view, _ = planted_view(planted_model(**ENOUGH), TokenSpan(), "a")
    view.model.blocks[0].norm1 = torch.nn.Identity()
    assert "block 0 has no LayerNorm" in str(TokenSpan().unsupported(view))


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


def test_with_no_equation_to_spare_the_noise_decides() -> None:
    square, right = torch.eye(3).double(), torch.ones(3, 4).double()
    for checked in (right, torch.ones(3, 0).double()):
        assert tokens._trusted(square, checked, told(1e-9, noise=0.04))
        assert not tokens._trusted(square, checked, told(1e-9, noise=0.06))
    out_of_reach = torch.ones(4, 4).double()
    tall = torch.cat([square, torch.zeros(1, 3).double()])
    assert not tokens._trusted(tall, out_of_reach, told(1e-9, noise=0.04))


def test_a_misfit_is_at_least_the_noise_of_a_mean_right_side() -> None:
    matrix = torch.eye(4, 2).double()
    right = torch.tensor([[3.0, 0, 0], [4.0, 6, 0], [0, 0, 0.0], [0, 0, 7.0]]).double()
    found = tokens._misfit(matrix, right, error=1e-3)
    assert found.tolist() == pytest.approx([0.018, 0.018, 7.0])  # 3 · 1e-3 · (5 + 6 + 7) / 3


def test_directions_without_a_singular_value_stay_open() -> None:
    matrix = torch.zeros(3, 3).double()
    matrix[0, 0], matrix[1, 1] = 2.0, 1e-8
    right = torch.tensor([[4.0], [1e-8], [5.0]]).double()
    for error, open_directions in ((0.0, 1), (1e-9, 1), (1e-8, 2)):
        solved, still_open = tokens._solve(matrix, right, error)
        assert len(still_open) == open_directions
        expected = [2.0, 1.0 if open_directions == 1 else 0.0, 0.0]
        assert solved[0].tolist() == pytest.approx(expected)


# attacks that know a defence's noise against the same attacks that do not -------------------------


# At 0.03 some visible rows are weaker than the noise, and nobody can tell them from masked ones.
@pytest.mark.parametrize("defense", [{"gaussian_noise": 0.01}, {"dp_sgd": 0.00003}])
def test_knowing_the_noise_helps(defense: dict[str, float]) -> None:
    attack = find_attack("masked_span", {"prior": "stationary"})
    model = planted_model(unknown_embedding=True)
    view, inputs = planted_view(model, attack, "c")  # type: ignore[arg-type]
    names = [*view.updates[0].grads]
    client = ClientConfig(defenses=(defense,))  # type: ignore[arg-type]
    update = make_upload(model, [inputs], client, names=names)
    scores = {}
    for told in (True, False):
        sent = update if told else replace(update, noise={})
        known = replace(view, updates=[sent])
        found = attack.run(known, generator=torch.Generator())  # type: ignore[call-arg]
        scores[told] = psnr(found.images, planted_images()).mean()  # type: ignore[arg-type]
        assert located(known, sent).equal(inputs.mask) == told  # type: ignore[arg-type]
    assert scores[True] > scores[False] + 1


LEVEL = 0.03


def noisy_uploads(setting: str) -> tuple[NoisyUpload, Tensor, Tensor]:
    """One upload of a planted image, and the patch prior."""
    attack = find_attack("masked_span", {"prior": "stationary"})
    model = planted_model(unknown_embedding=setting != "a")
    view, inputs = planted_view(model, attack, setting)  # type: ignore[arg-type]
    client = ClientConfig(defenses=({"gaussian_noise": LEVEL},))  # type: ignore[arg-type]
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
    view, inputs = planted_view(model, attack, "a")  # type: ignore[arg-type]
    client = ClientConfig(defenses=({"gaussian_noise": LEVEL},))  # type: ignore[arg-type]
    names = [*view.updates[0].grads]
    rounds = range(len(view.updates))
    updates = [make_upload(model, [inputs], client, names=names, round=r) for r in rounds]
    known = replace(view, updates=updates)
    scores = {}
    for passes in (0, noisy_span.PASSES):
        monkeypatch.setattr(noisy_span, "PASSES", passes)
        found = attack.run(known, generator=torch.Generator())  # type: ignore[call-arg]
        scores[passes] = float(psnr(found.images, planted_images()).mean())  # type: ignore[arg-type]
    assert scores[noisy_span.PASSES] > scores[0] + 0.2


@pytest.mark.nightly
@pytest.mark.parametrize("share", [0.01, 0.0001])
@pytest.mark.parametrize("name", ["masked_span", "multi_round", "pixel_lattice"])
def test_an_upload_of_next_to_nothing_gives_a_picture(name: str, share: float) -> None:
    """Fewer directions are left of G than patches are hidden."""
    attack = find_attack(name, {"prior": "stationary"})
    model = planted_model(unknown_embedding=True)
    view, inputs = planted_view(model, attack, "c")  # type: ignore[arg-type]
    client = ClientConfig(defenses=({"top_k": share},))  # type: ignore[arg-type]
    update = make_upload(model, [inputs], client, names=[*view.updates[0].grads])
    known = replace(view, updates=[update] * len(view.updates))
    found = attack.run(known, generator=torch.Generator())  # type: ignore[call-arg]
    assert psnr(found.images, planted_images()).min() > 8  # type: ignore[arg-type]
    if name != "pixel_lattice":
        assert found.diagnostics["open_directions"].isnan().all()


def test_a_leaks_weight_is_told_by_noise_in_the_directions_off_the_rows() -> None:
    upload, _, _ = noisy_uploads("c")
    width, length = upload.total.shape
    free = width - int((~upload.hidden).sum())
    assert 0 < free < width
    error = upload.error
    deviation = (error.total + error.rows * len(upload.hidden) * error.energy) ** 0.5
    edge = deviation * (free**0.5 + length**0.5)
    assert len(upload.leak.basis)
    wanted = 1 - LEAK * (edge / upload.leak.strengths).square()
    assert torch.allclose(upload.leak.weights, wanted, rtol=1e-6)


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


def test_where_no_step_is_possible_the_last_guess_is_the_answer() -> None:
    wanted, guess = torch.ones(5, 2).double(), torch.full((5, 2), 3.0).double()
    for start, expected in ((None, 0.0), (guess, 3.0)):
        found = noisy_span._conjugate_gradients(torch.zeros_like, wanted, lambda x: x, start)
        assert torch.equal(found, torch.full_like(wanted, expected))


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
