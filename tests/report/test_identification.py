"""Whether pictures point to their own image and metrics agree: figures against plain loops."""

import math
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.matching import distances, matched_distances, pointing
from mjp_privacy.metrics.pictures import alexnet_layers
from mjp_privacy.metrics.scores import score
from mjp_privacy.metrics.statistics import Share
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.report.comparisons import identification_table
from tests.helpers.report_rows import (
    add_pictures,
    image_id,
    image_row,
    intact,
    only_line,
    photograph,
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
    text, shown = row[f"{name} first"].split("; ")
    assert text == Share(first, COUNT, trials=4).text()  # of four photographs, two images each
    assert 0 <= mean - float(shown) < 0.001
    assert (row["images"], row["chance"]) == ("8 of 8", "12.5 %; 0.340")  # (1 + 1/2 + … + 1/8) / 8
    psnr = [-10 * math.log10(matched(*pair)) for pair in zip(FOUND, PLAIN, strict=True)]
    assert float(row["PSNR matched"]) == pytest.approx(np.median(psnr), abs=0.005)
    assert row["chance, matched"] == row["chance"]


def test_small_and_large_pictures_are_compared_and_ties_rank_first() -> None:
    assert list(distances(PLAIN[:, :, :28], PLAIN[:, :, :28])) == ["pixels"]
    large = torch.stack([photograph(at, 192) for at in range(2)])
    moved = torch.stack([shuffled(image, PATCH) for image in large])  # a patch becomes 5 × 5
    assert np.diag(matched_distances(moved, large, PATCH)) == pytest.approx([0, 0], abs=1e-12)
    tied = pointing(np.array([[0.1, 0.1], [0.3, 0.2]]), ["a", "b"])
    assert (tied.first.count, tied.reciprocal_rank) == (1, 0.75)
