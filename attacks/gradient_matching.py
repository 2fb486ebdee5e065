r"""Gradient matching as breaching runs it: the usual attack, to compare the closed forms with.

Inverting Gradients (arXiv 2003.14053) looks for images whose gradient points where the upload does,

    min_x  1 - <g(x), g> / (|g(x)| |g|)  +  tv * TV(x),      0 <= pixels <= 1,

by Adam on the sign of the derivative. APRIL's optimisation variant (arXiv 2112.14087) adds the same
distance for dL/dE_pos alone, which tells patches apart by their position:

    ... + positions * (1 - cos(g_pos(x), g_pos)).

(Its paper measures all gradients by their squared distance; here both attacks use the cosine, so
that they differ in one term only.) The attacker knows the labels; the mask is read off the zero
rows of `pos_embed.grad`, in a batch those that are zero for all of its images.

GradViT (Hatamizadeh et al., CVPR 2022, arXiv 2203.11894; its code is not public) looks for

    min_x  sum_l |g_l(x) - g_l|^2 + image prior + steps across patch borders + TV + |x|^2,

the gradients alone first and the image prior later, from several seeds that are drawn towards what
they agree in. Here breaching's loop does it, each part a switch, with differences:

- The energy of a Gaussian field (`attacks.prior`) stands in place of a distance to the batch-norm
  statistics of a convolutional network, of which none comes with this package.
- The squared distance is in units of the upload's norm and terms are means, so that weights do not
  depend on the model. They are ours, and so is the schedule in two halves.
- Defaults are what a CPU's budget favours: the cosine distance, and one seed.
- Seeds come together once, after half of the steps: they are registered on the best of them, and
  each goes on with a term towards their mean. Masked patches are registered by assignment.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from attacks.budget import image, spent
from attacks.equations import SWIN_TABLE, TABLE, UNKNOWN
from attacks.equations.completion import field_energy
from attacks.equations.patch_system import (
    lacks_positions,
    localization_part,
    located,
    no_gradient,
    of_pixels,
    patch_rows,
    to_unit_range,
    zero_rows,
)
from attacks.jigsaw import in_the_order_of, placed_as, shifted_onto
from attacks.prior import check_prior
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Grads, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer

if TYPE_CHECKING:
    from attacks.breaching import Term

Signed = Literal["hard", "soft", "none"]
Decay = Literal["step-lr", "cosine-decay", "linear", "none"]
Steps = Annotated[int, Field(ge=1, le=100_000_000)]
Number = Annotated[float, Field(ge=0, le=1e9)]
AboveZero = Annotated[float, Field(gt=0, le=1e9)]


class Matching(Usual, ABC):
    """What attacks that match gradients by breaching's loop have in common."""

    positions: float = 0.0
    """Weight of the cosine distance of the position table's gradient alone."""

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """All gradients that depend on the pixels."""
        return of_pixels(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why there is nothing to match: no usable gradient, no labels, or no position table."""
        update = view.updates[0]
        if self.positions and (refusal := lacks_positions(view.model)) is not None:
            return refusal
        if self.positions and TABLE not in update.grads:
            return no_gradient(view.model, TABLE)
        if update.kind != "gradient":
            text = "gradient matching needs a gradient; the upload is a weight difference"
            return Refusal("weight_difference", text)
        if not any(name in update.grads for name in self.needs(view.model) if name != UNKNOWN):
            text = "the upload holds no gradient of any parameter that depends on the images"
            return Refusal("missing_gradient", text)
        if view.labels is None:
            text = "gradient matching needs the labels, and this attacker does not know them"
            return Refusal("labels", text)
        if len(view.pixels.mean) != 3:
            return Refusal("model", "breaching's total variation is of pictures in colour")
        return None

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Match one client step after another; diagnostics hold steps, distance and seconds."""
        import attacks.breaching  # noqa: F401  (imported before the clock starts)

        update, device = view.updates[0], view.model.like.device
        assert view.labels is not None
        images, masks, facts = [], [], list[dict[str, float]]()
        hidden = _estimated_mask(view, update)
        for step, labels in enumerate(view.labels.split(update.batch)):
            own = None if hidden is None else hidden[step]
            mask = None if own is None else own.expand(len(labels), -1)
            seed = int(torch.randint(2**62, (), generator=generator))
            started = time.monotonic()
            devices = [device] if device.type == "cuda" else []
            with image(step * update.batch, len(labels)), torch.random.fork_rng(devices=devices):
                torch.manual_seed(seed)
                targets = _gradients_of_pixels(view, update, step, own)
                matched, fact = self._match(view, targets, labels, mask)
            seconds = (time.monotonic() - started) / len(labels)
            images.append(matched)
            masks.append(mask)
            facts += [fact | {"seconds": seconds}] * len(labels)
        located_masks = [mask for mask in masks if mask is not None]
        return Reconstruction(
            to_unit_range(view, torch.cat(images)),
            mask=torch.cat(located_masks) if located_masks else None,
            diagnostics={
                key: torch.tensor([fact[key] for fact in facts], dtype=torch.float64)
                for key in facts[0]
            },
        )

    @abstractmethod
    def _match(
        self, view: AttackerView, grads: Grads, labels: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Match one client step; the global generator that breaching draws from is seeded."""


@dataclass(frozen=True)
class GradientMatching(Matching):
    """Cosine distance of all uploaded gradients, and total variation.

    steps      optimiser steps in each restart
    restarts   starts from noise; the one with the smallest cosine distance is kept
    step_size  Adam's step size, in the model's normalised pixels
    decay      of the step size: `step-lr` is breaching's, to a tenth at 3/8, 5/8 and 7/8
    signed     whether the optimiser sees the derivative's sign (`hard`), a softened sign (`soft`)
               or the derivative itself (`none`)
    tv         weight of the total variation; 0.2 is breaching's, for large ResNets
    """

    steps: Steps = 2000
    restarts: Steps = 1
    step_size: AboveZero = 0.1
    decay: Decay = "step-lr"
    signed: Signed = "hard"
    tv: Number = 0.2
    name: ClassVar[str] = "inverting_gradients"
    traits: ClassVar[tuple[str, ...]] = ("masks", "steps", "any network")

    def _match(
        self, view: AttackerView, grads: Grads, labels: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Match one client step."""
        from attacks.breaching import CosineWithPositions, match_gradients

        objective = None
        if self.positions:
            names = [name for name, _ in view.model.named_parameters() if name in grads]
            objective = CosineWithPositions(names.index(TABLE), self.positions)
        changes: dict[str, dict[str, Any]] = {
            "restarts": {"num_trials": self.restarts},
            "optim": {
                "max_iterations": self.steps,
                "step_size": self.step_size,
                "step_size_decay": None if self.decay == "none" else self.decay,
                "signed": None if self.signed == "none" else self.signed,
            },
            "regularization": {"total_variation": {"scale": self.tv}},
        }
        given = view.model, grads, labels, mask, view.pixels, view.updates[0].dtype, changes
        return match_gradients(*given, objective=objective)


@dataclass(frozen=True)
class AprilOptimization(GradientMatching):
    """The same, with a term for the position embeddings.

    positions  weight of the cosine distance of the position table's gradient alone
    """

    positions: AboveZero = 1.0
    name: ClassVar[str] = "april_optimization"
    traits: ClassVar[tuple[str, ...]] = ("masks", "steps")


def _estimated_mask(view: AttackerView, update: ClientUpdate) -> Tensor | None:
    """(n, N) bool, True where E_unk took the place of the patch's position embedding; None where
    the upload cannot show it."""
    if view.model.unk_embed is None:
        return None
    if SWIN_TABLE in update.grads:
        return zero_rows(update.grads[SWIN_TABLE][:, 0])
    if TABLE not in update.grads:
        return None
    return located(view, update)


def _gradients_of_pixels(
    view: AttackerView, update: ClientUpdate, step: int, mask: Tensor | None
) -> Grads:
    """The gradients of one step that candidate pixels can reproduce: dL/dE_pos without lambda *
    dL_DAL/dE_pos, and dL/dE_unk only where the mask (N,) is known."""
    model = view.model
    alone = update.part(slice(step, step + 1))
    kept = {name: g[0] for name, g in alone.grads.items() if name != UNKNOWN or mask is not None}
    if not update.dal_lambda or model.dal_regressor is None:
        return kept
    if SWIN_TABLE in kept:
        with torch.enable_grad():
            (extra,) = torch.autograd.grad(model.dal_loss(mask), model.table)
        kept[SWIN_TABLE] = kept[SWIN_TABLE] - update.dal_lambda * extra
    elif TABLE in kept:
        rows = patch_rows(model, alone.grads[TABLE]).double()
        hidden = torch.zeros_like(rows[..., 0], dtype=torch.bool) if mask is None else mask[None]
        part = localization_part(view, alone, rows, hidden).to(kept[TABLE])
        kept[TABLE] = kept[TABLE] - torch.nn.functional.pad(part, (0, 0, 1, 0))
    return kept


# with what GradViT adds ---------------------------------------------------------------------------


Distance = Literal["cosine", "squared"]
Schedule = Literal["gradient_first", "together"]
Search = tuple[Tensor, dict[str, float]]
"""Normalised pictures (B, C, H, W), and the search's steps and cosine distance."""


@dataclass(frozen=True)
class GradViT(Matching):
    """Distance of gradients, image terms, and the consensus of several seeds.

    steps         optimiser steps of each seed; the step size decays by a cosine over them
    step_size     Adam's step size, in the model's normalised pixels
    distance      of gradients: `cosine` as in inverting_gradients, or GradViT's `squared`
    tv            weight of the total variation; 0 switches this and each of the next three off
    l2            weight of the mean square of the normalised pixels
    borders       weight of the steps across patch borders
    prior_weight  weight of the image prior's energy per value
    image_prior   `fitted`, `stationary`, the path of a prior's file (`mjp fit-prior`), or `none`
    schedule      `gradient_first`: the image prior joins after half of the steps; or `together`
    seeds         searches from different noise; the one with the smallest cosine distance is kept
    consensus     weight of the term that draws seeds towards their mean; 0: they stay apart
    registration  whether seeds are laid on one another before their mean is taken
    """

    steps: Steps = 2000
    step_size: AboveZero = 0.1
    distance: Distance = "cosine"
    tv: Number = 0.2
    l2: Number = 1e-3
    borders: Number = 0.1
    prior_weight: Number = 3e-3
    image_prior: str = "fitted"
    schedule: Schedule = "gradient_first"
    seeds: Steps = 1
    consensus: Number = 0.1
    registration: bool = True
    name: ClassVar[str] = "gradvit"
    traits: ClassVar[tuple[str, ...]] = ("masks", "steps", "public photographs")

    def __post_init__(self) -> None:
        if self.image_prior != "none":
            check_prior(self.image_prior)

    def _match(
        self, view: AttackerView, grads: Grads, labels: Tensor, mask: Tensor | None
    ) -> Search:
        """The best seed's pictures of one client step, and the steps of all seeds."""
        from attacks.breaching import Near, SquaredDistance, match_gradients

        changes: dict[str, dict[str, Any]] = {
            "optim": {
                "max_iterations": self.steps,
                "step_size": self.step_size,
                "step_size_decay": "cosine-decay",
                "signed": None,
            },
            "regularization": {
                "total_variation": {"scale": self.tv},
                "norm": {"scale": 2 * self.l2, "pnorm": 2},  # it takes the half
            },
        }
        search = partial(
            match_gradients,
            *(view.model, grads, labels, mask, view.pixels, view.updates[0].dtype, changes),
            objective=SquaredDistance() if self.distance == "squared" else None,
        )
        early, late = self._terms(view)
        meeting = self.seeds > 1 and self.consensus > 0
        first = range(self.steps // 2 if meeting or early is not late else self.steps)
        searches, seed = list[Search](), torch.initial_seed()
        for number in range(self.seeds):
            torch.manual_seed(seed + number)
            searches.append(search(part=first, terms=early))
            if spent():
                break
        steps = sum(facts["steps"] for _, facts in searches)
        searches = [found for found in searches if _distance(found) < math.inf] or searches[:1]
        if first.stop < self.steps and _distance(searches[0]) < math.inf and not spent():
            starts = [pictures for pictures, _ in searches]
            if meeting and len(searches) > 1:
                starts, mean = self._agreement(searches, labels, mask, view.model.patch_size)
                late = [*late, Near(self.consensus, mean)]
            rest = partial(search, part=range(first.stop, self.steps), terms=late)
            searches = [rest(start=start) for start in starts]
            steps += sum(facts["steps"] for _, facts in searches)
        pictures, facts = min(searches, key=_distance)
        return pictures, facts | {"steps": steps}

    def _terms(self, view: AttackerView) -> tuple[list[Term], list[Term]]:
        """The terms of the first half of the steps, and of the second."""
        from attacks.breaching import Borders, FieldPrior

        patch_size = view.model.patch_size
        always: list[Term] = [Borders(self.borders, patch_size)] if self.borders > 0 else []
        if self.image_prior == "none" or self.prior_weight == 0:
            return always, always
        energy = field_energy(self.image_prior, patch_size, view.pixels)
        both = [*always, FieldPrior(self.prior_weight, energy)]
        return (both if self.schedule == "together" else always), both

    def _agreement(
        self, searches: Sequence[Search], labels: Tensor, mask: Tensor | None, patch_size: int
    ) -> tuple[list[Tensor], Tensor]:
        """Where each seed goes on from, and the mean of all (B, C, H, W).

        Pictures of one label and masked patches that change places leave the gradient as it was,
        so seeds go on from there; a shift does not, and counts for the mean alone.
        """
        pictures = [found for found, _ in searches]
        if not self.registration:
            return pictures, torch.stack(pictures).mean(0)
        best = min(searches, key=_distance)[0]
        starts, lying = [], []
        for found in pictures:
            start = in_the_order_of(found, best, labels)
            if mask is not None:
                places = zip(start, best, mask, strict=True)
                start = torch.stack([placed_as(*place, patch_size) for place in places])
            starts.append(start)
            shifted = [shifted_onto(*pair) for pair in zip(start, best, strict=True)]
            lying.append(torch.stack(shifted))
        return starts, torch.stack(lying).mean(0)


def _distance(search: Search) -> float:
    """How far a search's gradient is from the upload; infinite where it broke down."""
    distance = search[1]["cosine_distance"]
    return distance if math.isfinite(distance) else math.inf
