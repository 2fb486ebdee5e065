r"""Exchanges patches between the pictures of a batch until each passes as a whole.

Borders tell mostly which patches belong together (`jigsaw.sheets`); the layers after block 0's
attention tell it surely: a picture whose patches are all of one picture leaves nothing outside the
spans of its layers' inputs (`equations.layer_spans`), and one wrong patch does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.layer_search import rectangles

EXCHANGES = 24  # at most
AT_ONCE = 64  # pictures that the network sees together
TINY = 1e-300
Shares = Callable[[Tensor], Tensor]
"""What lies outside for each of some pictures (m, N, p), (m,)."""


def exchanged(pictures: Tensor, shares: Shares, enough: float) -> tuple[Tensor, Tensor]:
    """Pictures (B, N, p) with rectangles of patches exchanged between two at a time, as long as
    that lessens what lies outside; and what does (B,). At most `enough` is a picture that is left
    as it is."""
    pictures, outside = pictures.clone(), shares(pictures)
    for _ in range(EXCHANGES):
        rest = [place for place, share in enumerate(outside.tolist()) if share > enough]
        best = max(
            (_best(pictures, outside, *pair, shares) for pair in combinations(rest, 2)),
            key=lambda trial: trial[0],
            default=None,
        )
        if best is None or best[0] <= 0 or spent():
            break
        _, pair, both, left = best
        pictures[pair], outside[pair] = both, left
    return pictures, outside


def _best(
    pictures: Tensor, outside: Tensor, first: int, second: int, shares: Shares
) -> tuple[float, list[int], Tensor, Tensor]:
    """The exchange between two pictures that gains most: by how much the logarithms of what lies
    outside sink, the pair, both pictures after it and what then lies outside of them."""
    grid, pair = round(pictures.shape[1] ** 0.5), [first, second]
    one, other = pictures[pair]
    regions = rectangles(grid).to(one.device)
    tried = []
    for some in regions.split(AT_ONCE):
        inside = some.unsqueeze(2)
        both = torch.stack((torch.where(inside, other, one), torch.where(inside, one, other)), 1)
        tried.append(shares(both.flatten(0, 1)).view(-1, 2))
    left = torch.cat(tried)
    gains = (outside[pair].clamp_min(TINY).log() - left.clamp_min(TINY).log()).sum(1)
    best = int(gains.argmax())
    region = regions[best].unsqueeze(1)
    both = torch.stack((torch.where(region, other, one), torch.where(region, one, other)))
    return float(gains[best]), pair, both, left[best]
