"""One picture under one corruption."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.data.corruptions import blur, digital, noise, weather
from mjp_privacy.data.corruptions.names import CORRUPTIONS, SEVERITIES
from mjp_privacy.data.corruptions.noise import Picture

Corruption = Callable[[Picture, int, np.random.Generator], Picture]

_BY_NAME: Mapping[str, Corruption] = {
    name: getattr(family, name)
    for family in (noise, blur, weather, digital)
    for name in CORRUPTIONS
    if hasattr(family, name)
}


def corrupted(
    pixels: NDArray[np.uint8], corruption: str, severity: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """The picture under a corruption: corrupted(pixels, "fog", 3, np.random.default_rng(0)).

    pixels (H, W, 3); what leaves [0, 1] is cut off and 8-bit values are rounded down, as the
    official code does.
    """
    if corruption not in _BY_NAME or severity not in SEVERITIES:
        raise ValueError(f"no corruption {corruption!r} of severity {severity!r}")
    picture = pixels.astype(np.float64) / 255
    changed = _BY_NAME[corruption](picture, severity, rng)
    return np.floor(np.clip(changed, 0, 1) * 255 + 1e-9).astype(np.uint8)
