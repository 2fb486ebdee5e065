"""The real ViT-Ti's position embeddings, and the paper's figures against its own text."""

import re
from pathlib import Path

import pytest

from mjp_privacy.models import load_model
from mjp_privacy.paper.positions import (
    DIMENSIONS,
    PositionTable,
    at,
    ends,
    explained_variance,
    figures_of,
    noise,
    noise_table,
    place_error,
    position_table,
)
from mjp_privacy.paper.positions_report import GRID, PRINTED, WIDTH

MAES = ("mae_1d", "std_1d", "mae_2d", "std_2d")


def test_a_public_vits_table_is_a_grid(shared_data: Path) -> None:
    """ViT-Ti/16: 46.5 % of the variance in 3 dimensions, 20 times the share of noise; a linear map
    misses a patch by .15 rows and columns. The figures were computed with NumPy alone, too."""
    model = load_model(
        "vit_tiny_patch16_224",
        checkpoint=shared_data / "weights" / "vit_tiny_patch16_224_timm.safetensors",
        mean=0.5,
        std=0.5,
    )
    table = position_table(model, "ViT-Ti")
    numbers = figures_of(table).numbers
    shares = [numbers[f"variance_{k}"] for k in DIMENSIONS]
    assert shares == pytest.approx([46.50, 61.13, 71.49, 80.41, 89.09], abs=0.01)
    shares = [numbers[f"energy_{k}"] for k in DIMENSIONS]
    assert shares == pytest.approx([45.96, 60.45, 70.84, 79.67, 88.26], abs=0.01)
    assert numbers["mae_2d"] == pytest.approx(0.144, abs=0.01)
    assert numbers["mae_1d"] == pytest.approx(1.35, abs=0.1)
    assert numbers["neighbour_similarity"] > 0.5 > abs(numbers["other_similarity"]) + 0.2
    low, high = ends(noise(14, 192, seeds=3), "variance_3")
    assert 5 < low < high < 7
    order = list(range(195, -1, -1))
    order[::2], order[1::2] = order[1::2], order[::2]
    other = place_error(PositionTable(14, table.rows[order]), repeats=1)
    assert other["mae_2d"] > 5 * numbers["mae_2d"]


def test_the_printed_tables_are_those_of_the_papers_text(shared_data: Path) -> None:
    """Tables 6 and 8 (the supplement's Table 2), read again from paper and supplement."""
    seeds = sorted((shared_data / "seeds").glob("*.txt"))
    texts = [path.read_text(encoding="utf-8") for path in seeds]
    paper = next(text for text in texts if "Projected Dimension" in text)
    supplement = next(text for text in texts if "Supplementary Materials" in text)
    deit, mjp, linear = PRINTED
    for name, published in (("Deit-S EV (%)", deit), ("DeiT-S+MJP EV (%)", mjp)):
        line = next(line for line in paper.splitlines() if name in line)
        assert tuple(map(float, re.findall(r"\d+\.\d+", line))) == tuple(published["variance"])
    for name, published in (("DeiT-S [7]", deit), ("NLN)", mjp), ("- LN)", linear)):
        line = next(
            line for line in supplement.splitlines() if line.count("pm") == 2 and name in line
        )
        assert [float(number) for number in re.findall(r"\d*\.\d+", line)] == [
            published[name] for name in MAES
        ]


def test_the_printed_figures_are_possible() -> None:
    """Each further dimension holds less than the one before; a number is 14 rows and a column."""
    of_noise = at(explained_variance(noise_table(GRID, WIDTH, seed=0)), 3)
    assert (GRID, WIDTH) == (14, 384)
    assert of_noise == pytest.approx(0.042, abs=0.002)  # what a caveat says
    for published in PRINTED:
        if (variance := published["variance"]) is not None:
            first, *others = variance
            more = [b - a for a, b in zip(variance, others, strict=False)]
            assert [first / 3, *more] == sorted([first / 3, *more], reverse=True)
            assert variance[-1] < 100
        both = 2 * published["mae_2d"]  # of row and column together, at most 14 times one of them
        assert published["mae_2d"] <= published["mae_1d"] <= 14 * both
