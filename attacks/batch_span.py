r"""What one upload of a batch says of its pictures: all but their differences' span.

`batch_span`. The row space of what the rows of the table's gradient leave of G is the span S of the
pictures' differences, N (B - 1) directions of a patch's p, and of masked patches
(`equations.batches`). Off S all pictures are equal at each position, and the upload gives them
exactly; in S it says nothing of a single picture, and a prior fills it. A step's pictures are
returned as two guesses: first the most probable single picture, close to the smoothest one of the
batch, then, for each of the others, what the most probable mean picture leaves for them. For one
picture a step, and for uploads whose errors are known, this is `masked_span`. It needs N B <= D and
N (B - 1) < p. `known_share` is the share of a patch's directions that is known.

`span_matching` moves what that leaves open, a of C_i + a_i V of all B pictures together, by L-BFGS
in coordinates in which patches of photographs have unit variance, until their gradients are those
that were sent:

    d(x) + prior_weight E(x) / pixels + mean of the squares by which pixels leave [0, 1],
    d(x) = mean over tensors w of  1 - <g_w(x), g_w> / (|g_w(x)| |g_w|).

Each tensor counts the same: over all numbers together the classifier and the last blocks outweigh
the first ones, which say most of the patches. It starts at `batch_span`'s guesses, then at random
pictures of the span. Labels are known, or read off the classifier. `layer_span` finds far more in
less time where it applies; this also takes B (N + 1) >= D, and patches masked in all pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.budget import image, spent
from attacks.equations.batches import Superposition, superposed, too_many_pictures
from attacks.equations.filling import wanted
from attacks.equations.layers import HISTORY, SPREAD, StepUpload, client_model
from attacks.equations.patch_system import (
    black_and_white,
    condition_and_rank,
    is_disturbed,
    lacks_patch_system,
    minimised,
    of_pixels,
    patch_system,
    per_image,
    pictures_of,
)
from attacks.masked_span import MaskedSpan
from mjp_privacy.client.upload import labels_of_batch
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images


@dataclass(frozen=True)
class BatchSpanAttack(Usual):
    """The span of one upload's batch, and a prior.

    prior  `fitted`, `stationary`, or the path of a fitted prior
    """

    prior: str = "fitted"
    name: ClassVar[str] = "batch_span"
    traits = ("single as another", "batches", "masks", "noise", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """What `masked_span` needs; for batches the first two are read."""
        return MaskedSpan(self.prior).needs(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload does not show the span of its batch, or None."""
        return lacks_patch_system(view) or too_many_pictures(view.model, view.updates[0].batch)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Two guesses for the pictures of each step, and what is certain of them."""
        update = view.updates[0]
        if update.batch == 1 or is_disturbed(update):
            return MaskedSpan(self.prior).run(view, generator=generator)
        system = patch_system(view, update)
        patches, left_open = list[Tensor](), list[int]()
        for index, hidden in enumerate(system.hidden):
            with image(index * update.batch, update.batch):
                guess = superposed(view, update, system, index, self.prior)
            patches += [wanted(view, hidden, one) for one in guess.pictures(update.batch)]
            left_open.append(len(guess.basis))
        open_directions = torch.tensor(left_open).double()
        facts = {
            **condition_and_rank(system.rows, update.dtype),
            "open_directions": open_directions,
            "known_share": 1 - open_directions / system.total.shape[-1],
        }
        return Reconstruction(
            pictures_of(view, torch.stack(patches)),
            mask=per_image(view, system.hidden),
            diagnostics={name: per_image(view, fact) for name, fact in facts.items()},
        )


# gradient matching in the span --------------------------------------------------------------------


@dataclass(frozen=True)
class SpanMatching(Usual):
    """Gradient matching for the pictures of one upload's batch, in the span that it leaves open.

    steps         of L-BFGS in each restart
    restarts      starts: `batch_span`'s guesses, then random pictures of the span
    prior         `fitted`, `stationary`, or the path of a fitted prior
    prior_weight  of the prior's energy per pixel beside the gradients' distance
    """

    steps: Annotated[int, Field(ge=1, le=100_000_000)] = 100
    restarts: Annotated[int, Field(ge=1, le=100_000_000)] = 2
    prior: str = "fitted"
    prior_weight: Annotated[float, Field(ge=0, le=1e9)] = 1e-3
    name: ClassVar[str] = "span_matching"
    traits = ("batches", "masks", "noise", "steps", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """All gradients that depend on the pixels."""
        return of_pixels(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why there is no span to match gradients in, no gradient to match, or no label."""
        update = view.updates[0]
        if update.kind != "gradient":
            text = "gradient matching needs a gradient; the upload is a weight difference"
            return Refusal("weight_difference", text)
        if (refusal := BatchSpanAttack(self.prior).unsupported(view)) is not None:
            return refusal
        if view.labels is None and "head.bias" not in update.grads:
            text = (
                "gradient matching needs the labels: this attacker does not know them, and the "
                "upload holds no gradient of head.bias, which tells them"
            )
            return Refusal("labels", text)
        return None

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """The pictures of each step; diagnostics hold the distance of their gradients."""
        update = view.updates[0]
        guesses = BatchSpanAttack(self.prior).run(view, generator=generator)
        if update.batch == 1 or is_disturbed(update):
            return guesses
        system, model = patch_system(view, update), client_model(view, update)
        patches, distances = list[Tensor](), list[float]()
        for index, hidden in enumerate(system.hidden):
            with image(index * update.batch, update.batch):
                step = StepUpload.of(view, update, index, model)
                guess = superposed(view, update, system, index, self.prior)
                found, distance = self._matched(view, step, guess, generator, index)
            patches += [wanted(view, hidden, one) for one in found]
            distances.append(distance)
        facts = {**guesses.diagnostics, "distance": per_image(view, torch.tensor(distances))}
        images = pictures_of(view, torch.stack(patches))
        return replace(guesses, images=images, diagnostics=facts)

    def _matched(
        self,
        view: AttackerView,
        step: StepUpload,
        guess: Superposition,
        generator: torch.Generator,
        index: int,
    ) -> tuple[Tensor, float]:
        """Patches (B, N, p) of one step's pictures, and the distance of their gradients."""
        batch = step.update.batch
        if view.labels is None:
            labels = labels_of_batch(step.grads["head.bias"], batch)
        else:
            labels = view.labels[index * batch : (index + 1) * batch]
        masks = None
        if step.model.unk_embed is not None:
            masks = guess.span.hidden.expand(batch, -1)
        distance = GradientDistance.of(step.model, step.grads, masks)
        fit = _Fit(view, guess, distance, labels, self.prior_weight)
        best, least = guess.pictures(batch), float("inf")
        for number in range(self.restarts):
            if number and spent():
                break
            start = fit.start(batch, generator) if number else fit.ordered(guess.pictures(batch))
            pictures, value = fit.descended(start, self.steps)
            if value < least:
                best, least = pictures, value
        return best, fit.distance_of(best)


