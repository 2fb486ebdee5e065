"""Epsilon against the Gaussian mechanism's own formula and a value of the accountant's authors."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from mjp_privacy.client.defenses.noise import epsilon
from mjp_privacy.core.errors import UserError

needs_opacus = pytest.mark.skipif(
    importlib.util.find_spec("opacus") is None, reason="needs Opacus: pip install .[dp]"
)


def analytic_gaussian(sigma: float, delta: float) -> float:
    """Balle and Wang 2018, theorem 8: sensitivity 1, one release."""

    def excess(eps: float) -> float:
        above = norm.cdf(0.5 / sigma - eps * sigma)
        below = norm.logcdf(-0.5 / sigma - eps * sigma)
        return float(above - math.exp(eps + below) - delta)

    return float(brentq(excess, 0.0, 200.0))


@needs_opacus
@pytest.mark.parametrize("sigma", [0.8, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("steps", [1, 9])
def test_full_batches_are_the_gaussian_mechanism(sigma: float, steps: int) -> None:
    """Steps compose to one of sigma / sqrt(steps), exactly."""
    exact = analytic_gaussian(sigma / math.sqrt(steps), 1e-5)
    tight = epsilon(sigma, sampling_rate=1.0, steps=steps)
    loose = epsilon(sigma, sampling_rate=1.0, steps=steps, accountant="rdp")
    assert exact <= tight <= exact + 0.02
    assert exact <= loose <= 1.25 * exact + 0.1


@needs_opacus
def test_a_sampled_mechanism_agrees_with_the_tutorial_of_the_rdp_accountant() -> None:
    """TensorFlow Privacy's MNIST table: q = 256 / 60000, sigma 1.1, 60 epochs, eps 3.01 by the
    conversion from RDP of that time, which is looser than today's."""
    found = epsilon(1.1, sampling_rate=256 / 60000, steps=60 * 60000 // 256, accountant="rdp")
    assert 2.5 < found < 3.01
    tight = epsilon(1.1, sampling_rate=256 / 60000, steps=60 * 60000 // 256)
    assert 0.8 * found < tight < found


@pytest.mark.parametrize(
    "wrong", [{"noise": -1}, {"sampling_rate": 0}, {"steps": 0}, {"delta": 1}, {"accountant": "rd"}]
)
def test_mistakes_are_named(wrong: dict[str, object]) -> None:
    known: dict[str, object] = {"noise": 1.0, "sampling_rate": 0.1, "steps": 1} | wrong
    with pytest.raises(UserError, match=r"expected a noise of 0|Did you mean rdp\?"):
        epsilon(known.pop("noise"), **known)  # type: ignore[arg-type]
    assert epsilon(0.0, sampling_rate=1.0, steps=1) == math.inf


def test_without_opacus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(UserError, match=r"pip install \.\[dp\]"):
        epsilon(1.0, sampling_rate=0.1, steps=1)
