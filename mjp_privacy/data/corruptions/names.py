"""The corruptions by family, as the folders of ImageNet-C are called, in the paper's order."""

from __future__ import annotations

from collections.abc import Mapping

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
"""By the official archive that holds them. Its fifth, `extra`, counts towards no mean."""

CORRUPTIONS = tuple(name for names in FAMILIES.values() for name in names)
SEVERITIES = (1, 2, 3, 4, 5)
MARKER = "corrupted.json"
"""A file that `mjp sample --corrupt` leaves in its folder; official files have none."""
