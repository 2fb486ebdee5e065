"""The 600 real ImageNet images: labels in the CSV, in the folders and in the file names agree."""

import zipfile
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from mjp_privacy.data import ImageSource, load_images, open_images, spread_subset
from mjp_privacy.data.labels import find_labels, synset_indices


@pytest.fixture(scope="module")
def sample_zip(shared_data: Path) -> Path:
    return shared_data / "data" / "imagenet-sample-600.zip"


@pytest.fixture(scope="module")
def source(sample_zip: Path) -> ImageSource:
    return open_images(sample_zip)


def test_csv_and_synset_folders_agree(sample_zip: Path, source: ImageSource) -> None:
    assert len(source.records) == 600
    assert {record.label_source for record in source.records} == {"csv"}
    labels = [record.label for record in source.records]
    assert labels == sorted(set(range(1000)) & {n for n in range(1000) if n % 5 in {0, 1, 2}})
    for record in source.records:
        assert synset_indices()[record.image_id.split("/")[0]] == record.label


def test_folders_alone_give_the_same_labels(source: ImageSource) -> None:
    class WithoutTable:
        path = source.path
        names = tuple(record.image_id for record in source.records)

        def read(self, name: str) -> bytes:
            raise AssertionError(name)

    found = find_labels(WithoutTable(), WithoutTable.names, None)
    assert found.source == "synset"
    assert found.by_image == {record.image_id: record.label for record in source.records}


def test_bytes_are_those_of_the_zip(sample_zip: Path, source: ImageSource) -> None:
    record = source.records[123]
    with zipfile.ZipFile(sample_zip) as archive:
        assert source.read_bytes(record) == archive.read(record.image_id)
        table = pd.read_csv(archive.open("labels.csv"))
    assert table.set_index("file")["label"][record.image_id] == record.label


def test_pictures_decode_to_256_short_side(source: ImageSource) -> None:
    for record in spread_subset(source.records, 20, 0):
        assert min(source.decode(record, min_side=16).size) == 256


def test_input_of_one_image(sample_zip: Path) -> None:
    """The first image of seed 0, as torchvision's evaluation transform gives it."""
    image, label, image_id = next(load_images(sample_zip, size=224, limit=1, seed=0))
    assert (image_id, label) == ("n04049303/n04049303_rain_barrel.jpg", 756)
    theirs = v2.Compose(
        [v2.Resize(248, v2.InterpolationMode.BICUBIC), v2.CenterCrop(224), v2.PILToTensor()]
    )
    with zipfile.ZipFile(sample_zip) as archive, archive.open(image_id) as file:
        assert torch.equal(image, theirs(Image.open(file).convert("RGB")).float() / 255)
    means = (image * 255).mean((1, 2)).tolist()
    assert means == pytest.approx([139.32, 129.78, 113.16], abs=0.1)
