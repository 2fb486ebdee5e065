"""The 600 real ImageNet images: labels in the CSV, in the folders and in the file names agree."""

import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from mjp_privacy.data import ImageSource, load_images, open_images, spread_subset
from mjp_privacy.data.labels import find_labels


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


def test_pictures_decode_to_256_short_side(source: ImageSource) -> None:
    for record in spread_subset(source.records, 20, 0):
        assert min(source.decode(record, min_side=16).size) == 256


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
