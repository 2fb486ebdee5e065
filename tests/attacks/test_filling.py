"""How the directions that an upload leaves open are filled."""

from __future__ import annotations

import torch

from attacks import find_attack
from mjp_privacy.metrics.pictures import psnr
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view


def psnr_with(completion: str) -> float:
    """Mean PSNR of planted pictures under MJP."""
    attack = find_attack("masked_span", {"completion": completion, "prior": "stationary"})
    view, _ = planted_view(planted_model(unknown_embedding=True), attack, "c")
    found = attack.run(view, generator=torch.Generator())
    assert found.images is not None
    return float(psnr(found.images, planted_images()).mean())


def test_a_prior_of_pictures_beats_one_of_patches_and_that_one_none() -> None:
    field, patch, none = map(psnr_with, ("field", "patch", "none"))
    assert field > patch + 0.5
    assert patch > none + 0.5
