"""What the authors' code and others computed elsewhere: logits, masks and scores; the accuracy of
public weights, their position embeddings, and the figures that are printed."""

import io
import json
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from mjp_privacy.data import open_images, spread_subset
from mjp_privacy.metrics.scores import score
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.jigsaw import Grid, blockwise_mask
from mjp_privacy.paper.positions import (
    DIMENSIONS,
    PositionTable,
    at,
    cumulative_shares,
    figures_of,
    noise_table,
    place_error,
    position_table,
)
from mjp_privacy.paper.positions_report import PRINTED
from mjp_privacy.training.evaluation import Protocol, measure
from tests.helpers.night import by_day

# a tiny model in the authors' layout, with their code's logits and localization outputs -----------


ARCHITECTURE: dict[str, Any] = {
    "img_size": 64,
    "patch_size": 16,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 10,
}
NORMALISATION = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="module")
def path(shared_data: Path) -> Path:
    return shared_data / "reference" / "official_layout_tiny.safetensors"


@pytest.fixture(scope="module")
def stored(path: Path) -> dict[str, Tensor]:
    found = load_file(path)
    return {name.removeprefix("io."): t for name, t in found.items() if name.startswith("io.")}


@pytest.fixture(scope="module", params=["safetensors", "pth", "model. in pth"])
def model(request: pytest.FixtureRequest, path: Path, tmp_path_factory: Any) -> LoadedModel:
    """The file itself, and its weights as the authors' trainer would have saved them."""
    if request.param != "safetensors":
        weights = {n: t for n, t in load_file(path).items() if n.startswith("model.")}
        if request.param == "pth":
            bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
            weights = {"model": bare, "epoch": 299, "max_accuracy": 80.5}
        path = tmp_path_factory.mktemp("official") / "weights.pth"
        torch.save(weights, path)
    return load_model(checkpoint=path, **ARCHITECTURE, **NORMALISATION)


def test_the_report(model: LoadedModel, path: Path) -> None:
    report = model.card.checkpoint
    assert report.layout == "official_mjp"
    assert report.missing == report.unexpected == report.notes == ()
    assert (model.dal_kind, model.unk_embed is not None) == ("nonlinear", True)
    assert model.card.architecture == "vit d48 l2 h3 p16@64"
    if report.source == path.name:
        assert [name[:3] for name in report.beside] == ["io."] * 7


