"""Labels read off the gradient of a classifier, with and without a bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mjp_privacy.client.traces import label_in_gradient


def classifier_gradient(
    label: int, classes: int, bias: bool, smoothing: float = 0.0
) -> dict[str, Tensor]:
    torch.manual_seed(label)
    head = nn.Linear(16, classes, bias=bias)
    loss = nn.functional.cross_entropy(
        head(torch.randn(1, 16)), torch.tensor([label]), label_smoothing=smoothing
    )
    loss.backward()
    return {
        f"head.{n}": p.grad.unsqueeze(0) for n, p in head.named_parameters() if p.grad is not None
    }


def test_every_class_is_read_off_bias_and_weight() -> None:
    for label in range(7):
        whole = classifier_gradient(label, 7, bias=True)
        weight = {"head.weight": whole["head.weight"]}
        smoothed = classifier_gradient(label, 7, bias=False, smoothing=0.1)
        for grads in (whole, weight, smoothed):
            told = label_in_gradient(grads)
            assert told is not None
            assert told.tolist() == [label]


def test_several_steps_are_told_apart() -> None:
    steps = [classifier_gradient(label, 5, bias=False) for label in (4, 0, 2)]
    told = label_in_gradient({"head.weight": torch.cat([step["head.weight"] for step in steps])})
    assert told is not None
    assert told.tolist() == [4, 0, 2]


def test_what_shows_no_class_is_unknown() -> None:
    assert label_in_gradient({}) is None
    assert label_in_gradient(classifier_gradient(1, 2, bias=False)) is None  # both rows are alike
    torch.manual_seed(0)
    assert label_in_gradient({"head.weight": torch.randn(1, 7, 16)}) is None  # of another loss
