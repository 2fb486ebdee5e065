r"""Gradient matching as breaching runs it: the usual attack, to compare the closed forms with.

Inverting Gradients (arXiv 2003.14053) looks for images whose gradient points where the upload does,

    min_x  1 - <g(x), g> / (|g(x)| |g|)  +  tv * TV(x),      0 <= pixels <= 1,

by Adam on the sign of the derivative. APRIL's optimisation variant (arXiv 2112.14087) adds the same
distance for dL/dE_pos alone, which tells patches apart by their position:

    ... + positions * (1 - cos(g_pos(x), g_pos)).

(APRIL's paper measures all gradients by their squared distance; here both attacks use the cosine,
so that they differ in one term only.) It works with any block 0 and any batch size. The attacker
knows the labels; the mask is read off the zero rows of `pos_embed.grad`, in a batch those that are
zero for all of its images. Gradients that were not uploaded are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from attacks.budget import image
from attacks.equations import PATCH, SWIN_TABLE, TABLE, UNKNOWN
from attacks.equations.patch_system import lacks_positions, located, no_gradient, zero_rows
from attacks.equations.pictures import to_unit_range
from attacks.equations.sent_gradients import clip_factors
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Grads, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer

Signed = Literal["hard", "soft", "none"]
Decay = Literal["step-lr", "cosine-decay", "linear", "none"]
Steps = Annotated[int, Field(le=100_000_000)]
Number = Annotated[float, Field(le=1e9)]


@dataclass(frozen=True)
class GradientMatching:
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
    step_size: Number = 0.1
    decay: Decay = "step-lr"
    signed: Signed = "hard"
    tv: Number = 0.2
    positions: Number = field(default=0.0, init=False)
    name: ClassVar[str] = "inverting_gradients"
    traits: ClassVar[tuple[str, ...]] = ("masks", "steps", "any network")
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for option in ("steps", "restarts"):
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise self._refusal(option, "a whole number of at least 1", value)
        if not is_number(self.step_size) or self.step_size <= 0:
            raise self._refusal("step_size", "a number above 0", self.step_size)
        if not is_number(self.tv) or self.tv < 0:
            raise self._refusal("tv", "a number of at least 0", self.tv)
        for option, choices in (("decay", get_args(Decay)), ("signed", get_args(Signed))):
            if getattr(self, option) not in choices:
                raise self._refusal(option, f"one of {', '.join(choices)}", getattr(self, option))

    def _refusal(self, option: str, expected: str, value: object) -> UserError:
        return UserError(f"{self.name}, {option}: expected {expected}, got {value!r}.")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """All gradients but the localization regressor's, which does not depend on the pixels."""
        names = [name for name, _ in model.named_parameters()]
        return [name for name in names if not name.startswith("dal_regressor.")]

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why there is nothing to match: no usable gradient, no labels, or no position table."""
        update = view.updates[0]
        if self.positions and (refusal := _lacks_table(view)) is not None:
            return refusal
        if update.kind != "gradient":
            text = "gradient matching needs a gradient; the upload is a weight difference"
            return Refusal("weight_difference", text)
        if not any(name in update.grads for name in self.needs(view.model) if name != UNKNOWN):
            text = "the upload holds no gradient of any parameter that depends on the images"
            return Refusal("missing_gradient", text)
        if view.labels is None:
            text = "gradient matching needs the labels, and this attacker does not know them"
            return Refusal("labels", text)
        return None

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Match one client step after another; diagnostics hold steps, distance and seconds."""
        return match_each_step(view, partial(self._match, view), generator)

    def _match(
        self, view: AttackerView, grads: Grads, labels: Tensor, mask: Tensor | None, seed: int
    ) -> tuple[Tensor, dict[str, float]]:
        """Match one client step, with torch's global generator seeded for breaching's own draws."""
        from attacks.breaching import match_gradients, optimization_configuration

        device = view.model.like.device
        dtype = view.updates[0].dtype
        configuration = optimization_configuration(dtype, self._changes(), self.tv)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return match_gradients(
                view.model,
                grads,
                labels,
                mask,
                view.pixels,
                configuration,
                positions=(TABLE, self.positions) if self.positions else None,
            )

    def _changes(self) -> Mapping[str, Mapping[str, Any]]:
        """The options that replace breaching's own, in the layout of its configuration."""
        return {
            "restarts": {"num_trials": self.restarts},
            "optim": {
                "max_iterations": self.steps,
                "step_size": self.step_size,
                "step_size_decay": None if self.decay == "none" else self.decay,
                "signed": None if self.signed == "none" else self.signed,
            },
        }


