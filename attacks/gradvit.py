r"""Gradient matching with what GradViT adds to it, each of it a switch.

GradViT (Hatamizadeh et al., CVPR 2022, arXiv 2203.11894; its code is not public) looks for

    min_x  sum_l |g_l(x) - g_l|^2 + image prior + steps across patch borders + TV + |x|^2,

the gradients alone first and the image prior later, from several seeds that are drawn towards what
they agree in. Here breaching's loop does it, as for `inverting_gradients`, with differences:

- GradViT's image prior is the distance to the batch-norm statistics of a convolutional network that
  was trained on photographs. None comes with this package; the energy of a Gaussian field
  (`attacks.prior`) stands in its place.
- The squared distance is in units of the upload's norm and terms are means, so that weights do not
  depend on the model. They are ours, and so is the schedule in two halves.
- What the budget of a CPU shows decides what is on where no option is given: the cosine distance,
  and one seed. GradViT's own choice is `distance: squared` and several `seeds`.
- Seeds come together once, after half of the steps: they are registered on the best of them, and
  each goes on with a term towards their mean. Under MJP the masked patches have no place in the
  gradient; they are registered by assignment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.completion import field_energy
from attacks.gradient_matching import GradientMatching, Number, Steps, is_number, match_each_step
from attacks.jigsaw import in_the_order_of, placed_as, shifted_onto
from attacks.prior import check_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Grads, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer

if TYPE_CHECKING:
    from attacks.breaching import Term

Distance = Literal["cosine", "squared"]
Schedule = Literal["gradient_first", "together"]
Search = tuple[Tensor, dict[str, float]]
"""Normalised pictures (B, C, H, W), and the search's steps and cosine distance."""


@dataclass(frozen=True)
class GradViT:
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
    step_size: Number = 0.1
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
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for option in ("steps", "seeds"):
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise self._refusal(option, "a whole number of at least 1", value)
        if not is_number(self.step_size) or self.step_size <= 0:
            raise self._refusal("step_size", "a number above 0", self.step_size)
        for option in ("tv", "l2", "borders", "prior_weight", "consensus"):
            value = getattr(self, option)
            if not is_number(value) or value < 0:
                raise self._refusal(option, "a number of at least 0", value)
        for option, choices in (("distance", Distance), ("schedule", Schedule)):
            if getattr(self, option) not in get_args(choices):
                expected = f"one of {', '.join(get_args(choices))}"
                raise self._refusal(option, expected, getattr(self, option))
        if not isinstance(self.image_prior, str):
            expected = "fitted, stationary, none or the path of a prior's file"
            raise self._refusal("image_prior", expected, self.image_prior)
        if self.image_prior != "none":
            check_prior(self.image_prior)

    def _refusal(self, option: str, expected: str, value: object) -> UserError:
        return UserError(f"{self.name}, {option}: expected {expected}, got {value!r}.")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """All gradients that depend on the pixels."""
        return GradientMatching().needs(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why there is nothing to match."""
        return GradientMatching().unsupported(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Match one client step after another; diagnostics hold steps, distance and seconds."""
        return match_each_step(view, partial(self._match, view), generator)

    def _match(
        self, view: AttackerView, grads: Grads, labels: Tensor, mask: Tensor | None, seed: int
    ) -> Search:
        """The best seed's pictures of one client step, and the steps of all seeds."""
        from attacks.breaching import (
            Near,
            SquaredDistance,
            match_gradients,
            optimization_configuration,
        )

        search = partial(
            match_gradients,
            *(view.model, grads, labels, mask, view.pixels),
            optimization_configuration(view.updates[0].dtype, self._changes(), self.tv),
            objective=SquaredDistance() if self.distance == "squared" else None,
        )
        early, late = self._terms(view)
        meeting = self.seeds > 1 and self.consensus > 0
        first = range(self.steps // 2 if meeting or early is not late else self.steps)
        device = view.model.like.device
        searches = list[Search]()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
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

    def _changes(self) -> dict[str, dict[str, Any]]:
        """What replaces breaching's own configuration, in its layout."""
        return {
            "optim": {
                "max_iterations": self.steps,
                "step_size": self.step_size,
                "step_size_decay": "cosine-decay",
                "signed": None,
            },
            "regularization": {"norm": {"scale": 2 * self.l2, "pnorm": 2}},  # it takes the half
        }

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
