"""Parts of a segmentation: config, pictures with label maps, network, windows, scores."""

import itertools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError
from mjp_privacy.paper.networks import (
    POOLED,
    averages,
    block_ends,
    features,
    logits_of,
    predicted,
    resized,
    starts,
)
from mjp_privacy.paper.segmentation import (
    MEASURES,
    MJP,
    PLAIN,
    areas,
    counterpart,
    measured,
    scored,
)
from mjp_privacy.paper.segmentation_training import (
    Augmented,
    PixelObjective,
    Whole,
    build_segmentation,
    find_pairs,
    pair_batches,
)
from mjp_privacy.training.batches import World
from mjp_privacy.training.config import load_training
from tests.helpers.segmentation import CLASSES, SWIN, pair_folder, small
from tests.helpers.training import content as classification

CONFIGS = Path(__file__).parents[2] / "configs" / "training"
ONE = World(torch.device("cpu"))
KINDS = 7
"""Classes of the label maps that are scored."""

# the config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"segmentation": {"head": "unet"}}, "segmentation.head"),
        ({"segmentation": {"channels": 7}}, "segmentation.channels"),
        ({"segmentation": {"channels": 2049}}, "segmentation.channels"),
        ({"segmentation": {"scales": [2.0, 0.5]}}, "segmentation.scales"),
        ({"model": {"num_classes": 256}}, "model.num_classes"),
        ({"segmentation": {"head": "upernet"}, "model": {"depth": 3}}, "depth"),
        ({"jigsaw": {"shuffle": "patches"}}, "jigsaw.shuffle"),
        ({"model": {"dal": "linear"}}, "model.dal"),
        ({"augmentation": {"mixup": 0.8}}, "mixup"),
        ({"data": {"store": "memory"}}, "data.store"),
        ({"family": "resnet", "stages": [1], "model": {"position_embedding": "none"}}, "resnet"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        small(**changes)
    with pytest.raises(UserError, match="segmentation"):
        load_training(classification(segmentation={"head": "upernet"}))


def test_rows_are_what_their_names_say_and_the_papers_stand_beside_its_figures() -> None:
    """On all pictures."""
    for name, row in itertools.product(("ade20k", "shapes"), ("plain", "mjp")):
        for head in ("linear", "upernet"):
            config = load_training(CONFIGS / f"{name}.yaml", f"{row}_{head}")
            assert (config.task, config.segmentation.head) == ("segmentation", head)
            assert config.model.unknown_embedding == (row == "mjp")
            assert config.initial is not None
            assert not config.positions_as_paper
            assert counterpart(config, 2000) == {}
    plain, mjp, linear = (
        load_training(CONFIGS / "ade20k.yaml", row)
        for row in ("swin_upernet", "swin_mjp_upernet", "swin_linear")
    )
    assert (plain.model.img_size, plain.model.num_classes) == (512, 150)
    assert (counterpart(plain, 2000), counterpart(mjp, 2000)) == (PLAIN, MJP)
    assert [(row["miou"], row["macc"]) for row in (PLAIN, MJP)] == [(43.87, 55.22), (44.03, 55.5)]
    assert counterpart(plain, 1999) == counterpart(linear, 2000) == {}


# pictures with label maps


def test_pairs_are_found_in_a_folder_deeper_down_and_in_a_zip(tmp_path: Path) -> None:
    """A palette is read as its places; other labels are other data."""
    folder = pair_folder(tmp_path / "ADE" / "ADEChallengeData2016")
    (folder / "sceneCategories.txt").write_text("beside")
    packed = tmp_path / "ade.zip"
    with zipfile.ZipFile(packed, "w") as file:
        for path in sorted(folder.rglob("*.*g")):
            file.write(path, path.relative_to(folder))
    found = [find_pairs(small(), path, None) for path in (folder, tmp_path / "ADE", packed)]
    assert [[len(split or ()) for split in splits] for splits in found] == [[8, 3]] * 3
    assert found[1][0].maps[0] == "ADEChallengeData2016/annotations/training/000.png"
    there, deeper, zipped = (splits[0] for splits in found)
    before = there.digest()
    assert before == zipped.digest() != deeper.digest()
    (picture, labels), (same, same_labels) = there.read(0), zipped.read(0)
    assert np.array_equal(np.array(picture), np.array(same))
    assert np.array_equal(labels, same_labels)
    path = folder / there.maps[0]
    Image.fromarray(np.where(labels == labels.max(), 0, labels)).save(path)
    assert there.digest() != before
    coloured = Image.fromarray(labels)
    coloured.putpalette([200, 30, 40] * 256)
    coloured.save(path)
    assert np.array_equal(there.read(0)[1], labels)
    coloured.convert("RGB").save(path)
    with pytest.raises(ImageError, match="RGB"):
        there.read(0)


def test_a_folder_that_is_wrong_is_refused(tmp_path: Path) -> None:
    folder, few = pair_folder(tmp_path / "ade"), pair_folder(tmp_path / "few", training=3)
    two, none = pair_folder(tmp_path / "two"), pair_folder(tmp_path / "none", training=0)
    pair_folder(two / "other")
    for data, val, named in (
        (folder / "images" / "training", None, "--data"),
        (few, None, "--batch 3"),
        (none, None, "images/training"),
        (two, None, "two"),
        (folder, folder, "--val"),
    ):
        with pytest.raises(UserError, match=named):
            find_pairs(small(), data, val)
    pairs, lost = find_pairs(small(), folder, None)[0], folder / "annotations/training/002.png"
    lost.unlink()
    with pytest.raises(UserError, match=r"annotations/training/002\.png"):
        find_pairs(small(), folder, None)
    lost.symlink_to("nowhere.png")  # lost later
    with pytest.raises(ImageError, match=r"annotations/training/002\.png"):
        pairs.digest()
    with pytest.raises(UserError, match="training/"):
        list(pair_batches(small(), pairs, ONE, 0).epoch(0, 0, 2))


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
    whole, own = Whole(config)(*positions((48, 32)))
    assert (whole.shape, own.shape) == ((3, 32, 48), (32, 48))  # labels keep their size
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


# the network


def network_of(head: str, **changes: Any) -> Any:
    return build_segmentation(small(segmentation={"head": head, "channels": 16}, **changes))


@pytest.mark.parametrize("head", ["linear", "upernet"])
@pytest.mark.parametrize("changes", [{}, SWIN])
def test_heads_give_every_pixel_logits_and_all_weights_gradients(head: str, changes: Any) -> None:
    network = network_of(head, **changes)
    images = torch.randn(2, 3, 16, 16)
    logits = network(images)
    assert logits.shape == (2, CLASSES, 16, 16)
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("changes", [{}, SWIN])
def test_the_last_map_is_what_the_classifier_reads(changes: Any) -> None:
    network, images = network_of("linear", **changes).backbone.eval(), torch.randn(1, 3, 16, 16)
    last = features(network, images)[-1][0].flatten(1).T
    if changes:
        z = network.patch_embed(images) + network.positions().unflatten(1, (4, 4))
        expected = network.norm(network.layers(z))[0].flatten(0, 1)
    else:
        expected = network.forward_features(images)[0, 1:]
    assert torch.allclose(last, expected, atol=1e-6)
    assert (list(block_ends(12)), list(block_ends(4))) == ([2, 5, 8, 11], [0, 1, 2, 3])


def test_averages_are_adaptive_average_pooling() -> None:
    for size, side in itertools.product([(8, 8), (7, 5), (3, 11), (1, 1)], POOLED):
        picture = torch.randn(2, 3, *size)
        expected = F.adaptive_avg_pool2d(picture, side)
        assert torch.allclose(averages(picture, side), expected, atol=1e-6)


def test_the_loss_is_of_labelled_pixels_alone() -> None:
    config = small(recipe={"label_smoothing": 0.1})
    network = build_segmentation(config)
    images, nothing = torch.randn(2, 3, 16, 16), torch.zeros(1, 16, dtype=torch.bool)
    labels = torch.randint(0, CLASSES + 1, (2, 16, 16), dtype=torch.uint8)
    loss, numbers = PixelObjective(network, config)(images, labels, nothing, torch.tensor(0.01))
    logits = network(images).movedim(1, -1)
    kept = labels > 0
    truth = labels[kept].long() - 1
    expected = F.cross_entropy(logits[kept], truth, label_smoothing=0.1)
    assert torch.allclose(loss, expected, atol=1e-6)
    assert numbers[3] == (logits[kept].argmax(-1) == truth).float().mean()
    unlabelled = torch.zeros_like(labels)
    assert PixelObjective(network, config)(images, unlabelled, nothing, torch.tensor(0.0))[0] == 0


def test_windows_answer_as_the_network_does_and_average_where_they_overlap() -> None:
    """They cover a picture, and the last one ends with it."""
    assert (starts(16, 16), starts(17, 16), starts(40, 16)) == ([0], [0, 1], [0, 10, 20, 24])
    picture = torch.randn(3, 16, 26)
    seen: list[int] = []

    def pixelwise(images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return images * 2 + 1

    assert torch.allclose(logits_of(pixelwise, picture, 16), picture * 2 + 1, atol=1e-6)
    assert sum(seen) == 2
    numbered = iter(range(2))

    def constant(images: torch.Tensor) -> torch.Tensor:
        values = torch.tensor([float(next(numbered)) for _ in images])
        return values[:, None, None, None].expand(-1, 1, 16, 16)

    row = logits_of(constant, picture, 16)[0, 0].tolist()
    assert row == [0.0] * 10 + [0.5] * 6 + [1.0] * 10
    network = network_of("linear").eval()
    square = torch.randn(3, 16, 16)
    with torch.no_grad():
        expected = network(square[None])[0].argmax(0)
        assert torch.equal(predicted(network, square, 16, (16, 16)), expected)
        whole = resized(logits_of(network, picture, 16)[None], (31, 50))[0]
        answer = predicted(network, picture, 16, (31, 50))
        assert torch.equal(whole.gather(0, answer[None])[0], whole.amax(0))


# scores


def maps(seed: int, *, absent: int | None = None, ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    """Answers (12, 20, 30) and labels, 0 where there is none; `absent` occurs in neither."""
    drawn = torch.Generator().manual_seed(seed)
    shape = (12, 20, 30)
    labels = torch.randint(1, KINDS + 1, shape, generator=drawn)
    answer = labels - 1
    wrong = torch.rand(shape, generator=drawn) < 0.4
    answer = torch.where(wrong, torch.randint(0, KINDS, shape, generator=drawn), answer)
    if absent is not None:
        answer[answer == absent] = (absent + 1) % KINDS
        labels[labels == absent + 1] = (absent + 1) % KINDS + 1
    labels[torch.rand(shape, generator=drawn) < ignored] = 0
    return answer, labels


def ours(answer: Tensor, labels: Tensor) -> dict[str, float]:
    pairs = zip(answer, labels, strict=True)
    counts = torch.stack([areas(one, truth, KINDS) for one, truth in pairs]).double().numpy()
    return {name: float(x) for name, x in zip(MEASURES, measured(counts.sum(0)), strict=True)}


def theirs(answer: Tensor, labels: Tensor) -> dict[str, float]:
    """torchmetrics' figures; its macro accuracy counts classes that are only in the answer, so the
    mean over classes of the truth is taken here."""
    truth = labels - 1
    options = {"num_classes": KINDS, "ignore_index": -1}
    each = MulticlassAccuracy(average=None, **options)(answer, truth)
    present = torch.isin(torch.arange(KINDS), truth)
    return {
        "miou": 100 * float(MulticlassJaccardIndex(average="macro", **options)(answer, truth)),
        "macc": 100 * float(each[present].mean()),
        "aacc": 100 * float(MulticlassAccuracy(average="micro", **options)(answer, truth)),
    }


def test_scores_equal_torchmetrics() -> None:
    """Also where a class is in neither; one in the answer alone lowers mIoU, not the accuracy."""
    for absent in (None, 0, 4, KINDS - 1):
        answer, labels = maps(1, absent=absent)
        assert ours(answer, labels) == pytest.approx(theirs(answer, labels), rel=1e-5)
    answer, labels = maps(2)
    labels[labels == 3] = 1  # class 2 stays among the answers
    assert ours(answer, labels) == pytest.approx(theirs(answer, labels), rel=1e-5)


def test_the_interval_is_a_bootstrap_over_pictures() -> None:
    answer, labels = maps(2)
    labels[:4] = torch.where(labels[:4] > 0, answer[:4] + 1, 0)  # four pictures are all right
    pairs = zip(answer, labels, strict=True)
    counts = torch.stack([areas(*pair, KINDS) for pair in pairs]).double().numpy()
    scores = scored(counts)
    rng = np.random.default_rng(7)
    resampled = [
        measured(counts[rng.integers(0, len(counts), len(counts))].sum(0)) for _ in range(2000)
    ]
    for name, column in zip(MEASURES, np.array(resampled).T, strict=True):
        score, ends = scores[name], (scores[f"{name}_low"], scores[f"{name}_high"])
        assert ends[0] < score < ends[1]
        low, high = np.quantile(column, [0.025, 0.975])
        assert ends == pytest.approx((low, high), abs=0.1 * (high - low))
    better = scored(counts[::-1].copy(), counts)
    assert (better["miou"], better["miou_low"] < 0 < better["miou_high"]) == (0.0, True)
    assert {*scored(counts, counts).values()} == {0.0}
    assert np.isnan(list(scored(np.zeros((3, 3, KINDS))).values())).all()
    assert np.isnan(scored(np.zeros((0, 3, KINDS)))["miou"])
    alike = scored(np.repeat(counts[5:6], 6, 0))
    assert alike["miou_low"] == pytest.approx(alike["miou_high"])
