"""Whether pictures point to their own image and metrics agree: figures against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.matching import distances, matched_distances, pointing, shrink
from mjp_privacy.metrics.pictures import alexnet_layers
from mjp_privacy.metrics.scores import score
from mjp_privacy.metrics.statistics import DASH
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.report.comparisons import agreement_table, identification_table
from tests.helpers.report_rows import (
    add_pictures,
    as_many,
    image_id,
    image_row,
    intact,
    only_line,
    photograph,
    score_interval,
    shuffled,
    write_rows,
)

COUNT, SIDE, PATCH = 8, 32, 16
PLAIN = torch.stack([photograph(index, SIDE) for index in range(COUNT)])
NOISE = torch.randn(PLAIN.shape, generator=torch.Generator().manual_seed(0))
FOUND = (torch.stack([shuffled(image, PATCH) for image in PLAIN]) + 0.6 * NOISE).clamp(0, 1)
PHOTOGRAPHS = [f"photograph {at // 2}" for at in range(COUNT)]
PSNR = [10.0, 12.0, 12.0, math.inf, 30.0, 8.0, math.inf, 20.0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identification")
    store, entry = RunStore(folder), intact("masked_span", setting="c", gamma=0.27)
    store.write_cells([entry])
    ids = [image_id(at) for at in range(COUNT)]
    ssim = [0.3, 0.2, 0.2, 0.9, 0.8, 0.4, 0.7, 0.1]
    rows = [
        image_row(name, PSNR[at], group=PHOTOGRAPHS[at], ssim=ssim[at], fft2d=0.5)
        for at, name in enumerate(ids)
    ]
    write_rows(store, entry, rows)
    mask = torch.tensor([True, True, False, False]).repeat(COUNT, 1)
    tensors = {"images": FOUND, "plain": PLAIN, "target": PLAIN, "input": PLAIN, "mask": mask}
    add_pictures(store, entry["run_id"], tensors, ids)
    return folder


def pixels(found: Tensor, known: Tensor) -> float:
    return float((found.double() - known.double()).square().mean())


def lpips(found: Tensor, known: Tensor) -> float:
    return float(score(found[None], known[None], ["lpips/standard"])["lpips", "standard"][0])


def features(found: Tensor, known: Tensor) -> float:
    first, second = (list(alexnet_layers(x[None]))[-1][0].double().mean(0) for x in (found, known))
    return 1 - float(first @ second / (first.norm() * second.norm()))


def matched(found: Tensor, known: Tensor) -> float:
    """Of all orders of four patches the best."""
    patches, own = (to_patches(x[None].double(), PATCH)[0] for x in (found, known))
    orders = permutations(range(len(own)))
    return min(float((patches[list(order)] - own).square().mean()) for order in orders)


DISTANCES: dict[str, Callable[[Tensor, Tensor], float]] = {
    **{"pixels": pixels, "LPIPS": lpips, "features": features, "patches matched": matched}
}


@pytest.mark.parametrize("name", DISTANCES)
def test_firsts_and_ranks_are_those_of_plain_loops(run: Path, name: str) -> None:
    table = identification_table([("a line", only_line(run))])
    assert table is not None
    (row,) = (dict(zip(table.header, cells, strict=True)) for cells in table.rows)
    of = DISTANCES[name]
    full = np.array([[of(found, known) for known in PLAIN] for found in FOUND])
    ranks = [int((full[at] <= full[at, at]).sum()) for at in range(COUNT)]
    first, mean = ranks.count(1), np.mean(1 / np.array(ranks))
    low, high = score_interval(first / COUNT, as_many(PHOTOGRAPHS))
    text, shown = row[f"{name} first"].split("; ")
    share = f"{100 * first / COUNT:.0f} %, {100 * low:.0f}–{100 * high:.0f}"
    assert text == f"{first} of {COUNT} ({share})"
    assert 0 <= mean - float(shown) < 0.001
    assert (row["images"], row["chance"]) == ("8 of 8", "12.5 %; 0.340")  # (1 + 1/2 + … + 1/8) / 8
    psnr = [-10 * math.log10(matched(*pair)) for pair in zip(FOUND, PLAIN, strict=True)]
    assert float(row["PSNR matched"]) == pytest.approx(np.median(psnr), abs=0.005)
    assert row["chance, matched"] == row["chance"]


def test_distances_are_those_of_plain_loops_and_ties_rank_first() -> None:
    found = distances(FOUND, PLAIN)
    of_pair = {name: DISTANCES[name](FOUND[1], PLAIN[2]) for name in found}
    assert found["pixels"][1, 2] == pytest.approx(of_pair["pixels"])
    assert found["LPIPS"][1, 2] == pytest.approx(of_pair["LPIPS"], rel=1e-4)
    assert found["features"][1, 2] == pytest.approx(2 * of_pair["features"], rel=1e-4)
    assert list(distances(shrink(PLAIN[:, :, :28]), PLAIN[:, :, :28])) == ["pixels"]
    large = torch.stack([photograph(at, 192) for at in range(2)])
    torch.testing.assert_close(shrink(large), torch.nn.functional.avg_pool2d(large, 3))
    moved = torch.stack([shuffled(image, PATCH) for image in large])  # a patch becomes 5 × 5
    assert np.diag(matched_distances(moved, large, PATCH)) == pytest.approx([0, 0], abs=1e-12)
    tied = pointing(np.array([[0.1, 0.1], [0.3, 0.2]]), ["a", "b"])
    assert (tied.first.count, tied.reciprocal_rank) == (1, 0.75)


def test_metrics_agree_as_scipy_says(run: Path) -> None:
    line = only_line(run)
    table = agreement_table(line)
    assert table is not None
    assert table.header == ("", "PSNR", "SSIM", "LPIPS", "MSE", "FFT2D")
    assert "over 8 images of line 1" in table.caption
    psnr, ssim = (line.scored(name, "standard").to_numpy() for name in ("psnr", "ssim"))
    assert float(table.rows[0][2]) == pytest.approx(scipy.stats.spearmanr(psnr, ssim)[0], abs=0.005)
    pairs = [(i, j) for i in range(COUNT) for j in range(i)]
    signs = [np.sign([float(psnr[i] > psnr[j]) - (psnr[i] < psnr[j]), ssim[i] - ssim[j]])
             for i, j in pairs]  # fmt: skip
    untied = np.prod([sum(one[side] != 0 for one in signs) for side in (0, 1)])
    tau = sum(one[0] * one[1] for one in signs) / math.sqrt(untied)
    assert float(table.rows[1][1]) == pytest.approx(tau, abs=0.005)
    assert (table.rows[0][4], table.rows[3][1], table.rows[0][5]) == ("1", "1", DASH)
