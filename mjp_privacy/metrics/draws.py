"""How often each resample of a bootstrap holds each group: drawn once, kept for further ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 18  # entries of the matrix of draws held as floating point at a time (2 MiB)
_KEPT_BYTES = 64 << 20

Draws = NDArray[np.uint8] | NDArray[np.uint16]

_kept: OrderedDict[tuple[int, int, int], list[Draws]] = OrderedDict()  # least used first


def draws(count: int, resamples: int, seed: int) -> Iterator[Draws]:
    """Blocks of the (resamples, count) matrix of how often each resample holds each group.

    Matrices are kept for the next call, up to _KEPT_BYTES in all.
    """
    key = (count, resamples, seed)
    size = resamples * count * _type_of(count).itemsize
    if size > _KEPT_BYTES:
        yield from _new_draws(*key)
        return
    if key not in _kept:
        _make_room(size)
        _kept[key] = list(_new_draws(*key))
    _kept.move_to_end(key)
    yield from _kept[key]


def _make_room(size: int) -> None:
    def held() -> int:
        return sum(block.nbytes for blocks in _kept.values() for block in blocks)

    while _kept and held() + size > _KEPT_BYTES:
        _kept.popitem(last=False)


def _new_draws(count: int, resamples: int, seed: int) -> Iterator[Draws]:
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // count)
    for start in range(0, resamples, rows):
        shape = (min(rows, resamples - start), count)
        drawn = generator.integers(0, count, size=shape)
        drawn += count * np.arange(shape[0])[:, None]
        times = np.bincount(drawn.ravel(), minlength=shape[0] * count)
        yield times.reshape(shape).astype(_type_of(count))


def _type_of(count: int) -> np.dtype[np.unsignedinteger]:
    """Small integers that hold how often one of `count` groups is drawn."""
    return np.dtype(np.uint8) if count < 256 else np.dtype(np.uint16)
