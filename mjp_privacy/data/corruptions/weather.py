"""Weather: snow, frost, fog, bright light."""

from __future__ import annotations

import numpy as np

from mjp_privacy.data.corruptions.blur import magnified, trail
from mjp_privacy.data.corruptions.noise import Picture
from mjp_privacy.data.corruptions.textures import frost_texture, plasma

SNOW = (
    (0.1, 0.3, 3.0, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2.0, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4.0, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
"""Mean and σ of the flakes' noise, its zoom, what falls below is no flake, reach and σ of the
trail, the picture's share."""
FROST = ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
"""Shares of the picture and of the frost."""
FOG = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))
"""Thickness, and by how much finer structure is fainter."""
BRIGHTNESS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""What is added to the largest channel."""

GREY = (0.299, 0.587, 0.114)


def snow(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Flakes with trails, over a picture that is whitened."""
    mean, sigma, zoom, least, reach, blur, share = SNOW[severity - 1]
    flakes = magnified(rng.normal(mean, sigma, picture.shape[:2]), zoom)
    flakes = np.floor(np.clip(np.where(flakes < least, 0, flakes), 0, 1) * 255) / 255
    falling = trail(flakes, int(reach), blur, angle=rng.uniform(-135, -45))[..., None]
    grey = (picture @ np.array(GREY))[..., None]
    white = np.maximum(picture, 1.5 * grey + 0.5)
    snowing: Picture = share * picture + (1 - share) * white + falling
    snowing += np.rot90(falling, 2)
    return snowing


def frost(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Ice on the pane. The official code adds photographs of frost; this texture is computed."""
    kept, added = FROST[severity - 1]
    return kept * picture + added * frost_texture(picture.shape[:2], rng)


def fog(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """A cloud added to the picture, the sum made as bright as the picture was."""
    thickness, decay = FOG[severity - 1]
    brightest = picture.max()
    cloud = thickness * plasma(picture.shape[:2], decay, rng)
    return (picture + cloud[..., None]) * brightest / (brightest + thickness)


def brightness(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """The value of HSV raised, hue and saturation kept; no chance is in it."""
    value = picture.max(-1, keepdims=True)
    raised = np.minimum(value + BRIGHTNESS[severity - 1], 1)
    return np.where(value > 0, picture / np.where(value > 0, value, 1) * raised, raised)
