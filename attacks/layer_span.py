r"""One upload of a batch, picture by picture: a search in the span of their differences.

`batch_span` leaves N^2 (B - 1) numbers of a picture open. The weight gradients of the first blocks
say the rest: the inputs of every linear layer lie in the row spaces of their gradients
(`equations.layer_spans`), which a picture of the batch passes to rounding and a mixture does not.
A search (`equations.layer_search`) finds one picture after another. Each one's gradient is then
computed, its class being read off the classifier, and taken out of the upload, which leaves that of
a smaller batch (`equations.peeling`); the last picture is solved for. No label need be known.

It needs B (N + 1) < D, exact gradients and pictures without masked patches. Pictures that are not
found are returned as `batch_span` guesses them. `certain` says which were found, `outside` what
share of their layers' inputs lies outside the spans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from attacks.batch_span import BatchSpanAttack
from attacks.equations.completion import field_energy
from attacks.equations.layer_search import LayerSearch
from attacks.equations.layer_spans import LayerSpans, lacks_layer_spans, layers_of
from attacks.equations.names import HEAD, TABLE, UNKNOWN
from attacks.equations.patch_system import gradient, is_disturbed, patch_system, weights
from attacks.equations.peeling import class_of, without
from attacks.equations.pictures import pictures_of
from attacks.equations.requirements import lacks_gradients, needs_patch_system
from attacks.equations.superposition import Superposition, superposed
from mjp_privacy.core.budget import image
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images

FOUND = 1e5
"""Times the precision of the gradients, squared, that may lie outside for a picture to count as
found: a patch that is off by one part in 10^4 leaves as much."""


@dataclass(frozen=True)
class LayerSpan:
    """A search for the pictures of one upload's batch.

    blocks    how many of the first blocks' layers are looked at
    searches  for each picture, before it is guessed
    prior     `fitted`, `stationary`, or the path of a fitted prior
    """

    blocks: Annotated[int, Field(ge=1, le=100)] = 2
    searches: Annotated[int, Field(ge=1, le=10_000)] = 12
    prior: str = "fitted"
    name: ClassVar[str] = "layer_span"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table, the patch embedding, the first blocks' linear layers and
        the classifier; of the unknown embedding for single pictures."""
        layers = layers_of(model, self.blocks)
        return (*needs_patch_system(model), *(f"{name}.weight" for name in layers), HEAD, UNKNOWN)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload does not show the spans of its batch, or None."""
        return (
            BatchSpanAttack(self.prior).unsupported(view)
            or lacks_gradients(view, *self.needs(view.model)[:-1])
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
        model = _client_model(view, update)
        for first in range(0, len(images), update.batch):
            places = slice(first, first + update.batch)
            if guesses.mask[first].any():
                continue
            with image(first, update.batch):
                step = update.part(slice(first // update.batch, first // update.batch + 1))
                found = self._pictures(view, model, step, generator)
            images[places] = pictures_of(view, torch.stack([each.patches for each in found]))
            shares[places] = torch.tensor([each.outside for each in found])
        facts = {"certain": shares.isfinite().double(), "outside": shares.double()}
        return Reconstruction(
            images, mask=guesses.mask, diagnostics={**guesses.diagnostics, **facts}
        )

    def _pictures(
        self,
        view: AttackerView,
        model: MJPVisionTransformer,
        update: ClientUpdate,
        generator: torch.Generator,
    ) -> list[_Picture]:
        """The pictures of one step, as many as its batch has, those that were found first."""
        found, batch = list[_Picture](), update.batch
        grads = {name: gradient(view, update, name)[0] for name in update.grads}
        rows = patch_system(view, update).rows  # without what no picture has part in, such as L_DAL
        grads[TABLE] = torch.cat((grads[TABLE][:, :1], rows), 1)
        while True:
            sent = {name: sent.unsqueeze(0) for name, sent in grads.items()}
            left = replace(update, kind="gradient", grads=sent, batch=batch, dal_lambda=0.0)
            guess = superposed(view, left, patch_system(view, left), 0, self.prior)
            spans = LayerSpans.of(model, grads, batch, self.blocks)
            picture = None if spans is None else self._one(view, spans, guess, left, generator)
            if picture is None:
                return [*found, *(_Picture(one) for one in guess.pictures(batch))]
            found.append(picture)
            if batch == 1:
                return found
            seen = to_images(picture.patches, model.patch_size, len(view.pixels.mean))
            label = class_of(model, seen, grads, batch)
            grads, batch = without(model, grads, seen, label, batch), batch - 1

    def _one(
        self,
        view: AttackerView,
        spans: LayerSpans,
        guess: Superposition,
        update: ClientUpdate,
        generator: torch.Generator,
    ) -> _Picture | None:
        """A picture of the batch, or None where no search finds one."""
        enough = FOUND * torch.finfo(update.dtype).eps ** 2
        energy = field_energy(self.prior, view.model.patch_size, view.pixels).on(guess.mean.device)
        search = LayerSearch(spans, guess, energy)
        found = search.found(update.batch, self.searches, enough, generator)
        return None if found is None else _Picture(*found)


@dataclass(frozen=True)
class _Picture:
    """One picture of a batch: normalised patches (N, p), and what share of its layers' inputs lies
    outside their spans; NaN for a guess."""

    patches: Tensor
    outside: float = math.nan


def _client_model(view: AttackerView, update: ClientUpdate) -> MJPVisionTransformer:
    """A copy of the model with the weights that the client used; none is differentiated."""
    model = deepcopy(view.model).requires_grad_(False)
    with torch.no_grad():
        for name, value in weights(view, update).items():
            model.get_parameter(name).copy_(value)
    return model
