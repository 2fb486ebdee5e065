"""Block 0's equations: exact without the position table's gradient where there are enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attacks.equations import PATCH, QKV, tokens
from attacks.equations.patch_system import patch_system
from attacks.equations.span import upload_span
from attacks.equations.tokens import TokenEquations, refine, token_equations
from attacks.masked_span import TokenSpan
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

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
