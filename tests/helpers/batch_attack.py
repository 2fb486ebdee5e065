"""An attack that knows the pictures and returns those of a batch the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from attacks import ATTACKS
from mjp_privacy.core.registry import Entry
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal

WHERE = "tests.helpers.batch_attack"
PICTURES: dict[int, Tensor] = {}
"""The picture (C, H, W) of each class: filled by the test."""
ORDER: list[int] = []
"""The classes of the images of the last view, in the client's order."""
BATCHES: list[list[list[frozenset[int]]]] = []
"""For each view, round and step: the classes that stood together, read from the classifier."""


@dataclass(frozen=True)
class Backwards:
    """Every picture of a pool, the last one first.

    broken  the place in a pool of a picture that is not finite
    fails   the number of steps with which it raises
    """

    uploads: int = 1
    broken: int = -1
    fails: int = 0
    name: ClassVar[str] = "backwards"
    traits: ClassVar[tuple[str, ...]] = ("shared pictures",)
    published: ClassVar[bool] = False
    victim: ClassVar[str] = "intact"

    def needs(self, model: Any) -> Sequence[str]:
        """The classifier's gradient, whose rows below zero are the classes of a step."""
        return ("head.bias",)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """It always applies."""
        return None

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures of the view's labels."""
        assert view.labels is not None
        ORDER[:] = view.labels.tolist()
        BATCHES.append([_classes(update.grads) for update in view.updates])
        if len(BATCHES[-1][0]) == self.fails:
            raise RuntimeError(f"{self.fails} steps are too many")
        pools = view.labels.split(view.pool)
        labels = [label for pool in pools for label in pool.flip(0).tolist()]
        images = torch.stack([PICTURES[label] for label in labels])
        if self.broken >= 0:
            images[self.broken :: view.pool] = torch.nan
        return Reconstruction(
            images,
            diagnostics={"named_class": torch.tensor(labels, dtype=torch.float64)},
        )


def _classes(grads: Mapping[str, Tensor]) -> list[frozenset[int]]:
    """The classes of each step of a round; in these tests no two images of a step are alike."""
    return [frozenset((step < 0).nonzero().flatten().tolist()) for step in grads["head.bias"]]


@contextmanager
def knowing(images: Path, count: int) -> Iterator[None]:
    """Register `backwards`, which knows these photographs: K.png is that of class K."""
    PICTURES.clear()
    BATCHES.clear()
    for label in range(count):
        pixels = np.asarray(Image.open(images / f"{label}.png"))
        PICTURES[label] = torch.tensor(pixels).permute(2, 0, 1) / 255
    entry = Entry(f"{WHERE}:Backwards")
    with ATTACKS.registered("backwards", entry):
        yield
