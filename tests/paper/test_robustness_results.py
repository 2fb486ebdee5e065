"""results/robustness: its figures follow from the per-image counts, its tables from its figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mjp_privacy.paper.corruptions import CORRUPTIONS
from mjp_privacy.paper.robustness_scores import NORMALISED, UNNORMALISED, mce_of_images

FOLDER = Path(__file__).resolve().parents[2] / "results" / "robustness"


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return pd.read_csv(FOLDER / "robustness.csv")


@pytest.fixture(scope="module")
def shares(table: pd.DataFrame) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By model, each image's share in the two mCE, from how many severities it was wrong at."""
    counts = pd.read_csv(FOLDER / "per_image.csv")
    by_model = {str(name): group for name, group in counts.groupby("model", sort=False)}
    assert list(by_model) == list(table["model"].unique())
    names = [sorted(group["image_id"]) for group in by_model.values()]
    assert all(others == names[0] for others in names)
    return {
        model: mce_of_images({n: 20 * group[n].to_numpy(dtype=float) for n in CORRUPTIONS})
        for model, group in ((m, g.sort_values("image_id")) for m, g in by_model.items())
    }


def test_means_follow_from_the_counts(
    table: pd.DataFrame, shares: dict[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    counts = pd.read_csv(FOLDER / "per_image.csv")
    for model, group in counts.groupby("model"):
        of_model = table[table["model"] == model]
        for name in CORRUPTIONS:
            rows = of_model[of_model["corruption"] == name].set_index("measure")
            expected = 20 * group[name].mean()
            assert rows.loc["mean error", "percent"] == pytest.approx(expected)
            assert rows.loc[["error"], "percent"].mean() == pytest.approx(expected)
            assert rows.loc["mean error", "n"] == len(group)
    for model, both in shares.items():
        figures = table[table["model"] == model].set_index("measure")["percent"]
        for measure, values in zip((UNNORMALISED, NORMALISED), both, strict=True):
            assert figures[measure] == pytest.approx(values.mean())
            for other, of_other in shares.items():
                name = f"{measure}, difference to {other}"
                if name in figures:
                    theirs = of_other[0 if measure == UNNORMALISED else 1]
                    assert figures[name] == pytest.approx((values - theirs).mean())
