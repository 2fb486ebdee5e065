"""The block-wise mask against statistics of the authors' generator (4000 masks a ratio)."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mjp_privacy.models.jigsaw import blockwise_mask, draw_masks

GRID = 14
CELLS = slice(5, 9)
RATIOS = ("0.03", "0.09", "0.15", "0.21", "0.27", "0.5", "0.9")


@pytest.fixture(scope="module")
def reference(shared_data: Path) -> dict[str, dict[str, float]]:
    text = (shared_data / "reference" / "blockwise_mask_stats.json").read_text()
    return json.loads(text)["stats"]


def statistics(masks: Tensor) -> dict[str, float]:
    """Of masks (n, N), under the reference file's names."""
    counts = masks.sum(-1).double()
    occupancy = masks.double().mean(0).reshape(GRID, GRID)
    return {
        "mean": counts.mean().item(),
        "std": counts.std(correction=0).item(),
        "min": counts.min().item(),
        "max": counts.max().item(),
        "zero_share": (counts == 0).double().mean().item(),
        "centre_occupancy": occupancy[CELLS, CELLS].mean().item(),
        "corner_occupancy": occupancy[[0, 0, -1, -1], [0, -1, 0, -1]].mean().item(),
    }


def generated(gamma: float, number: int, seed: int) -> Tensor:
    """Masks of one generator, drawn one after the other as the authors do."""
    rng = random.Random(seed)
    return torch.stack([blockwise_mask(GRID, gamma, rng) for _ in range(number)])


def derived(gamma: float, number: int) -> Tensor:
    """Masks as the clients draw them: a stream of its own for every image."""
    ids = [f"image-{i}" for i in range(number)]
    return draw_masks(ids, grid=GRID, gamma=gamma, round=0, seed=0)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_generator_gives_the_authors_masks(
    reference: dict[str, dict[str, float]], ratio: str
) -> None:
    assert set(reference) == set(RATIOS)
    found = statistics(generated(float(ratio), 4000, seed=0))
    assert reference[ratio]["target"] == int(GRID * GRID * float(ratio))
    for name, value in found.items():
        assert value == pytest.approx(reference[ratio][name], abs=1e-5, rel=0), name


def test_the_images_own_masks_follow_the_authors_at_27_percent(
    reference: dict[str, dict[str, float]],
) -> None:
    found = statistics(derived(0.27, 20000))
    assert found["mean"] == pytest.approx(reference["0.27"]["mean"], rel=0.01)
    for name in ("zero_share", "centre_occupancy", "corner_occupancy"):
        assert found[name] == pytest.approx(reference["0.27"][name], abs=0.02), name


@pytest.mark.nightly
def test_the_images_own_masks_follow_the_authors_at_3_percent(
    reference: dict[str, dict[str, float]],
) -> None:
    """The mean is compared with a large sample of the exact generator, not with the file.

    The file is itself a sample of 4000: at a standard deviation of 1.67 its mean 3.854 has a
    standard error of 0.7 %, and it lies 1.2 % above the generator's own mean of about 3.80. A
    tolerance of 1 % around it would test that sample's luck. The shares are within 0.02 of the
    file's.
    """
    found = statistics(derived(0.03, 40000))
    exact = statistics(generated(0.03, 40000, seed=1))
    assert found["mean"] == pytest.approx(exact["mean"], rel=0.01)
    for name in ("zero_share", "centre_occupancy", "corner_occupancy"):
        assert found[name] == pytest.approx(reference["0.03"][name], abs=0.02), name
