"""The clock of an attack's budget: whose time is spent, and what stops what does not look."""

from __future__ import annotations

import time

import pytest
import torch

from attacks.budget import OverBudget, image, limited, spent


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_without_a_budget_nothing_is_spent() -> None:
    with image(0):
        busy(0.01)
        assert not spent()


def test_each_image_has_its_own_time_over_all_pieces_of_work() -> None:
    with limited(0.05, images=3) as budget:
        for place in (0, 1, 2):
            with image(place):
                busy(0.03)
                assert not spent()
        with image(1):
            busy(0.03)
            assert spent()
        with image(2):
            assert not spent()
    assert budget.cut == {1}


def test_a_sleeping_process_uses_none_of_it() -> None:
    with limited(0.05), image(0):
        time.sleep(0.2)
        assert not spent()


def test_outside_of_its_images_a_call_has_the_time_of_all() -> None:
    with limited(0.02, images=2) as budget:
        busy(0.03)
        assert not spent()
        busy(0.02)
        assert spent()
    assert budget.cut == {0, 1}


def for_ever() -> None:
    while True:
        torch.ones(10).sum()


def test_torch_stops_what_does_not_look() -> None:
    began = time.thread_time()
    with pytest.raises(OverBudget, match=r"over budget: attack\.seconds = 0\.1"), limited(0.1):
        for_ever()
    assert time.thread_time() - began < 0.2


def test_gradients_are_the_same_under_a_budget() -> None:
    def gradient() -> torch.Tensor:
        x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
        return torch.func.vmap(torch.func.grad(lambda row: (row.sin() ** 2).sum()))(x)

    with limited(10.0):
        assert gradient().equal(gradient())
        inside = gradient()
    assert inside.equal(gradient())
