"""Small matrices in parallel: every index once, one thread each, errors are not lost."""

from collections.abc import Iterator

import pytest
import torch

from attacks.equations.least_squares import for_each_in_threads


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
