"""The posterior in its diagonal form against dense Gaussian conditioning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.prior.gaussian import PatchPrior, noise_variance, posterior_patches

N, D, P, K = 3, 7, 5, 4


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A (N, D), W (K, p), mean (p,), covariance (p, p)."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    root = draw(P, P)
    return draw(N, D), draw(K, P), draw(P), root @ root.mT


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("noise", [1e-6, 0.1, 10.0])
def test_it_is_the_conditional_mean(embedded: bool, noise: float) -> None:
    rows, weight, mean, covariance = problem()
    weight = weight if embedded else torch.eye(P, dtype=torch.float64)
    total = torch.randn(D, len(weight), generator=torch.Generator().manual_seed(5)).double()
    prior = PatchPrior(mean, covariance, weight if embedded else None)
    found, values = posterior_patches(rows[None], total[None], prior, torch.tensor([noise]))
    # vec of X row by row: Y = (A^T kron W) vec(X)
    operator = np.kron(rows.mT.numpy(), weight.numpy())
    sigma = np.kron(np.eye(N), covariance.numpy())
    centre = np.tile(mean.numpy(), N)
    gain = sigma @ operator.T
    inverse = np.linalg.inv(operator @ gain + noise * np.eye(len(operator)))
    expected = centre + gain @ inverse @ (total.numpy().ravel() - operator @ centre)
    assert np.allclose(found[0].numpy().ravel(), expected, atol=1e-7)
    assert torch.allclose(values[0], torch.linalg.svdvals(rows))


def test_without_noise_an_invertible_system_is_solved() -> None:
    rows, _, mean, covariance = problem()
    x = torch.randn(N, P, generator=torch.Generator().manual_seed(2)).double()
    prior = PatchPrior(mean, covariance)
    found, _ = posterior_patches(rows[None], (rows.mT @ x)[None], prior, torch.zeros(1))
    assert torch.allclose(found[0], x, atol=1e-8)


def test_a_row_that_is_zero_gets_the_prior_mean() -> None:
    rows, _, mean, covariance = problem()
    rows[1] = 0
    total = rows.mT @ torch.ones(N, P, dtype=torch.float64)
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