def assert_within(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5


def test_the_logits(model: LoadedModel, stored: dict[str, Tensor]) -> None:
    with torch.no_grad():
        assert_within(model(stored["plain"]), stored["logits_plain"])
        mask = stored["mask_with_cls"][:, 1:].bool()  # the authors' mask counts the class token
        assert not stored["mask_with_cls"][:, 0].any()
        for form in (mask, mask[0], mask.expand(2, -1)):
            assert_within(model(stored["shuffled"], mask=form), stored["logits_shuffled"])
        unmasked = model(stored["shuffled"])
        assert (unmasked - stored["logits_shuffled"]).abs().max() > 1e-3  # the mask does matter


def test_the_localization(model: LoadedModel, stored: dict[str, Tensor]) -> None:
    mask = stored["mask_with_cls"][:, 1:].bool()
    with torch.no_grad():
        for given, expected in ((mask, slice(None)), (mask[0], 0)):
            target, prediction, visible = model.localize(given)
            for found, name in ((target, "dal_target"), (prediction, "dal_pred")):
                rows = found.expand_as(prediction)[visible]
                assert_within(rows, stored[name][expected].reshape(rows.shape))
        expected = (stored["dal_target"] - stored["dal_pred"]).abs().mean()
        assert_within(model.dal_loss(mask), expected)


# the block-wise mask against statistics of the authors' generator, 4000 masks a ratio -------------


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


@pytest.mark.parametrize("ratio", by_day(RATIOS, {4}))
def test_the_generator_gives_the_authors_masks(
    reference: dict[str, dict[str, float]], ratio: str
) -> None:
    """Drawn one after the other, as they do; each image's own are pinned in tests/models."""
    assert set(reference) == set(RATIOS)
    rng, grid = random.Random(0), Grid(GRID, GRID)
    masks = torch.stack([blockwise_mask(grid, float(ratio), rng) for _ in range(4000)])
    found = statistics(masks)
    assert reference[ratio]["target"] == int(GRID * GRID * float(ratio))
    for name, value in found.items():
        assert value == pytest.approx(reference[ratio][name], abs=1e-5, rel=0), name


# eight image pairs scored by the paper's own definitions ------------------------------------------


TOLERANCES = {"mse": 1e-6, "psnr": 1e-3, "ssim": 1e-4, "fft2d": 1e-6, "lpips": 5e-4}


@pytest.fixture(scope="module")
def expected(shared_data: Path) -> dict[str, dict[str, float]]:
    text = (shared_data / "reference" / "metric_pairs.json").read_text(encoding="utf-8")
    return json.loads(text)["scores"]


@pytest.fixture(scope="module")
def computed(shared_data: Path, expected: dict) -> dict:
    with zipfile.ZipFile(shared_data / "reference" / "metric_pairs.zip") as archive:

        def read(folder: str) -> np.ndarray:
            files = [io.BytesIO(archive.read(f"{folder}/{name}")) for name in expected]
            pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
            return pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255

        return score(read("reconstruction"), read("reference"))


@pytest.mark.parametrize("metric", TOLERANCES)
def test_paper_variant_gives_the_recorded_scores(metric: str, computed, expected) -> None:
    wanted = np.array([scores[metric] for scores in expected.values()])
    assert len(wanted) == 8
    np.testing.assert_allclose(computed[metric, "paper"], wanted, rtol=0, atol=TOLERANCES[metric])


# accuracy of a public ViT, and of the zoo on data it never saw ------------------------------------


def public_vit(folder: Path) -> LoadedModel:
    weights = folder / "weights" / "vit_tiny_patch16_224_timm.safetensors"
    return load_model("vit_tiny_patch16_224", checkpoint=weights, mean=0.5, std=0.5)


@pytest.mark.nightly
def test_a_public_vit_has_its_known_accuracy(shared_data: Path) -> None:
    """ViT-Ti/16 on 600 ImageNet images: 0.83 ± 0.03 top-1; shuffled, it often changes its mind."""
    model = public_vit(shared_data)
    source = open_images(shared_data / "data" / "imagenet-sample-600.zip")
    rows = measure(model, source, source.records, Protocol(gammas=(0.27,)))
    assert len(rows) == 600
    assert rows["top1"].astype(float).mean() == pytest.approx(0.83, abs=0.03)
    assert rows["top5"].astype(float).mean() > 0.93
    assert 0.6 < rows["consistency"].mean() < 0.95


@pytest.mark.nightly
@pytest.mark.parametrize("row", ["vit", "vit_no_pe", "vit_mjp", "vit_closed_form"])
def test_the_zoo_is_as_accurate_as_its_files_say(shared_data: Path, row: str) -> None:
    """On 800 of CIFAR-10's 10,000 test images: within three standard errors."""
    model = load_model(f"cifar_{row}")
    said = json.loads(read_metadata(f"packaged:cifar_{row}")["val_top1"]) / 100
    source = open_images(shared_data / "data" / "cifar10-test.zip")
    rows = measure(model, source, spread_subset(source.records, 800, 0), Protocol(gammas=(0.27,)))
    found = rows["top1"].astype(float).mean()
    assert found == pytest.approx(said, abs=3 * (said * (1 - said) / 800) ** 0.5)
    if row == "vit_no_pe":
        assert (rows["consistency"] == 1).all()


# the real ViT-Ti's position embeddings, and the paper's figures against its own text --------------


MAES = ("mae_1d", "std_1d", "mae_2d", "std_2d")


def test_a_public_vits_table_is_a_grid(shared_data: Path) -> None:
    """ViT-Ti/16: 46.5 % of the variance in 3 dimensions, 20 times the share of noise; a linear map
    misses a patch by .15 rows and columns. The figures were computed with NumPy alone, too."""
    model = public_vit(shared_data)
    table = position_table(model, "ViT-Ti")
    numbers = figures_of(table).numbers
    shares = [numbers[f"variance_{k}"] for k in DIMENSIONS]
    assert shares == pytest.approx([46.50, 61.13, 71.49, 80.41, 89.09], abs=0.01)
    shares = [numbers[f"energy_{k}"] for k in DIMENSIONS]
    assert shares == pytest.approx([45.96, 60.45, 70.84, 79.67, 88.26], abs=0.01)
    assert numbers["mae_2d"] == pytest.approx(0.144, abs=0.01)
    assert numbers["mae_1d"] == pytest.approx(1.35, abs=0.1)
    assert numbers["neighbour_similarity"] > 0.5 > abs(numbers["other_similarity"]) + 0.2
    drawn = [cumulative_shares(noise_table(14, 192, seed).centred()) for seed in range(3)]
    assert all(0.05 < at(curve, 3) < 0.07 for curve in drawn)
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
