"""Pruning and NVFlare's percentile filter against NumPy, and what they know of their error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.compression import PercentilePrivacy
from mjp_privacy.client.defenses.disturbance import Draws
from mjp_privacy.client.upload import make_upload
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from tests.helpers.models import some_images, some_labels, some_masks
from tests.helpers.models import tiny as tiny_model

MODEL = tiny_model(unknown_embedding=True)
INPUTS = ClientInput(
    some_images(4), some_labels(4), tuple(f"image {i}" for i in range(4)), some_masks(4)
)


def sent(*defenses: Any, **client: Any) -> ClientUpdate:
    config = ClientConfig(defenses=defenses, **client)
    return make_upload(MODEL, [INPUTS] * config.steps, config)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_prune_keeps_the_largest_of_each_tensor(share: float) -> None:
    clean, update = sent(), sent({"prune": share})
    for name, g in clean.grads.items():
        for one, few in zip(g.flatten(1).numpy(), update.grads[name].flatten(1), strict=True):
            kept = max(1, round(share * one.size))
            least = np.sort(np.abs(one))[-kept]
            assert np.array_equal(few.numpy(), np.where(np.abs(one) >= least, one, 0.0))
    name = "blocks.0.attn.qkv.weight"
    least = update.grads[name].flatten(1).abs().masked_fill(update.grads[name].flatten(1) == 0, 9)
    dropped = (update.grads[name] == 0).flatten(1).double().mean(1)
    expected = least.amin(1) * (dropped / 3).sqrt()  # uniform below the smallest that was kept
    torch.testing.assert_close(update.rounding[name], expected)


def filtered(update: dict[str, Any], steps: int, percentile: float, gamma: float) -> dict[str, Any]:
    """NVFlare's PercentilePrivacy, written down in NumPy from its description."""
    per_step = {name: array / steps for name, array in update.items()}
    sizes = np.concatenate([np.abs(array).ravel() for array in per_step.values()])
    cutoff = np.percentile(sizes, percentile)
    kept = {name: np.where(np.abs(x) < cutoff, 0.0, x) for name, x in per_step.items()}
    return {name: steps * np.clip(x, -gamma, gamma) for name, x in kept.items()}


@pytest.mark.parametrize(
    ("percentile", "gamma"), [(10, 0.01), (0, 0.002), (50, 1e-4), (99.9, 1), (33.3, 0.05)]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_percentile_privacy_does_what_nvflares_filter_does(
    percentile: float, gamma: float, steps: int
) -> None:
    client: dict[str, Any] = {"upload": "weight_difference", "steps": steps} if steps > 1 else {}
    defense = {"percentile_privacy": {"percentile": percentile, "gamma": gamma}}
    clean, update = sent(**client), sent(defense, **client)
    for place in range(4):
        expected = filtered(
            {name: g[place].numpy() for name, g in clean.grads.items()}, steps, percentile, gamma
        )
        for name, array in expected.items():
            np.testing.assert_allclose(update.grads[name][place].numpy(), array, rtol=1e-12)


def test_percentile_privacy_leaves_single_numbers_alone_and_says_what_it_cannot_know() -> None:
    numbers = torch.linspace(-0.5001, 0.5001, 10_001, dtype=torch.float64).expand(2, 10_001)
    given = {
        "scale": torch.tensor([5.0, 6.0]),
        "weight": numbers,
        "half": 2 * numbers,
        "bias": numbers[:, -20:] + 1,
    }
    draws = Draws(0, ["a", "b"], 0)
    filter_ = PercentilePrivacy(percentile=10, gamma=0.5)
    altered = filter_.apply(given, draws)
    assert altered.sent["scale"].equal(given["scale"])
    assert {name: known.tolist() for name, known in altered.unknown.items()} == {
        "weight": [False, False],  # 4 of 10,001 entries were cut
        "half": [True, True],
        "bias": [True, True],  # all of it was cut
    }
    assert altered.undeclared(given)["bias"].tolist() == [True, True]
    assert not altered.undeclared(given)["weight"].any()
    loud = filter_.apply({"weight": 100 * given["weight"]}, draws)
    assert loud.unknown["weight"].tolist() == [True, True]  # nothing is left below gamma
    exponential = -torch.rand(1, 100_000, dtype=torch.float64).log() * 0.2
    altered = filter_.apply({"weight": exponential}, Draws(0, ["a"], 0))
    error = (altered.sent["weight"] - exponential).square().mean().sqrt()
    assert float(altered.rounding["weight"] / error) == pytest.approx(1, rel=0.05)


def test_a_cut_of_entries_is_no_clip_of_examples() -> None:
    """`clipped` says that a whole example was scaled, which is another thing to solve for."""
    assert not sent({"percentile_privacy": 10}).clipped
    assert sent({"dp_sgd": 0}).clipped
