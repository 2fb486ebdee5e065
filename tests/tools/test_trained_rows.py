"""Tables 3 and 4 as trained here: the noise of seeds, and the shipped configs against one another.
The tables themselves are those of results/ablations (test_publish.py)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mjp_privacy.experiment.config import expand, load_experiment
from mjp_privacy.training.config import load_training
from tools.trained_rows import printed_rows, seed_noise

CONFIGS = Path(__file__).parents[2] / "configs"
SEEDS = (0, 1)


def test_the_noise_of_seeds_is_that_of_a_table_without_repetition() -> None:
    """Rows and seeds have effects of their own; what is left over has this deviation."""
    values = np.array([[1.0, 2.5], [4.0, 5.0], [7.0, 8.5]])
    left = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    deviation, freedom, single = seed_noise(values)
    assert freedom == 2
    assert deviation == pytest.approx(math.sqrt((left**2).sum() / 2))
    assert single == pytest.approx(4.3027 * deviation * math.sqrt(2), rel=1e-4)
    assert seed_noise(values + np.array([0.0, 9.0]))[0] == pytest.approx(deviation)
    assert math.isnan(seed_noise(values[:1])[0])


def test_every_printed_row_can_be_trained_and_is_attacked_as_it_trains() -> None:
    experiment = load_experiment(CONFIGS / "ladder_ablations.yaml")
    names = {**printed_rows(4), **printed_rows(3)}
    assert {*experiment.models} == {f"{name}_{seed}" for name in names for seed in SEEDS}
    for name in names:
        recipe = load_training(CONFIGS / "training" / "ablations.yaml", name)
        cells = [cell for cell in expand(experiment) if cell.model in (f"{name}_0", f"{name}_1")]
        shuffles = recipe.jigsaw.shuffle != "none" and recipe.jigsaw.gamma > 0
        everything = recipe.jigsaw.shuffle == "patches_and_pixels"
        gamma = 1.0 if everything else recipe.jigsaw.gamma if shuffles else 0.0
        assert {cell.gamma for cell in cells} == {gamma}, name
        assert ("c" in {cell.setting for cell in cells}) == shuffles, name
        assert {cell.client.dal for cell in cells} == {recipe.model.dal != "none"}, name
        unmasked = shuffles and not recipe.model.unknown_embedding
        assert ("b" in {cell.setting for cell in cells}) == unmasked, name
