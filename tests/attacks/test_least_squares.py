"""The batched least-squares solver against LAPACK's gelsd, where rows are zero or dependent."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attacks.equations.least_squares import (
    condition_and_rank,
    for_each_in_threads,
    minimum_norm_solve,
    pseudo_inverse,
)


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


@pytest.mark.parametrize("transposed", [False, True])
def test_what_counts_as_zero_grows_with_the_longer_side(transposed: bool) -> None:
    """Of 2 x 1000, singular values 1 and 100 eps: gelsd's bound is 1000 eps."""
    matrix = torch.zeros(2, 1000).double()
    matrix[0, 0], matrix[1, 1] = 1.0, 100 * EPS
    matrix = matrix.mT if transposed else matrix
    inverse = pseudo_inverse(matrix)
    assert inverse.sum() == pytest.approx(1.0)
    matrix[1, 1] = 2000 * EPS
    assert pseudo_inverse(matrix).max() == pytest.approx(1 / (2000 * EPS))


@pytest.mark.parametrize(("small", "counts"), [(0.5, False), (1.0, False), (2.0, True)])
def test_a_singular_value_must_exceed_the_bound(small: float, counts: bool) -> None:
    a = torch.diag(torch.tensor([1.0, small * 4 * EPS, 1.0, 1.0]).double())[None]
    z, _ = minimum_norm_solve(a, torch.ones(1, 4, 1).double())
    assert z[0, :, 0].tolist() == pytest.approx(
        [1.0, 1 / (small * 4 * EPS) if counts else 0.0, 1.0, 1.0]
    )


# one matrix a thread -----------------------------------------------------------------------------


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", [0, 1, 8])
def test_every_index_once_with_one_thread_each(threads: int, number: int) -> None:
    seen: list[tuple[int, int]] = []
    for_each_in_threads(lambda index: seen.append((index, torch.get_num_threads())), number)
    assert sorted(seen) == [(index, 1) for index in range(number)]
    assert torch.get_num_threads() == threads


def test_an_error_comes_out_and_the_threads_come_back(threads: int) -> None:
    def fails(index: int) -> None:
        if index == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        for_each_in_threads(fails, 4)
    assert torch.get_num_threads() == threads
