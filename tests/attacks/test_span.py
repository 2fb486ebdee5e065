"""The span of hidden patches: planted systems, one upload and several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.equations.patch_system import PatchSystem
from attacks.equations.span import ABOVE_NOISE, Knowledge, combine, noise_edge, upload_span

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
