"""Which reconstruction of a batch belongs to which picture, where their order means nothing."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from mjp_privacy.metrics.pixel import decibels, mse

EXACT = 200.0
"""dB that an identical picture counts: above any other float32 pictures, which end near 155."""
NOTHING = -1000.0
"""dB that a picture with NaN counts: it is given to a picture that nothing else fits."""


def assigned(reconstructions: Tensor, references: Tensor) -> Tensor:
    """The reconstruction that belongs to each reference: the one-to-one assignment with the
    largest sum of PSNRs. (m, C, H, W) twice -> (m,) places of reconstructions.

    assigned(pictures.flip(0), pictures)  # tensor([m - 1, ..., 1, 0])
    """
    each = [mse(reconstructions, picture.expand_as(reconstructions)) for picture in references]
    worth = decibels(torch.stack(each)).clamp(max=EXACT).nan_to_num(NOTHING)
    _, places = linear_sum_assignment(worth.cpu().numpy(), maximize=True)
    return torch.from_numpy(places)
