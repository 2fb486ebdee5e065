"""What `mjp check` says of uploads that can be attacked, and that weakens attacks silently."""

from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.check_uploads import check_uploads
from tests.helpers.uploads import edit_all


def test_wrong_mean_and_std_are_caught(folder: Path) -> None:
    assert "normalised with others" not in check_uploads(folder)[0]
    edit_all(folder, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])
    text, _ = check_uploads(folder)
    assert "normalised with others" in text
    assert "the weights file says mean" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"momentum": 0.9, "steps": 3}, "momentum 0.9: its pseudo-gradient is approximate"),
        ({"optimizer": "adamw"}, "1 adamw step(s) with momentum 0: its pseudo-gradient is approx"),
        ({"optimizer": "adamw", "steps": 2}, "which holds no gradient; train with plain SGD"),
    ],
)
def test_momentum_and_local_steps_are_said(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    edit_all(folder, kind="weight_difference", lr=0.1, **changes)
    assert said in check_uploads(folder)[0]


def test_one_plain_step_is_exact_and_an_unknown_optimiser_is_named(folder: Path) -> None:
    edit_all(folder, kind="weight_difference", lr=0.1, momentum=0.9)
    assert "approximate" not in check_uploads(folder)[0]
    edit_all(folder, optimizer="lion")
    assert "a weight difference of lion, which holds no gradient" in check_uploads(folder)[0]


def test_names_that_were_not_uploaded_are_said(folder: Path) -> None:
    edit_all(folder, partial=False)
    text, _ = check_uploads(folder)
    assert "parameters were not uploaded" in text


def test_check_names_the_attacks_that_apply(folder: Path) -> None:
    text, usable = check_uploads(folder)
    assert usable
    assert "applies: patch_gradient" in text
    assert "not april: it needs a client whose block 0 has neither norm1 nor residuals" in text
