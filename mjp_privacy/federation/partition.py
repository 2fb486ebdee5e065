"""Who holds which image: a split of the training images over clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.seeding import derive_seed

MOST_DRAWS = 100  # of a Dirichlet split, until every client has its share


def iid(labels: Sequence[int], clients: int, *, seed: int) -> list[list[int]]:
    """Places of images, shuffled and dealt out in turn: sizes differ by one at most."""
    order = _generator("iid", seed).permutation(len(labels))
    return [sorted(order[client::clients].tolist()) for client in range(clients)]


def dirichlet(
    labels: Sequence[int], clients: int, *, alpha: float, least: int, seed: int
) -> list[list[int]]:
    """Each class dealt out by shares from Dirichlet(alpha, ..., alpha): small alpha, few classes a
    client. Drawn again until every client has `least` images."""
    generator = _generator("dirichlet", seed)
    kinds = np.asarray(labels)
    for _ in range(MOST_DRAWS):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for kind in np.unique(kinds):
            places = generator.permutation(np.flatnonzero(kinds == kind))
            shares = generator.dirichlet(np.full(clients, alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(places)).astype(int)
            for part, given in zip(parts, np.split(places, cuts), strict=True):
                part.extend(given.tolist())
        if min(map(len, parts)) >= least:
            return [sorted(part) for part in parts]
    raise UserError(
        f"No Dirichlet split with alpha {alpha} gave each of {clients} clients {least} images in "
        f"{MOST_DRAWS} draws of {len(labels)} images. Give fewer clients, a smaller client.batch "
        "or a larger alpha."
    )


def _generator(kind: str, seed: int) -> np.random.Generator:
    return np.random.default_rng(derive_seed("partition", kind, seed))
