"""Sums of a few steps of a lattice: which rows, and with which signs."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations_with_replacement, product

import numpy as np

from attacks.lattice.frame import Reals
from attacks.lattice.parts import Places


@lru_cache(maxsize=8)
def sums_of(steps: int, size: int) -> tuple[Places, Reals]:
    """All sums of `size` of so many steps, with either sign each and with repetitions: rows
    (n, size) and signs (n, size). sums_of(3, 0) is the empty sum, sums_of(3, 1) has six."""
    places = list(combinations_with_replacement(range(steps), size))
    chosen = np.array(places, dtype=np.int64).reshape(len(places), size)
    signs = np.array(list(product((1.0, -1.0), repeat=size))).reshape(2**size, size)
    return np.repeat(chosen, len(signs), axis=0), np.tile(signs, (len(chosen), 1))
