"""Which client holds which image: splits of the training images over the clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed

MOST_DRAWS = 100  # attempts at a Dirichlet split in which every client has enough images


def iid(labels: Sequence[int], clients: int, *, seed: int) -> list[list[int]]:
    """Each client's images, as places in `labels`: shuffled and dealt out in turn.

    Clients differ by at most one image; labels play no part.
    """
    order = _generator("iid", seed).permutation(len(labels))
    return [sorted(order[client::clients].tolist()) for client in range(clients)]


def dirichlet(
    labels: Sequence[int], clients: int, *, alpha: float, least: int, seed: int
) -> list[list[int]]:
    """Each client's images, as places in `labels`, with classes spread unevenly.

    Every class is dealt out by shares from Dirichlet(alpha, ..., alpha): a small alpha gives each
    client few classes. Drawn again until every client has `least` images.
    """
    generator = _generator("dirichlet", seed)
    kinds = np.asarray(labels)
    for _ in range(MOST_DRAWS):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for kind in np.unique(kinds):
            places = generator.permutation(np.flatnonzero(kinds == kind))
            shares = generator.dirichlet(np.full(clients, alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(places)).astype(int)
            for part, dealt in zip(parts, np.split(places, cuts), strict=True):
                part.extend(dealt.tolist())
        if min(map(len, parts)) >= least:
            return [sorted(part) for part in parts]
    raise UserError(
        f"No Dirichlet split of {len(labels)} images with alpha {alpha} gave each of {clients} "
        f"clients at least {least} in {MOST_DRAWS} attempts. Give fewer clients, a smaller "
        "client.batch or a larger alpha."
    )


def _generator(kind: str, seed: int) -> np.random.Generator:
    return np.random.default_rng(derive_seed("partition", kind, seed))
