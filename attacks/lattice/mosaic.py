"""A picture of lattice patches in their places: each must continue its neighbours.

Among the vectors that the lattice allows for a patch, its own cost sometimes prefers a wrong one.
Once the patches around it are known, the steps across its four borders tell: they are differences
of neighbouring pixels like those inside.
"""

from __future__ import annotations

import numpy as np

from attacks.budget import spent
from attacks.lattice.descent import Moves
from attacks.lattice.frame import Frame, Reals
from attacks.lattice.parts import Border, Parts, Places

WEIGHT = 1.0  # of a step across a border, beside GRADIENT of one inside
PATIENCE = 48  # unmoved patches in a row after which a round ends
ROUNDS = 4  # at most


FIXED, FREE = -2, -1  # a patch that must stay; an unmasked one, which any move may change


def continued(frame: Frame, masked: Reals, patches: Reals, members: Places) -> Reals:
    """Patches (N, p) of a square grid in grey levels, moved while that costs less together with the
    steps across their borders; those with the largest steps first.

    masked   (k, p) the masked patches
    members  (N,) which of them each patch is, or FREE or FIXED
    """
    patches, masked, grid = patches.copy(), masked.copy(), round(len(patches) ** 0.5)
    moves = Moves.of(frame, frame.parts(), masked)
    looked_at: dict[int, bytes] = {}  # the patch and its border
    for _ in range(ROUNDS):
        moved, unmoved = False, 0
        for place in _worst_first(patches, grid, moves.parts):
            border = border_at(patches, place, grid, frame.patch_size)
            member = int(members[place])
            state = patches[place].tobytes() + border.beyond.tobytes()
            if member == FIXED or looked_at.get(place) == state:
                continue
            if spent():
                return patches
            patch = patches[place]
            better = moves.descended(patch, patch, border, None if member == FREE else member)
            looked_at[place] = better.tobytes() + border.beyond.tobytes()
            if (better != patch).any():
                patches[place], moved, unmoved = better, True, 0
                if member != FREE:
                    masked[member] = better
                    moves = Moves.of(frame, moves.parts, masked)
            elif (unmoved := unmoved + 1) == PATIENCE:
                break
        if not moved:
            break
    return patches


def _worst_first(patches: Reals, grid: int, parts: Parts) -> list[int]:
    """The places in descending order of how much larger the mean step across the borders is than
    that inside (both as logarithms)."""
    inside = parts.mean_step(parts.of(patches))
    across = []
    for place, patch in enumerate(patches):
        border = border_at(patches, place, grid, parts.patch_size)
        across.append(np.log1p(abs(patch[border.inner] - border.beyond)).mean())
    return [int(place) for place in np.argsort(inside - across, kind="stable")]


def border_at(patches: Reals, place: int, grid: int, size: int) -> Border:
    """What the patch at a place must continue: the edges of up to four neighbours."""
    pixels = np.arange(patches.shape[1]).reshape(-1, size, size)
    row, column = divmod(int(place), grid)
    sides = (
        (row > 0, -grid, pixels[:, 0], pixels[:, -1]),
        (row < grid - 1, grid, pixels[:, -1], pixels[:, 0]),
        (column > 0, -1, pixels[:, :, 0], pixels[:, :, -1]),
        (column < grid - 1, 1, pixels[:, :, -1], pixels[:, :, 0]),
    )
    inner: list[Places] = [edge.ravel() for exists, _, edge, _ in sides if exists]
    beyond = [patches[place + step, far.ravel()] for exists, step, _, far in sides if exists]
    return Border(np.concatenate(inner), np.concatenate(beyond), WEIGHT)
