"""What these tests share: a federation's uploads that nobody changes, and steps of one's own."""

import pytest
import torch
from torch import Tensor

from mjp_privacy.models import LoadedModel
from tests.experiment.conftest import folder, images, recorded
from tests.helpers.models import planted_model
from tests.helpers.planted import gradient_of, planted_images

__all__ = ["folder", "images", "recorded"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A small model of this package, whose pictures are known."""
    return planted_model()


@pytest.fixture(scope="module")
def gradients(model: LoadedModel) -> dict[str, Tensor]:
    """Of its step on the first planted picture, of class 3."""
    return gradient_of(model, planted_images(1), torch.tensor([3]))


@pytest.fixture(scope="module")
def halved() -> tuple[LoadedModel, dict[str, Tensor]]:
    """The model in float32, and its gradient of that step under autocast."""
    single = planted_model().float()
    with torch.autocast("cpu", torch.bfloat16):
        return single, gradient_of(single, planted_images(1).float(), torch.tensor([3]))