@dataclass(frozen=True)
class _Fit:
    """The objective of one step's pictures, in the coordinates of their span."""

    view: AttackerView
    guess: Superposition
    distance: GradientDistance
    labels: Tensor
    prior_weight: float

    def start(self, batch: int, generator: torch.Generator) -> Tensor:
        """Random pictures (B, N, p) of the span, about the mean one."""
        mean, (units, _) = self.guess.mean, self.guess.units
        noise = torch.randn(batch, len(mean), len(units), generator=generator).to(mean)
        return mean + SPREAD * noise @ units

    def ordered(self, pictures: Tensor) -> Tensor:
        """Pictures (B, N, p) in the order, of those that turn them round, that fits the labels."""
        turned = [pictures.roll(places, 0) for places in range(len(pictures))]
        return min(turned, key=self.distance_of)

    def distance_of(self, pictures: Tensor) -> float:
        """The distance of the gradients of pictures (B, N, p)."""
        return float(self.distance(self._seen(pictures), self.labels).detach())

    def descended(self, start: Tensor, steps: int) -> tuple[Tensor, float]:
        """The best pictures (B, N, p) on the way from a start, and the objective there."""
        basis, (units, root) = self.guess.basis, self.guess.units
        known, moves = start - (start @ basis.mT) @ basis, (start @ basis.mT) @ root
        best, least = minimised(
            lambda moves: self._objective(known + moves @ units), moves, steps, HISTORY
        )
        return known + best @ units, least

    def _objective(self, pictures: Tensor) -> Tensor:
        """The objective of pictures (B, N, p)."""
        seen = self._seen(pictures)
        low, high = black_and_white(self.view.pixels, seen)
        outside = (low - seen).relu() + (seen - high).relu()
        field = self.guess.energy
        away = pictures.detach() - field.mean.repeat_interleave(field.patch_size**2)
        pull = torch.stack([field.force(one) for one in away]) / away.numel()
        # Linear in the pictures with the energy's derivative; its value stands beside it.
        energy = (pull * pictures).sum() - (pull * (pictures.detach() - away / 2)).sum()
        distance = self.distance(seen, self.labels).double()
        return distance + self.prior_weight * energy + outside.double().square().mean()

    def _seen(self, pictures: Tensor) -> Tensor:
        """Pictures (B, N, p) as (B, C, H, W) in the model's precision."""
        model = self.distance.model
        return to_images(pictures, model.grid, model.patch_size).to(model.like)


LEAST = 1e-30  # the norm of a gradient that is zero, as of a layer that sees no picture


@dataclass(frozen=True)
class GradientDistance:
    """The distance from what was sent: GradientDistance.of(model, grads, mask)(images, labels)."""

    model: MJPVisionTransformer
    parameters: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]  # (*shape), those that are not zero
    mask: Tensor | None  # (B, N), True where E_unk takes the place of the position

    @classmethod
    def of(
        cls, model: MJPVisionTransformer, grads: Mapping[str, Tensor], mask: Tensor | None
    ) -> GradientDistance:
        """To the gradients (*shape) of one step; `mask` (B, N) where the model can mask."""
        usable = {name: grad for name, grad in grads.items() if float(grad.norm()) > LEAST}
        own = {name: value.detach() for name, value in model.named_parameters() if name in usable}
        dtype = model.like.dtype
        return cls(
            model,
            {name: value.clone().requires_grad_() for name, value in own.items()},
            {name: usable[name].to(dtype) / usable[name].norm().to(dtype) for name in own},
            mask,
        )

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """The distance of normalised images (B, C, H, W) with these labels (B,), differentiable."""
        with sdpa_kernel(SDPBackend.MATH):  # the only kernel that can be differentiated twice
            arguments = (images,) if self.mask is None else (images, self.mask)
            logits = functional_call(self.model, dict(self.parameters), arguments)
            loss = torch.nn.functional.cross_entropy(logits, labels.to(logits.device))
            values = list(self.parameters.values())
            own = torch.autograd.grad(loss, values, create_graph=True, allow_unused=True)
        cosines = [
            (one * sent).sum() / one.norm().clamp_min(LEAST)
            for one, sent in zip(own, self.sent.values(), strict=True)
            if one is not None
        ]
        return 1 - torch.stack(cosines).mean()
