r"""Pictures by what the layers of the first blocks are given: token by token, as whole pictures, or
by a lattice; `certain` says which of them their layers' inputs verify.

`token_peeling`, one upload. Tokens are taken out of the gradients of block 0's layers one after
another (`equations.token_peeling`); each one's few equations give its patch and its place
(`equations.token_patches`). Neither the position table's gradient, a prior, labels nor whole pixel
values are needed, and masked patches are as exact as others. Their order is not in the gradient:
borders tell it (`jigsaw`), or, without a table, attention (`equations.attention`), which tells the
pictures of a batch apart, too. Without the patch embedding's gradient patches with fewer values
than the embedding is wide stay exact; of larger ones the prior says the rest. It needs
B (N + 1) < D tokens that gradients show above their rounding: those of trained networks, and of
networks that pool all tokens. Where tokens are missing, the prior fills their patches. With masked
patches no picture is certain.

`layer_span`, one upload of a batch. Pictures whose tokens are all found are taken out; what is
left, or where block 0 is another one, is searched as whole pictures whose layers' inputs lie in the
row spaces of their gradients (`equations.layers`). No label need be known. It needs B (N + 1) < D,
exact gradients and nothing masked. Pictures that are not found are returned as `batch_span` guesses
them. `outside` is the share of layers' inputs outside the spans.

`batch_lattice`, uploads of one batch of 8-bit pictures. `batch_span` determines the patches of a
batch except for their part in the span S of the pictures' differences, whose integer vectors are a
lattice that LLL finds. At each position all B patches are integer vectors a few steps of it apart,
and LayerNorm's length tells which (`equations.lattice_pictures`). Borders sort them into pictures,
layers' inputs correct and verify these, and verified pictures are taken out of the upload.

    attack = find_attack("batch_lattice")                  # one upload, where N B < D
    attack = find_attack("batch_lattice", {"uploads": 2})  # of the same batch, fixed partners

It needs at most 80 differences N (B - 1), R (D - N - 1) >= N (B - 1) for R uploads, exact
gradients, pixels that are multiples of 1/255 and nothing masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from attacks.batch_span import BatchSpanAttack
from attacks.budget import image
from attacks.equations import HEAD, PATCH_SYSTEM, UNKNOWN
from attacks.equations.batches import superposed, too_few_uploads
from attacks.equations.filling import wanted
from attacks.equations.lattice_pictures import BatchPicture, LatticePictures
from attacks.equations.layers import (
    LayerSearch,
    LayerSpans,
    StepUpload,
    client_model,
    lacks_layer_spans,
    layers_of,
)
from attacks.equations.patch_system import (
    certain_of,
    is_disturbed,
    lacks_gradients,
    lacks_patch_system,
    lacks_positions,
    located,
    patch_system,
    pictures_of,
)
from attacks.equations.token_batches import token_pictures
from attacks.equations.token_patches import StepPicture, lacks_equations, lacks_tokens, needs_tokens
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.vit import copied


@dataclass(frozen=True)
class TokenPeeling(Usual):
    """All tokens of a step by block 0's equations.

    prior  of the patches that are not found: `fitted`, `stationary`, or the path of a fitted prior
    """

    prior: str = "fitted"
    name: ClassVar[str] = "token_peeling"
    traits: ClassVar[tuple[str, ...]] = ("masks", "batches", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> tuple[str, ...]:
        """Gradients of block 0's layers behind its attention; where they are sent, of the patch
        embedding and, to verify, of the first blocks' linear layers."""
        return needs_tokens(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why no token can be found in the upload, or None."""
        return lacks_tokens(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures of every step."""
        update = view.updates[0]
        model = client_model(view, update).double()
        if why := lacks_equations(model, update.batch):
            places = range(update.steps_in_all * update.batch)
            return Reconstruction(None, inapplicable=dict.fromkeys(places, why))
        found = list[StepPicture]()
        for step in range(update.steps_in_all):
            with image(step * update.batch, update.batch):
                found += token_pictures(view, update, step, model, self.prior)
        can_mask = view.model.unk_embed is not None  # else what is hidden has no position
        images = [wanted(view, one.hidden & can_mask, one.patches) for one in found]
        known = [one.token >= 0 for one in found]
        masks = can_mask and view.model.pos_embed is not None
        orders = torch.stack([one.order for one in found]) if masks else None
        return Reconstruction(
            pictures_of(view, torch.stack(images)),
            mask=torch.stack([one.hidden for one in found]) if masks else None,
            permutation=orders if view.against == "plain" else None,
            diagnostics={
                **certain_of(
                    view,
                    torch.stack([one.patches for one in found]),
                    torch.tensor([one.is_verified for one in found]),
                ),
                "outside": torch.tensor([one.outside for one in found]).double(),
                "patches_found": torch.stack(known).double().mean(1),
                "token_misfit": torch.tensor([one.misfit for one in found]).double(),
            },
        )


# whole pictures ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSpan(Usual):
    """A search for the pictures of one upload's batch.

    searches  rounds of them before the pictures that are left are guessed
    prior     `fitted`, `stationary`, or the path of a fitted prior
    """

    searches: Annotated[int, Field(ge=1, le=10_000)] = 12
    prior: str = "fitted"
    name: ClassVar[str] = "layer_span"
    traits = ("single as another", "batches", "masks", "noise", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding, the first blocks' linear layers and
        the classifier; of the unknown embedding for single pictures."""
        return (*_verifying(model), UNKNOWN, *needs_tokens(model))

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload does not show the spans of its batch, or None."""
        return (
            lacks_positions(view.model)
            or lacks_layer_spans(view.model, view.updates[0].batch)  # it needs fewer patches yet
            or BatchSpanAttack(self.prior).unsupported(view)
            or _lacks_layers(view)
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
        patches = torch.zeros_like(to_patches(images, view.model.patch_size)).double()
        model = client_model(view, update)
        for first in range(0, len(images), update.batch):
            places = slice(first, first + update.batch)
            if guesses.mask[first].any():
                continue
            with image(first, update.batch):
                step = StepUpload.of(view, update, first // update.batch, model)
                found = self._pictures(view, first // update.batch, step, generator)
            patches[places] = torch.stack([each.patches for each in found])
            images[places] = pictures_of(view, patches[places])
            shares[places] = torch.tensor([each.outside for each in found])
        facts = {**certain_of(view, patches, shares.isfinite()), "outside": shares.double()}
        return Reconstruction(
            images, mask=guesses.mask, diagnostics={**guesses.diagnostics, **facts}
        )

    def _pictures(
        self, view: AttackerView, step: int, left: StepUpload, generator: torch.Generator
    ) -> list[BatchPicture]:
        """The pictures of one step, as many as its batch has, those that were found first."""
        found, sent, exact = list[BatchPicture](), view.updates[0], copied(left.model).double()
        read = lacks_tokens(view) is None and not lacks_equations(exact, sent.batch)
        for picture in token_pictures(view, sent, step, exact, self.prior) if read else ():
            if not picture.is_verified:
                continue
            found.append(BatchPicture(picture.patches, picture.outside))
            if left.update.batch == 1:
                return found
            left = left.without(picture.patches)
        while True:
            update, batch = left.update, left.update.batch
            guess = superposed(view, update, patch_system(view, update), 0, self.prior)
            spans = LayerSpans.of(left.model, left.grads, batch, update.dtype)
            made = None
            if spans is not None:
                made = LayerSearch(spans, guess).found(self.searches, generator)
            if made is None:
                return [*found, *map(BatchPicture, guess.pictures(batch))]
            found.append(BatchPicture(*made))
            if batch == 1:
                return found
            left = left.without(found[-1].patches)


# 8-bit pictures, by a lattice ---------------------------------------------------------------------


@dataclass(frozen=True)
class BatchLattice(Usual):
    """The pictures of a batch by the lattice of their differences.

    uploads  how many rounds of the same batch it reads; the weights may move between them
    most     with more differences N (B - 1) than this no lattice is tried
    prior    `fitted`, `stationary`, or the path of a fitted prior
    """

    uploads: Annotated[int, Field(ge=1, le=1000)] = 1
    most: Annotated[int, Field(ge=1, le=1000)] = 80
    prior: str = "fitted"
    name: ClassVar[str] = "batch_lattice"
    traits = (
        "single as another",
        "batches",
        "masks",
        "noise",
        "8 bit",
        "public photographs",
        "patches",
    )

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding, the first blocks' linear layers and
        the classifier; of the unknown embedding for single pictures."""
        return (*_verifying(model), UNKNOWN)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the uploads do not show the lattice of their batch, or None."""
        batch = view.updates[0].batch
        refusal = lacks_patch_system(view) or _lacks_layers(view)
        if refusal is not None or batch == 1:
            return refusal
        return too_few_uploads(view.model, batch, len(view.updates), self.most)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures of every step."""
        first = view.updates[0]
        masked = any(bool(located(view, update).any()) for update in view.updates)
        if first.batch == 1 or masked or any(map(is_disturbed, view.updates)):
            return BatchSpanAttack(self.prior).run(view, generator=generator)
        search = LatticePictures(view, self.prior)
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
                **certain_of(view, patches, outside.isfinite()),
                "outside": outside,
                "lattice_found": torch.tensor([float(one.by_lattice) for one in found]).double(),
            },
        )


def _verifying(model: MJPVisionTransformer) -> Sequence[str]:
    """Gradients of a batch's span, of the classifier, and of the layers that verify pictures."""
    return (*PATCH_SYSTEM, HEAD, *(f"{name}.weight" for name in layers_of(model)))


def _lacks_layers(view: AttackerView) -> Refusal | None:
    """Why nothing verifies pictures, or tells the others without them, or None: of the layers those
    that are not frozen do."""
    first, second, head, *layers = _verifying(view.model)
    refusal = lacks_gradients(view, first, second, head)
    if refusal is None and any(update.grads.keys().isdisjoint(layers) for update in view.updates):
        refusal = lacks_gradients(view, *layers)
    return refusal