@dataclass(frozen=True)
class AprilOptimization(GradientMatching):
    """The same, with a term for the position embeddings.

    positions  weight of the cosine distance of the position table's gradient alone
    """

    positions: Number = 1.0
    name: ClassVar[str] = "april_optimization"
    traits: ClassVar[tuple[str, ...]] = ("masks", "steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.positions) or self.positions <= 0:
            expected = "a number above 0 (for no such term use inverting_gradients)"
            raise self._refusal("positions", expected, self.positions)


Match = Callable[[Grads, Tensor, Tensor | None, int], tuple[Tensor, dict[str, float]]]
"""From gradients, labels (B,), mask (B, N) and seed of a client step to its normalised images
(B, C, H, W) and facts."""


def match_each_step(view: AttackerView, match: Match, generator: torch.Generator) -> Reconstruction:
    """Match one client step after another; diagnostics hold the facts of each, and seconds."""
    import attacks.breaching  # noqa: F401  (imported before the clock starts)

    update = view.updates[0]
    assert view.labels is not None
    images, masks, facts = [], [], list[dict[str, float]]()
    hidden = _estimated_mask(view, update)
    for step, labels in enumerate(view.labels.split(update.batch)):
        grads = {name: grad[step] for name, grad in update.grads.items()}
        mask = None if hidden is None else hidden[step].expand(len(labels), -1)
        seed = int(torch.randint(2**62, (), generator=generator))
        started = time.monotonic()
        with image(step * update.batch, len(labels)):
            targets = _gradients_of_pixels(view.model, grads, update, mask)
            matched, fact = match(targets, labels, mask, seed)
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


def _lacks_table(view: AttackerView) -> Refusal | None:
    """Why the term for the position table cannot be computed, or None."""
    if (refusal := lacks_positions(view.model)) is not None:
        return refusal
    if TABLE not in view.updates[0].grads:
        return no_gradient(view.model, TABLE)
    return None


def is_number(value: object) -> bool:
    """Whether a value is a finite number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
    model: MJPVisionTransformer, grads: Grads, update: ClientUpdate, mask: Tensor | None
) -> Grads:
    """The gradients that candidate pixels can reproduce: dL/dE_pos without lambda *
    dL_DAL/dE_pos, and dL/dE_unk only where the mask is known."""
    kept = {name: g for name, g in grads.items() if name != UNKNOWN or mask is not None}
    table = SWIN_TABLE if SWIN_TABLE in kept else TABLE
    if update.dal_lambda != 0 and model.dal_regressor is not None and table in kept:
        with torch.enable_grad():
            (extra,) = torch.autograd.grad(model.dal_loss(mask), model.table)
        part = update.dal_lambda * extra
        if update.clipped and update.batch == 1 and table == TABLE and PATCH in kept:
            part = _clipped_part(part, kept, mask)
        kept[table] = kept[table] - part
    return kept


def _clipped_part(part: Tensor, grads: Grads, mask: Tensor | None) -> Tensor:
    """`part` of the table's gradient (1, N+1, D) after the client's gradient clipping."""
    rows, part_rows = grads[TABLE][:, 1:].double(), part[:, 1:].double()
    hidden = torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
    total = grads[PATCH].flatten(1).unsqueeze(0).double()
    return part * clip_factors(rows, part_rows, total, hidden if mask is None else mask).to(part)
