r"""Uploads of one batch of 8-bit pictures: the lattice of their differences, and every picture.

`batch_span` determines the patches of a batch except for their part in the span S of the pictures'
differences. Decoded pictures are integers, so the integer vectors of S are a lattice, which the
differences generate: LLL finds it, as in `pixel_lattice`. At each position all B patches are
integer vectors a few steps of that lattice apart, and LayerNorm's length tells which they are
(`equations.batch_patches`). Borders sort them into pictures (`jigsaw.sheets`), and the layers'
inputs of the first blocks say where borders are wrong and verify whole pictures
(`equations.exchange`). Verified pictures are taken out of the upload, which leaves a smaller batch
(`equations.lattice_pictures`). No label need be known.

    attack = find_attack("batch_lattice")                  # one upload, where N B < D
    attack = find_attack("batch_lattice", {"uploads": 2})  # of the same batch, fixed partners

It needs at most 80 differences N (B - 1), R (D - N - 1) >= N (B - 1) for R uploads, exact
gradients, pixels that are multiples of 1/255 and pictures without masked patches; what verifies
pictures needs B (N + 1) < D. `certain` says which are verified; the others are made of the patches
found and, in place of those that are not, the most probable ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from attacks.batch_span import BatchSpanAttack
from attacks.budget import image
from attacks.equations.differences import too_few_uploads
from attacks.equations.lattice_pictures import BatchPicture, LatticePictures
from attacks.equations.layer_spans import layers_of
from attacks.equations.names import HEAD, UNKNOWN
from attacks.equations.patch_system import is_disturbed, located
from attacks.equations.pictures import pictures_of
from attacks.equations.requirements import (
    check_uploads,
    lacks_gradients,
    lacks_patch_system,
    needs_patch_system,
)
from attacks.equations.step_upload import StepUpload, client_model
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class BatchLattice:
    """The pictures of a batch by the lattice of their differences.

    uploads  how many rounds of the same batch it reads; the weights may move between them
    most     with more differences N (B - 1) than this no lattice is tried
    blocks   how many of the first blocks' layers verify pictures
    prior    `fitted`, `stationary`, or the path of a fitted prior
    """

    uploads: Annotated[int, Field(ge=1, le=1000)] = 1
    most: Annotated[int, Field(ge=1, le=1000)] = 80
    blocks: Annotated[int, Field(ge=1, le=100)] = 2
    prior: str = "fitted"
    name: ClassVar[str] = "batch_lattice"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"

    def __post_init__(self) -> None:
        check_uploads(self.name, self.uploads)

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding, the first blocks' linear layers and
        the classifier; of the unknown embedding for single pictures."""
        layers = layers_of(model, self.blocks)
        return (*needs_patch_system(model), *(f"{name}.weight" for name in layers), HEAD, UNKNOWN)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the uploads do not show the lattice of their batch, or None."""
        batch = view.updates[0].batch
        refusal = lacks_patch_system(view) or lacks_gradients(view, *self.needs(view.model)[:-1])
        if refusal is not None or batch == 1:
            return refusal
        return too_few_uploads(view.model, batch, len(view.updates), self.most)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures of every step."""
        first = view.updates[0]
        masked = any(bool(located(view, update).any()) for update in view.updates)
        if first.batch == 1 or masked or any(map(is_disturbed, view.updates)):
            return BatchSpanAttack(self.prior).run(view, generator=generator)
        search = LatticePictures(view, self.prior, self.blocks)
        models = [client_model(view, update) for update in view.updates]
        found = list[BatchPicture]()
        for step in range(first.steps_in_all):
            pairs = zip(view.updates, models, strict=True)
            with image(step * first.batch, first.batch):
                found += search.found(
                    [StepUpload.of(view, update, step, model) for update, model in pairs]
                )
        outside = torch.tensor([picture.outside for picture in found], dtype=torch.float64)
        patches = torch.stack([picture.patches for picture in found])
        return Reconstruction(
            pictures_of(view, patches),
            mask=torch.zeros(patches.shape[:2], dtype=torch.bool, device=patches.device),
            diagnostics={
                "certain": outside.isfinite().double(),
                "outside": outside,
                "lattice_found": torch.tensor([float(one.by_lattice) for one in found]).double(),
            },
        )
