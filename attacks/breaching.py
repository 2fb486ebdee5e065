"""breaching's attackers alone, without its data sets and models. Import it late: few runs need it.

`import breaching` also runs every subpackage's `__init__`, and with them torchvision, hydra,
torch's compiler and SymPy: two seconds and 1,500 modules. The attackers need torch and SciPy only.

    with parts_of_breaching():
        from breaching.attacks import prepare_attack

Nothing of breaching is changed or copied, and whoever imports it later gets the whole of it. It
reads gradients by their place in a list and casts them to its own dtype, so named gradients are put
where it looks and its `impl.dtype` is set to theirs. It differentiates `model.parameters()`, so it
gets a wrapper whose parameters are the uploaded ones in that order. It sums its objective and what
each `Term`, a weight times a mean over pictures, gives for candidates (B, C, H, W), normalised.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.budget import spent
from attacks.equations.completion import FieldEnergy
from mjp_privacy.core.schema import height_width
from mjp_privacy.interfaces import Grads, Pixels
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.vit import copied

logging.getLogger("breaching").setLevel(logging.WARNING)

PASSED_THROUGH = ("breaching", "breaching.cases", "breaching.cases.models")
"""The packages that stand above what the attackers import, parents first."""


@contextmanager
def parts_of_breaching() -> Iterator[None]:
    """Within the block, modules of breaching are found without running the packages above them."""
    absent = [name for name in PASSED_THROUGH if name not in sys.modules]
    for name in absent:
        spec = find_spec(name)
        if spec is None:
            break  # the import in the block then says what is missing
        sys.modules[name] = module_from_spec(spec)  # knows its folder; its code has not run
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


with parts_of_breaching():
    from breaching import attacks as shipped


def configuration(
    names: Sequence[str], dtype: torch.dtype, changes: Mapping[str, Mapping[str, Any]]
) -> Any:
    """breaching's shipped files of these names, each over those before it, with these changes in
    their layout, such as {"optim": {"max_iterations": 100}}. They are read here because its own
    loader initialises hydra for the whole process."""
    folder = Path(shipped.__file__).parents[1] / "config" / "attack"
    parts = [OmegaConf.create((folder / f"{name}.yaml").read_text()) for name in names]
    ours = {"impl": {"dtype": str(dtype).removeprefix("torch.")}}
    return OmegaConf.merge(*parts, ours, changes)


def server_payload(model: nn.Module, pixels: Pixels) -> list[dict[str, Any]]:
    """What breaching's server would have sent: weights, buffers and public facts of the data."""
    facts = {
        "modality": "vision",
        "shape": [len(pixels.mean), *height_width(pixels.size)],
        "mean": list(pixels.mean),
        "std": list(pixels.std),
    }
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [{"parameters": parameters, "buffers": [], "metadata": OmegaConf.create(facts)}]


# breaching's APRIL --------------------------------------------------------------------------------


POSITIONS = {"pos_embed": 1, "blocks.0.attn.qkv.weight": 4}
"""Places in the list of gradients where AprilAttacker looks for the two it reads."""


def april_one_by_one(
    model: MJPVisionTransformer, grads: Grads, pixels: Pixels, dtype: torch.dtype
) -> Tensor:
    """Run breaching's own attack per image: normalised images (n, C, H, W), which it clamps."""
    wrapped = nn.Module()  # breaching expects the network as an attribute of its model
    wrapped.model = model
    setup = {"device": next(model.parameters()).device}
    settings = configuration(("april_analytic",), dtype, {})
    attacker = shipped.prepare_attack(wrapped, nn.CrossEntropyLoss(), settings, setup)
    payload = server_payload(wrapped, pixels)
    metadata = {"num_data_points": 1, "labels": torch.zeros(1, dtype=torch.long)}  # 0 is a dummy
    images = []
    for index in range(len(grads["pos_embed"])):
        listed = [torch.zeros(0) for _ in range(max(POSITIONS.values()) + 1)]
        for name, position in POSITIONS.items():
            listed[position] = grads[name][index]
        shared = [{"gradients": listed, "buffers": [], "metadata": metadata}]
        data, _ = attacker.reconstruct(payload, shared, server_secrets={})
        images.append(data["data"][0])
    return torch.stack(images)


# breaching's gradient matching --------------------------------------------------------------------


with parts_of_breaching():
    from breaching.attacks.auxiliaries.objectives import CosineSimilarity
    from breaching.attacks.optimization_based_attack import OptimizationBasedAttacker


MATCHING = ("_default_optimization_attack", "invertinggradients")


