"""Pictures with label maps: found in ADE20K's layout, changed alike, refused where wrong."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError
from mjp_privacy.data.decoding import decode_numbers
from mjp_privacy.paper.segmentation_data import Augmented, PairBatches, Whole, find_pairs, splits_of
from mjp_privacy.training.processes import World
from tests.helpers.segmentation import CLASSES, pair_folder, save_pair, small

ONE = World(torch.device("cpu"))


def test_pairs_are_found_in_a_folder_deeper_down_and_in_a_zip(tmp_path: Path) -> None:
    folder = pair_folder(tmp_path / "ADE" / "ADEChallengeData2016")
    (folder / "sceneCategories.txt").write_text("beside")
    packed = tmp_path / "ade.zip"
    with zipfile.ZipFile(packed, "w") as file:
        for path in sorted(folder.rglob("*.*g")):
            file.write(path, path.relative_to(folder))
    found = [find_pairs(small(), path, None) for path in (folder, tmp_path / "ADE", packed)]
    assert [[len(split or ()) for split in splits] for splits in found] == [[8, 3]] * 3
    assert found[0][0].pictures[0] == "images/training/000.jpg"
    assert found[0][0].maps[0] == "annotations/training/000.png"
    assert found[1][0].maps[0] == "ADEChallengeData2016/annotations/training/000.png"
    assert found[0][0].digest() == found[2][0].digest() != found[1][0].digest()
    picture, labels = found[2][0].read(3)
    there, same = found[0][0].read(3)
    assert np.array_equal(np.array(picture), np.array(there))
    assert np.array_equal(labels, same)


def test_other_labels_are_other_data(tmp_path: Path) -> None:
    folder = pair_folder(tmp_path / "ade")
    before = find_pairs(small(), folder, None)[0].digest()
    path = folder / "annotations/training/004.png"
    labels = np.array(Image.open(path))
    labels[2, 2] = 0
    Image.fromarray(labels).save(path)
    assert find_pairs(small(), folder, None)[0].digest() != before


def test_a_palette_is_read_as_its_places_and_colours_are_refused(tmp_path: Path) -> None:
    folder = pair_folder(tmp_path / "ade")
    pairs = find_pairs(small(), folder, None)[0]
    labels = pairs.read(0)[1]
    path = folder / "annotations/training/000.png"
    coloured = Image.fromarray(labels)
    coloured.putpalette([200, 30, 40] * 256)
    coloured.save(path)
    assert np.array_equal(pairs.read(0)[1], labels)
    coloured.convert("RGB").save(path)
    with pytest.raises(ImageError, match=r"one 8-bit number a pixel \(grey or palette\), not RGB"):
        pairs.read(0)


def positions(size: tuple[int, int]) -> tuple[Image.Image, Any]:
    """A picture whose red and green say where a pixel is, and labels that say the same."""
    width, height = size
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack((rows * 4, columns * 4, np.full_like(rows, 255)), -1).astype(np.uint8)
    labels = (1 + rows // 8 * 4 + columns // 8).astype(np.uint8)
    return Image.fromarray(pixels), labels


@pytest.mark.parametrize("flip", [True, False])
def test_pictures_and_labels_are_changed_alike(flip: bool) -> None:
    """The label that the colours of a pixel stand for is the one that the crop has there."""
    config = small(
        model={"img_size": 32, "num_classes": 40, "mean": [0.0] * 3, "std": [1.0] * 3},
        segmentation={"scales": [0.5, 2.0], "most_of_one_class": 1.0},
        augmentation={"flip": flip},
    )
    transform = Augmented(config)
    padded, mirrored = 0, 0
    for seed in range(40):
        pixels, labels = transform(*positions((48, 56)), seed)
        assert pixels.shape == (3, 32, 32)
        assert labels.shape == (32, 32)
        filled = pixels[2] > 0.5
        assert torch.equal(filled, labels > 0)
        padded += not bool(filled.all())
        rows, columns = (pixels[:2] * 255 / 4).double()
        expected = 1 + (rows + 0.5) // 8 * 4 + (columns + 0.5) // 8
        near_edge = ((rows + 0.5) % 8 - 4).abs().maximum(((columns + 0.5) % 8 - 4).abs()) > 3
        inside = filled & ~near_edge
        assert inside.sum() > 100
        assert torch.equal(expected[inside], labels[inside].double())
        mirrored += bool(columns[0, filled[0]][0] > columns[0, filled[0]][-1])
    assert 5 < padded < 35
    assert (5 < mirrored < 35) if flip else mirrored == 0


def test_a_seed_is_a_crop_and_another_seed_another(tmp_path: Path) -> None:
    transform = Augmented(small(model={"num_classes": 40}))
    one, same, other = (transform(*positions((48, 56)), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])


def test_a_crop_of_one_class_is_drawn_again() -> None:
    labels = np.ones((64, 64), np.uint8)
    labels[:10, :10] = 2
    picture = Image.fromarray(np.zeros((64, 64, 3), np.uint8))
    shares = {}
    for most in (0.75, 1.0):
        config = small(
            segmentation={"scales": [4.0, 4.0], "most_of_one_class": most}, model={"img_size": 16}
        )
        crops = [Augmented(config)(picture, labels, seed)[1] for seed in range(200)]
        shares[most] = np.mean([bool((crop == 2).any()) for crop in crops])
    assert shares[0.75] > 2 * shares[1.0] > 0


def test_a_whole_picture_has_the_training_side_and_labels_their_own() -> None:
    pixels, labels = Whole(small(model={"num_classes": 40}))(*positions((48, 32)))
    assert pixels.shape == (3, 16, 24)
    assert labels.shape == (32, 48)


def test_workers_change_nothing(tmp_path: Path) -> None:
    config = small()
    pairs = find_pairs(config, pair_folder(tmp_path / "ade"), None)[0]
    here, there = (list(PairBatches(config, pairs, ONE, n).epoch(1, 0, 2)) for n in (0, 2))
    later = list(PairBatches(config, pairs, ONE, 0).epoch(1, 1, 2))
    assert len(here) == 2
    for one, other in zip([*here, here[1]], [*there, *later], strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert here[0][0].shape == (4, 3, 16, 16)
    assert here[0][1].shape == (4, 16, 16)


def test_damaged_label_maps_are_errors_of_their_own() -> None:
    content = io.BytesIO()
    numbers = np.random.default_rng(0).integers(0, 256, (32, 24), dtype=np.uint8)
    Image.fromarray(numbers).save(content, "PNG")
    whole = content.getvalue()
    assert np.array_equal(decode_numbers(whole), numbers)
    for damaged in (b"", whole[:300], b"GIF89a", whole[:60] + b"\xff" * 40 + whole[100:]):
        with pytest.raises(ImageError):
            decode_numbers(damaged)
    deep = io.BytesIO()
    Image.fromarray(np.full((8, 8), 300, np.uint16)).save(deep, "PNG")
    with pytest.raises(ImageError, match="one 8-bit number a pixel"):
        decode_numbers(deep.getvalue())


WRONG: list[tuple[str, str]] = [
    ("no map", r"1 picture has no label map; the first is images/training/002.jpg, expected"),
    ("no layout", r"--data .*: expected ADE20K's layout, images/\{training,validation\}/NAME.jpg"),
    (
        "few",
        r"at least one batch of 4 pictures under images/training, got 3. Give --batch 3 or less",
    ),
    ("no training", r"no pictures under images/training; give the folder that has them"),
]


@pytest.mark.parametrize(("mistake", "said"), WRONG)
def test_a_folder_that_is_wrong_is_refused(tmp_path: Path, mistake: str, said: str) -> None:
    folder = pair_folder(tmp_path / "ade", training=3 if mistake == "few" else 8)
    if mistake == "no map":
        (folder / "annotations/training/002.png").unlink()
    if mistake == "no layout":
        folder = folder / "images" / "training"
    if mistake == "no training":
        for path in (folder / "images/training").iterdir():
            path.unlink()
    with pytest.raises(UserError, match=said):
        find_pairs(small(), folder, None)


def test_validation_pictures_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = pair_folder(tmp_path / "ade")
    with pytest.raises(UserError, match="--data holds the validation pictures too"):
        find_pairs(small(), folder, folder)


def test_a_map_of_another_size_or_with_other_labels_is_named(tmp_path: Path) -> None:
    folder = pair_folder(tmp_path / "ade")
    pixels = np.zeros((20, 24, 3), np.uint8)
    save_pair(folder, "training/000", pixels, np.ones((24, 20), np.uint8))
    save_pair(folder, "training/001", pixels, np.full((20, 24), CLASSES + 1, np.uint8))
    (folder / "annotations/training/002.png").write_bytes(b"no image")
    (folder / "images/training/003.jpg").write_bytes(b"")
    pairs = splits_of(folder, CLASSES, "--data")["training"]
    said = [
        r"annotations/training/000.png: a label map of 20×24 px, its picture 24×20: both must",
        r"annotations/training/001.png: a label 4: expected 0 \(no label\) to 3",
        r"annotations/training/002.png: not an image in a format",
        r"images/training/003.jpg: the file is empty",
    ]
    for place, words in enumerate(said):
        with pytest.raises(ImageError, match=words):
            pairs.read(place)
    (folder / "annotations/training/004.png").unlink()
    (folder / "annotations/training/004.png").symlink_to("nowhere.png")
    with pytest.raises(ImageError, match=r"annotations/training/004.png: cannot be read"):
        pairs.digest()
    batches = PairBatches(small(), pairs, ONE, 0)
    with pytest.raises(UserError, match="Expected every training image to be readable"):
        list(batches.epoch(0, 0, 2))
