"""Random textures: a cloud, and frost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.data.corruptions.blur import trail

Plane = NDArray[np.float64]

CRYSTALS = 5
"""Directions in which needles of ice grow."""
ICE = (0.50, 0.56, 0.62)
"""Mean colour of the frost: a bluish grey."""


def plasma(shape: tuple[int, ...], decay: float, rng: np.random.Generator) -> Plane:
    """A cloud in [0, 1] by diamonds and squares on a torus, cut to the shape.

    decay: each halving of the scale divides the chance by its square
    """
    side = 1 << max(1, (max(shape) - 1).bit_length())
    cloud: Plane = np.zeros((1, 1))
    chance = 1.0
    while cloud.shape[0] < side:
        cloud = _finer(cloud, chance, rng)
        chance /= decay**2
    cloud -= cloud.min()
    return (cloud / cloud.max())[: shape[0], : shape[1]]


def _finer(coarse: Plane, chance: float, rng: np.random.Generator) -> Plane:
    """Twice as many points each way: between them the mean of four neighbours, and chance."""
    size = coarse.shape[0]

    def with_chance(neighbours: Plane) -> Plane:
        return neighbours / 4 + chance * rng.uniform(-1, 1, neighbours.shape)

    below = np.roll(coarse, -1, 0)
    centres = with_chance(coarse + below + np.roll(coarse + below, -1, 1))
    to_the_right = with_chance(coarse + np.roll(coarse, -1, 1) + centres + np.roll(centres, 1, 0))
    underneath = with_chance(coarse + below + centres + np.roll(centres, 1, 1))
    fine = np.empty((2 * size, 2 * size))
    fine[::2, ::2], fine[1::2, 1::2] = coarse, centres
    fine[::2, 1::2], fine[1::2, ::2] = to_the_right, underneath
    return fine


def frost_texture(shape: tuple[int, ...], rng: np.random.Generator) -> Plane:
    """(H, W, 3) in [0, 1]: needles of ice in a few directions, dense where a cloud is thick.

    It stands for the photographs of the official code, with which it shares no more than being
    bright, bluish and streaked.
    """
    needles: Plane = np.zeros(shape)
    for _ in range(CRYSTALS):
        seeds = (rng.random(shape) < 0.03) * rng.random(shape)
        reach = int(rng.integers(8, 20))
        needles = np.maximum(needles, 8 * trail(seeds, reach, reach, angle=rng.uniform(0, 360)))
    thickness = plasma(shape, 1.6, rng)
    ice = np.clip(0.35 * thickness + thickness * needles, 0, None)
    colour = ice[..., None] * np.array(ICE) / ice.mean()
    return np.clip(colour, 0, 1)
