"""Reads off an upload which positions were shuffled, without reconstructing anything.

`pos_embed` is a table, and a masked position does not look up its row. The gradient of that row is
zero, or exactly what the client's recipe adds independently of the picture (weight decay in a
weight difference, L_DAL), or, where noise was added to every row, nothing but noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from attacks.equations.names import TABLE
from attacks.equations.patch_system import located
from attacks.equations.pictures import per_image
from attacks.equations.requirements import lacks_gradients, lacks_positions
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class MaskLocator:
    """Estimates the mask and makes no picture: its results are the mask's precision and recall."""

    name: ClassVar[str] = "mask_locator"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Only the gradient of the position table."""
        return (TABLE,)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload holds no gradient of a position table, or None."""
        return lacks_positions(view.model) or lacks_gradients(view, TABLE)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The estimated mask of every image; no images."""
        return Reconstruction(None, mask=per_image(view, located(view, view.updates[0])))