class UploadedParameters(nn.Module):
    """The model with a fixed mask, whose `parameters()` are those in `names` and in that order."""

    mask: Tensor | None

    def __init__(
        self, model: MJPVisionTransformer, names: Sequence[str], mask: Tensor | None
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.model = copied(model)
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
    """Stops where the time of the images is over (`attacks.budget`), with the best ones so far:
    breaching ends a trial at a loss that is no number.

    With a `part` of its steps it does those alone, its step size being what it is at that part of
    the whole: range(100, 200) of 200 is the second half.
    """

    part = range(sys.maxsize)

    def _init_optimizer(self, candidate: Sequence[Tensor]) -> tuple[Any, Any]:
        """Adam and the decay of its step size, moved on to where the part begins."""
        optimizer, schedule = super()._init_optimizer(candidate)
        for tensor in candidate:
            tensor.grad = None  # breaching's zeros would enter Adam's means
        for _ in range(self.part.start):
            optimizer.step()  # so this does nothing
            schedule.step()
        return optimizer, schedule

    def _compute_objective(self, candidate: Tensor, *arguments: Any) -> Callable[[], Tensor]:
        """What the optimiser calls in each of its steps, whose number is the last argument."""
        *others, step = arguments
        step += self.part.start
        if not spent() and step < self.part.stop:
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


def match_gradients(
    model: MJPVisionTransformer,
    grads: Grads,
    labels: Tensor,
    mask: Tensor | None,
    pixels: Pixels,
    dtype: torch.dtype,
    changes: Mapping[str, Mapping[str, Any]],
    *,
    start: Tensor | None = None,
    objective: nn.Module | None = None,
    terms: Sequence[nn.Module] = (),
    part: range = InTime.part,
) -> tuple[Tensor, dict[str, float]]:
    """Match one client step: normalised images (B, C, H, W), and {"steps", "cosine_distance"}.

    grads {name: parameter's shape}, labels (B,), mask (B, N); `changes` as of `configuration`;
    `start` (B, C, H, W): normalised images to start from in place of noise; `objective`: another
    distance of gradients; `terms` are added to it (`Term`); `part`: the steps that are done, of all
    that the configuration has. Where no trial ended with a finite score the images are NaN
    (breaching gives zeros).
    """
    names = [name for name, _ in model.named_parameters() if name in grads]
    victim = UploadedParameters(model, names, mask)
    device = model.like.device
    settings = configuration(MATCHING, dtype, changes)
    attacker = InTime(victim, nn.CrossEntropyLoss(), settings, {"device": device})
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


# terms of its objective ---------------------------------------------------------------------------


with parts_of_breaching():
    from breaching.attacks.auxiliaries.objectives import Euclidean

TINY = 1e-12  # under the root of a norm, which has no derivative at 0


class SquaredDistance(Euclidean):
    """sum_l |g_l(x) - g_l|^2 / sum_l |g_l|^2 over the parameters l: 1 for a candidate without any
    gradient, so that a term's weight means the same beside weak and strong uploads."""

    def gradient_based_loss(
        self, gradient_rec: Sequence[Tensor], gradient_data: Sequence[Tensor]
    ) -> Tensor:
        """The distance of a candidate's gradients from the uploaded ones."""
        norm = torch.stack([grad.square().sum() for grad in gradient_data]).sum()
        halved: Tensor = super().gradient_based_loss(gradient_rec, gradient_data)
        return 2 * halved / norm


class Term(nn.Module):
    """One summand of the objective: `weight` times `value`."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def initialize(self, *_: Any) -> None:
        """breaching calls it before each trial; there is nothing to prepare."""

    def forward(self, pictures: Tensor) -> Tensor:
        """What the objective gets for the pictures (B, C, H, W)."""
        return self.weight * self.value(pictures)

    def value(self, pictures: Tensor) -> Tensor:
        """The term itself, a scalar."""
        raise NotImplementedError


class Borders(Term):
    """How far pictures step across the borders of their patches: for each border between two
    patches the norm of the step from one side's row of pixels to the other's, over the square root
    of the row's number of values. A step of 1 in every pixel of every border is 1."""

    def __init__(self, weight: float, patch_size: int) -> None:
        super().__init__(weight)
        self.patch_size = patch_size

    def value(self, pictures: Tensor) -> Tensor:
        """The mean over all borders; 0 for a picture of one patch."""
        sideways, down = self._sizes(pictures), self._sizes(pictures.mT)
        sizes = torch.cat((sideways.flatten(), down.flatten()))
        return sizes.mean() if len(sizes) else pictures.sum() * 0

    def _sizes(self, pictures: Tensor) -> Tensor:
        """Of the steps between columns, (B, rows of patches, borders)."""
        side = self.patch_size
        steps = pictures[..., side::side] - pictures[..., side - 1 : -1 : side]
        by_patch = steps.unflatten(2, (-1, side))  # (B, C, rows of patches, side, borders)
        return (by_patch.square().mean((1, 3)) + TINY).sqrt()


class FieldPrior(Term):
    """How improbable pictures are under a Gaussian field with mean colour m:

        (x - m)^T Sigma^-1 (x - m) / number of values of x,

    which is 1 on average over pictures that are drawn from the field."""

    def __init__(self, weight: float, energy: FieldEnergy) -> None:
        super().__init__(weight)
        self.energy = energy

    def value(self, pictures: Tensor) -> Tensor:
        """The mean over all pictures."""
        energy = self.energy.on(pictures.device)
        down, across = energy.down.to(pictures), energy.across.to(pictures)
        precision = energy.precision.to(pictures)
        centred = pictures - energy.mean.to(pictures).view(-1, 1, 1)
        waves = down @ centred @ across.mT
        return (waves * (precision * waves.unsqueeze(1)).sum(2)).mean()


class Near(Term):
    """The mean squared distance of pictures from a target (B, C, H, W)."""

    def __init__(self, weight: float, target: Tensor) -> None:
        super().__init__(weight)
        self.target = target

    def value(self, pictures: Tensor) -> Tensor:
        """The mean over all values."""
        return (pictures - self.target).square().mean()
