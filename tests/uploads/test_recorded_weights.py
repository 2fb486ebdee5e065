"""Weights beside recorded uploads: a file holds one model, and each model is stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.models import load_model
from mjp_privacy.uploads.folder import UploadFolder
from mjp_privacy.uploads.record import record_weights
from tests.helpers.runs import TINY


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 6},
        {"activation": "quick_gelu"},
        {"norm_eps": 1e-5},
        {"mean": 0.4},
        {"std": 0.3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_equal_tensors_of_another_model_are_another_file(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = UploadFolder(tmp_path)
    model, other = load_model(**TINY), load_model(**{**TINY, **changes})
    other.load_state_dict(model.state_dict())
    places = [record_weights(folder.root, each) for each in (model, other, model, other)]
    assert places[:2] == places[2:]
    assert len(set(places)) == 2 == len(list((tmp_path / "weights").iterdir()))
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for each, place in zip((model, other), places, strict=False):
        again = load_model(checkpoint=tmp_path / place)
        assert (again.card.mean, again.card.std) == (each.card.mean, each.card.std)
        assert again(again.normalize(image)).equal(each(each.normalize(image)))
