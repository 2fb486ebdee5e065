"""Real images and weights: labels, accuracy, position embeddings, the figures that are printed."""

import json
import re
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from mjp_privacy.data import ImageSource, load_images, open_images, spread_subset
from mjp_privacy.data.labels import find_labels
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import read_metadata
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

# 600 ImageNet images: labels in the CSV, in the folders and in the file names agree ---------------


@pytest.fixture(scope="module")
def source(shared_data: Path) -> ImageSource:
    return open_images(shared_data / "data" / "imagenet-sample-600.zip")


def test_csv_and_synset_folders_agree(source: ImageSource) -> None:
    assert {record.label_source for record in source.records} == {"csv"}
    labels = {record.image_id: record.label for record in source.records}
    assert [*labels.values()] == sorted(n for n in range(1000) if n % 5 in {0, 1, 2})

    class WithoutTable:
        path, names = source.path, tuple(labels)

        def read(self, name: str) -> bytes:
            raise AssertionError(name)

    found = find_labels(WithoutTable(), WithoutTable.names, None)
    assert (found.source, found.by_image) == ("synset", labels)


def test_input_of_one_image(source: ImageSource) -> None:
    """The first image of seed 0, as torchvision's evaluation transform gives it."""
    image, label, image_id = next(load_images(source.path, size=224, limit=1, seed=0))
    assert (image_id, label) == ("n04049303/n04049303_rain_barrel.jpg", 756)
    steps = [v2.Resize(248, v2.InterpolationMode.BICUBIC), v2.CenterCrop(224), v2.PILToTensor()]
    with zipfile.ZipFile(source.path) as archive, archive.open(image_id) as file:
        theirs = v2.Compose(steps)(Image.open(file).convert("RGB"))
    assert torch.equal(image, theirs.float() / 255)
    means = (image * 255).mean((1, 2)).tolist()
    assert means == pytest.approx([139.32, 129.78, 113.16], abs=0.1)


# accuracy of a public ViT, and of the zoo on data it never saw ------------------------------------


@pytest.mark.nightly
def test_a_public_vit_has_its_known_accuracy(shared_data: Path) -> None:
    """ViT-Ti/16 on 600 ImageNet images: 0.83 ± 0.03 top-1; shuffled, it often changes its mind."""
    model = load_model(
        "vit_tiny_patch16_224",
        checkpoint=shared_data / "weights" / "vit_tiny_patch16_224_timm.safetensors",
        mean=0.5,
        std=0.5,
    )
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
