"""That what is said of a picture is so: of its levels, of masked patches, of its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mjp_privacy import load_images
from mjp_privacy.uploads.checks import declared_wrongly

HALF = (0.5,) * 3, (0.5,) * 3
PHOTOGRAPHS = torch.stack([image for image, *_ in load_images("embedded", size=64, limit=5)])


def as_fed(pixels: Tensor) -> Tensor:
    return (pixels - 0.5) / 0.5


# levels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 3])
def test_levels_that_no_contrast_within_the_range_explains_speak_for_nothing(place: int) -> None:
    """Halves, thirds and tenths of levels, as means of pixels have them."""
    one, other = PHOTOGRAPHS[place], PHOTOGRAPHS[place + 1]
    plain = [nn.functional.avg_pool2d(one, 2), one.mean(0, keepdim=True).expand(3, -1, -1)]
    for pixels in (*plain, *(share * one + (1 - share) * other for share in (0.5, 0.6, 0.7))):
        assert declared_wrongly(as_fed(pixels), *HALF) == ""
    assert "1.25 times" in declared_wrongly(as_fed(0.8 * one), *HALF)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.5)])
def test_pixels_fed_from_0_to_255_are_named(mean: float, std: float) -> None:
    assert "0 to 255" in declared_wrongly(255 * PHOTOGRAPHS[0], (mean,) * 3, (std,) * 3)
    dark = as_fed(0.05 * nn.functional.avg_pool2d(PHOTOGRAPHS[0], 3))
    assert "255" not in declared_wrongly(dark, *HALF)  # nearly whole numbers, and no levels


def test_a_picture_of_which_no_pixel_is_known_in_all_channels_is_read_all_the_same() -> None:
    """Pixels at the ends of the range, as saturated colours have them, are not known."""
    pixels = 0.8 * PHOTOGRAPHS[0]
    pixels[0, ::2], pixels[1, 1::2] = torch.nan, torch.nan
    assert declared_wrongly(as_fed(pixels), *HALF) == ""
