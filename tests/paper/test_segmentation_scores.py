"""mIoU, mAcc and aAcc against torchmetrics, and what does not count."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from mjp_privacy.paper.segmentation import MEASURES, areas, difference, measured, scored

CLASSES = 7


def maps(seed: int, *, absent: int | None = None, ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    """Answers (12, 20, 30) and labels, 0 where there is none; `absent` occurs in neither."""
    drawn = torch.Generator().manual_seed(seed)
    shape = (12, 20, 30)
    labels = torch.randint(1, CLASSES + 1, shape, generator=drawn)
    answer = labels - 1
    wrong = torch.rand(shape, generator=drawn) < 0.4
    answer = torch.where(wrong, torch.randint(0, CLASSES, shape, generator=drawn), answer)
    if absent is not None:
        answer[answer == absent] = (absent + 1) % CLASSES
        labels[labels == absent + 1] = (absent + 1) % CLASSES + 1
    labels[torch.rand(shape, generator=drawn) < ignored] = 0
    return answer, labels


def ours(answer: Tensor, labels: Tensor) -> dict[str, float]:
    pairs = zip(answer, labels, strict=True)
    counts = torch.stack([areas(one, truth, CLASSES) for one, truth in pairs]).double().numpy()
    return {name: float(x) for name, x in zip(MEASURES, measured(counts.sum(0)), strict=True)}


def theirs(answer: Tensor, labels: Tensor) -> dict[str, float]:
    """torchmetrics' figures; its macro accuracy counts classes that are only in the answer, so the
    mean over classes of the truth is taken here."""
    truth = labels - 1
    options = {"num_classes": CLASSES, "ignore_index": -1}
    each = MulticlassAccuracy(average=None, **options)(answer, truth)
    present = torch.isin(torch.arange(CLASSES), truth)
    return {
        "miou": 100 * float(MulticlassJaccardIndex(average="macro", **options)(answer, truth)),
        "macc": 100 * float(each[present].mean()),
        "aacc": 100 * float(MulticlassAccuracy(average="micro", **options)(answer, truth)),
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("absent", [None, 0, 4, CLASSES - 1])
def test_scores_equal_torchmetrics(seed: int, absent: int | None) -> None:
    answer, labels = maps(seed, absent=absent)
    assert ours(answer, labels) == pytest.approx(theirs(answer, labels), rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_class_only_in_the_answer_lowers_miou_and_has_no_accuracy(seed: int) -> None:
    answer, labels = maps(seed)
    labels[labels == 3] = 1  # class 2 stays among the answers
    got, expected = ours(answer, labels), theirs(answer, labels)
    assert got == pytest.approx(expected, rel=1e-5)
    without = answer.clone()
    without[(answer == 2) & (labels == 1)] = 0
    without[without == 2] = 1
    assert got["miou"] < ours(without, labels)["miou"]


def test_a_picture_without_labels_changes_nothing() -> None:
    answer, labels = maps(0)
    before = ours(answer[1:], labels[1:])
    labels[0] = 0
    assert ours(answer, labels) == before
    assert not areas(answer[0], labels[0], CLASSES).any()
    assert theirs(answer, labels) == pytest.approx(before, rel=1e-5)


def test_pixels_without_label_do_not_count_whatever_is_answered() -> None:
    answer, labels = maps(1)
    before = areas(answer, labels, CLASSES)
    other = torch.where(labels == 0, (answer + 3) % CLASSES, answer)
    assert torch.equal(areas(other, labels, CLASSES), before)


def test_by_hand() -> None:
    """Class 0: 3 of 4 right, one pixel too many; class 1: 1 of 2; class 2 is in neither."""
    labels = torch.tensor([[1, 1, 1, 1], [2, 2, 0, 0]])
    answer = torch.tensor([[0, 0, 0, 1], [1, 0, 0, 2]])
    counts = areas(answer, labels, 3)
    assert counts.tolist() == [[3, 1, 0], [4, 2, 0], [4, 2, 0]]
    expected = [100 * (3 / 5 + 1 / 3) / 2, 100 * (3 / 4 + 1 / 2) / 2, 100 * 4 / 6]
    assert measured(counts.double().numpy()).tolist() == pytest.approx(expected)


def test_nothing_labelled_is_nan() -> None:
    scores = scored(np.zeros((3, 3, CLASSES)))
    assert all(np.isnan((s.percent, s.low, s.high)).all() for s in scores.values())
    assert np.isnan(scored(np.zeros((0, 3, CLASSES)))["miou"].percent)


def test_the_interval_is_a_bootstrap_over_pictures() -> None:
    answer, labels = maps(2)
    labels[:4] = torch.where(labels[:4] > 0, answer[:4] + 1, 0)  # four pictures are all right
    pairs = zip(answer, labels, strict=True)
    counts = torch.stack([areas(*pair, CLASSES) for pair in pairs]).double().numpy()
    scores = scored(counts)
    rng = np.random.default_rng(7)
    resampled = [
        measured(counts[rng.integers(0, len(counts), len(counts))].sum(0)) for _ in range(2000)
    ]
    for name, column in zip(MEASURES, np.array(resampled).T, strict=True):
        score = scores[name]
        assert score.low < score.percent < score.high
        low, high = np.quantile(column, [0.025, 0.975])
        width = high - low
        assert abs(score.low - low) < 0.1 * width
        assert abs(score.high - high) < 0.1 * width
    better = difference(counts[::-1].copy(), counts)["miou"]
    assert (better.percent, better.low < 0 < better.high) == (0.0, True)
    itself = difference(counts, counts)["miou"]
    assert (itself.percent, itself.low, itself.high) == (0.0, 0.0, 0.0)
    alike = scored(np.repeat(counts[5:6], 6, 0))
    assert alike["miou"].low == pytest.approx(alike["miou"].high)
