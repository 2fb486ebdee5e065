"""breaching's OptimizationBasedAttacker on named gradients. Import it late: that takes seconds.

breaching differentiates `model.parameters()` and pairs the results with the uploaded gradients by
their place in the list, so it gets a wrapper whose parameters are the uploaded ones in that order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.breaching.closed_form import server_payload
from attacks.breaching.parts import breaching_folder, parts_of_breaching
from attacks.budget import spent
from mjp_privacy.interfaces import Grads, Pixels
from mjp_privacy.models import MJPVisionTransformer

with parts_of_breaching():
    from breaching.attacks.auxiliaries.objectives import CosineSimilarity
    from breaching.attacks.optimization_based_attack import OptimizationBasedAttacker


class UploadedParameters(nn.Module):
    """The model with a fixed mask, whose `parameters()` are those in `names` and in that order."""

    mask: Tensor | None

    def __init__(
        self, model: MJPVisionTransformer, names: Sequence[str], mask: Tensor | None
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.model = copy.deepcopy(model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self.names)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of normalised images under the fixed mask."""
        return self.model(x, self.mask)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters in `names`, in that order: breaching pairs by place."""
        return (self.model.get_parameter(name) for name in self.names)


class InTime(OptimizationBasedAttacker):
    """Stops where the time of the images is over (`core.budget`), with the best ones so far:
    breaching ends a trial at a loss that is no number.

    With a `part` of its steps it does those alone, its step size being what it is at that part of
    the whole: range(100, 200) of 200 is the second half.
    """

    part: range | None = None

    def _done(self) -> int:
        """How many steps lie before the part."""
        return 0 if self.part is None else self.part.start

    def _init_optimizer(self, candidate: Sequence[Tensor]) -> tuple[Any, Any]:
        """Adam and the decay of its step size, moved on to where the part begins."""
        optimizer, schedule = super()._init_optimizer(candidate)
        for tensor in candidate:
            tensor.grad = None  # breaching's zeros would enter Adam's means
        for _ in range(self._done()):
            optimizer.step()  # so this does nothing
            schedule.step()
        return optimizer, schedule

    def _compute_objective(self, candidate: Tensor, *arguments: Any) -> Callable[[], Tensor]:
        """What the optimiser calls in each of its steps, whose number is the last argument."""
        *others, step = arguments
        step += self._done()
        if not spent() and (self.part is None or step < self.part.stop):
            objective: Callable[[], Tensor] = super()._compute_objective(candidate, *others, step)
            return objective
        self.current_task_loss = candidate.new_tensor(math.nan)
        return lambda: candidate.new_tensor(math.nan)


class CosineWithPositions(CosineSimilarity):
    """breaching's cosine distance of all gradients, plus `weight` times that of the gradient at
    index `place`, the position table's."""

    def __init__(self, place: int, weight: float) -> None:
        super().__init__()
        self.place, self.weight = place, weight

    def gradient_based_loss(
        self, gradient_rec: Sequence[Tensor], gradient_data: Sequence[Tensor]
    ) -> Tensor:
        """The distance of a candidate's gradients from the uploaded ones."""
        table = slice(self.place, self.place + 1)
        all_gradients = super().gradient_based_loss(gradient_rec, gradient_data)
        positions = super().gradient_based_loss(gradient_rec[table], gradient_data[table])
        return all_gradients + self.weight * positions


def optimization_configuration(
    dtype: torch.dtype, changes: Mapping[str, Mapping[str, Any]], tv: float
) -> Any:
    """breaching's shipped invertinggradients.yaml over its defaults, with these changes.

    `tv` is the weight of the total variation; `changes` has the layout of breaching's files, such
    as {"optim": {"max_iterations": 100}}.
    """
    folder = breaching_folder() / "config" / "attack"
    names = ("_default_optimization_attack.yaml", "invertinggradients.yaml")
    parts = [OmegaConf.create((folder / name).read_text()) for name in names]
    ours = {
        "impl": {"dtype": str(dtype).removeprefix("torch.")},
        "regularization": {"total_variation": {"scale": tv}},
    }
    return OmegaConf.merge(*parts, ours, changes)


def match_gradients(
    model: MJPVisionTransformer,
    grads: Grads,
    labels: Tensor,
    mask: Tensor | None,
    pixels: Pixels,
    configuration: Any,
    *,
    positions: tuple[str, float] | None = None,
    start: Tensor | None = None,
    objective: nn.Module | None = None,
    terms: Sequence[nn.Module] = (),
    part: range | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Match one client step: normalised images (B, C, H, W), and {"steps", "cosine_distance"}.

    grads {name: parameter's shape}, labels (B,), mask (B, N); `positions`: name and weight of the
    position term; `start` (B, C, H, W): normalised images to start from in place of noise;
    `objective`: another distance of gradients; `terms` are added to it (`terms.Term`); `part`: the
    steps that are done, of all that the configuration has. Where no trial ended with a finite score
    the images are NaN (breaching gives zeros).
    """
    names = [name for name, _ in model.named_parameters() if name in grads]
    victim = UploadedParameters(model, names, mask)
    device = model.like.device
    attacker = InTime(victim, nn.CrossEntropyLoss(), configuration, {"device": device})
    if positions is not None:
        attacker.objective = CosineWithPositions(names.index(positions[0]), positions[1])
    if objective is not None:
        attacker.objective = objective
    attacker.regularizers += list(terms)
    attacker.part = part
    shared = {
        "gradients": [grads[name].to(device) for name in names],
        "buffers": [],
        "metadata": {
            "num_data_points": len(labels),
            "labels": labels.to(device),
            "local_hyperparams": None,
        },
    }
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel that can be differentiated twice
        payload = server_payload(victim, pixels)
        reconstruction, stats = attacker.reconstruct(payload, [shared], {}, initial_data=start)
    images = reconstruction["data"]
    score = float(stats["opt_value"])
    if not math.isfinite(score):
        images = torch.full_like(images, torch.nan)
    steps = sum(len(values) for key, values in stats.items() if key.startswith("Trial_"))
    return images, {"steps": float(steps), "cosine_distance": score}
