r"""The pictures of a batch, each verified by its layers' inputs: by a search, or by a lattice.

`layer_span`, one upload. `batch_span` leaves N^2 (B - 1) numbers of a picture open. The weight
gradients of the first blocks say the rest: the inputs of every linear layer lie in the row spaces
of their gradients (`equations.layers`), which a picture of the batch passes to rounding and a
mixture does not. Tokens are taken out of block 0's gradients (`equations.token_peeling`), and
attention tells which stood together (`equations.token_patches`). Pictures that are found are taken
out: each one's class is read off the classifier and its gradient computed, which leaves that of a
smaller batch (`equations.layers`). What is left, or where block 0 is another one, is searched as
whole pictures. No label need be known.

It needs B (N + 1) < D, exact gradients and pictures without masked patches. Pictures that are not
found are returned as `batch_span` guesses them. `certain` says which were found, `outside` what
share of their layers' inputs lies outside the spans.

`batch_lattice`, uploads of one batch of 8-bit pictures: the lattice of their differences, and every
picture. `batch_span` determines the patches of a batch except for their part in the span S of the
pictures' differences. Decoded pictures are integers, so the integer vectors of S are a lattice,
which the differences generate: LLL finds it, as in `pixel_lattice`. At each position all B patches
are integer vectors a few steps of that lattice apart, and LayerNorm's length tells which they are
(`equations.lattice_pictures`). Borders sort them into pictures (`jigsaw`), and layers' inputs of
the first blocks say where borders are wrong and verify whole pictures. Verified pictures are taken
out of the upload, which leaves a smaller batch. No label need be known.

    attack = find_attack("batch_lattice")                  # one upload, where N B < D
    attack = find_attack("batch_lattice", {"uploads": 2})  # of the same batch, fixed partners

It needs at most 80 differences N (B - 1), R (D - N - 1) >= N (B - 1) for R uploads, exact
gradients, pixels that are multiples of 1/255 and pictures without masked patches; what verifies
pictures needs B (N + 1) < D. `certain` says which are verified; the others are made of the patches
found and, in place of those that are not, the most probable ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from attacks.batch_span import BatchSpanAttack
from attacks.budget import image
from attacks.equations import HEAD, PATCH_SYSTEM, UNKNOWN
from attacks.equations.batches import superposed, too_few_uploads
from attacks.equations.completion import field_energy
from attacks.equations.lattice_pictures import BatchPicture, LatticePictures
from attacks.equations.layers import (
    FOUND,
    LayerSearch,
    LayerSpans,
    StepUpload,
    client_model,
    lacks_layer_spans,
    layers_of,
)
from attacks.equations.patch_system import (
    is_disturbed,
    lacks_gradients,
    lacks_patch_system,
    located,
    patch_system,
    pictures_of,
)
from attacks.equations.token_batches import BatchTokens
from attacks.equations.token_patches import (
    StepTokens,
    lacks_equations,
    lacks_tokens,
    needs_tokens,
)
from attacks.masked_span import MaskedSpan
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.vit import copied


@dataclass(frozen=True)
class LayerSpan(Usual):
    """A search for the pictures of one upload's batch.

    blocks    how many of the first blocks' layers are looked at
    searches  rounds of them before the pictures that are left are guessed
    prior     `fitted`, `stationary`, or the path of a fitted prior
    """

    blocks: Annotated[int, Field(ge=1, le=100)] = 2
    searches: Annotated[int, Field(ge=1, le=10_000)] = 12
    prior: str = "fitted"
    name: ClassVar[str] = "layer_span"
    traits: ClassVar[tuple[str, ...]] = (
        "batches",
        "masks",
        "noise",
        "public photographs",
        "patches",
    )

    @property
    def alone(self) -> MaskedSpan:
        """The attack on one picture a step."""
        return BatchSpanAttack(self.prior).alone

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding, the first blocks' linear layers and
        the classifier; of the unknown embedding for single pictures."""
        return (*self._needed(model), UNKNOWN, *needs_tokens(model))

    def _needed(self, model: MJPVisionTransformer) -> Sequence[str]:
        layers = layers_of(model, self.blocks)
        return (*PATCH_SYSTEM, *(f"{name}.weight" for name in layers), HEAD)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload does not show the spans of its batch, or None."""
        return (
            BatchSpanAttack(self.prior).unsupported(view)
            or lacks_gradients(view, *self._needed(view.model))
            or lacks_layer_spans(view.model, view.updates[0].batch)
        )

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures of every step that are found, and guesses for the others."""
        update, plainly = view.updates[0], BatchSpanAttack(self.prior)
        guesses = plainly.run(view, generator=generator)
        assert guesses.images is not None
        assert guesses.mask is not None
        if update.batch == 1 or is_disturbed(update):
            return guesses
        images, shares = guesses.images.clone(), torch.full((len(guesses.images),), torch.nan)
        model = client_model(view, update)
        for first in range(0, len(images), update.batch):
            places = slice(first, first + update.batch)
            if guesses.mask[first].any():
                continue
            with image(first, update.batch):
                step = StepUpload.of(view, update, first // update.batch, model)
                found = self._pictures(view, first // update.batch, step, generator)
            images[places] = pictures_of(view, torch.stack([each.patches for each in found]))
            shares[places] = torch.tensor([each.outside for each in found])
        facts = {"certain": shares.isfinite().double(), "outside": shares.double()}
        return Reconstruction(
            images, mask=guesses.mask, diagnostics={**guesses.diagnostics, **facts}
        )

    def _pictures(
        self, view: AttackerView, step: int, left: StepUpload, generator: torch.Generator
    ) -> list[_Picture]:
        """The pictures of one step, as many as its batch has, those that were found first."""
        found = list[_Picture]()
        for picture in self._by_tokens(view, step, left):
            found.append(picture)
            if left.update.batch == 1:
                return found
            left = left.without(picture.patches)
        while True:
            update, batch = left.update, left.update.batch
            guess = superposed(view, update, patch_system(view, update), 0, self.prior)
            spans = LayerSpans.of(left.model, left.grads, batch, self.blocks)
            enough = FOUND * torch.finfo(update.dtype).eps ** 2
            if spans is None:
                return [*found, *(_Picture(one) for one in guess.pictures(batch))]
            size = view.model.patch_size
            energy = field_energy(self.prior, size, view.pixels).on(guess.mean.device)
            search = LayerSearch(spans, guess, energy)
            patches_and_share = search.found(batch, self.searches, enough, generator)
            if patches_and_share is None:
                return [*found, *(_Picture(one) for one in guess.pictures(batch))]
            found.append(_Picture(*patches_and_share))
            if batch == 1:
                return found
            left = left.without(patches_and_share[0])

    def _by_tokens(self, view: AttackerView, step: int, left: StepUpload) -> list[_Picture]:
        """The pictures of a step whose tokens are all found, and that their layers verify."""
        if lacks_tokens(view) is not None:
            return []
        model = copied(left.model).double()
        sent = view.updates[0]
        if lacks_equations(model, sent.batch):
            return []
        of_step = StepTokens if sent.batch == 1 else BatchTokens
        pictures = of_step(view, sent, step, model, self.prior, self.blocks).pictures()
        return [_Picture(one.patches, one.outside) for one in pictures if one.is_verified]


@dataclass(frozen=True)
class _Picture:
    """One picture of a batch: normalised patches (N, p), and what share of its layers' inputs lies
    outside their spans; NaN for a guess."""

    patches: Tensor
    outside: float = math.nan


# 8-bit pictures, by a lattice ---------------------------------------------------------------------


@dataclass(frozen=True)
class BatchLattice(Usual):
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
    traits: ClassVar[tuple[str, ...]] = (
        "batches",
        "masks",
        "noise",
        "8 bit",
        "public photographs",
        "patches",
    )

    @property
    def alone(self) -> MaskedSpan:
        """The attack on one picture a step."""
        return BatchSpanAttack(self.prior).alone

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding, the first blocks' linear layers and
        the classifier; of the unknown embedding for single pictures."""
        layers = layers_of(model, self.blocks)
        return (*PATCH_SYSTEM, *(f"{name}.weight" for name in layers), HEAD, UNKNOWN)

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
