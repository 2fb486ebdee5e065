"""Measures the error that a defence makes on planted uploads against the one that it declares.

Attacks take the declared size for the truth. What is made and not declared makes a client look
safer than it is, because they trust an upload that they should weigh.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mjp_privacy import load_images, load_model
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.disturbance import Disturbed, Draws
from mjp_privacy.client.defenses.registry import StepDefense, UploadDefense
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import ClientInput, Grads

BOUND = 1.4
"""The error may be this many times the declared one. Of the defences here `sign` comes nearest,
with 1.38 on the heavy-tailed upload, for it declares what normal entries would give; the others end
at 1.13 or below. On a trained ViT's gradient `defense_targets.ON_REAL_GRADIENTS` goes before it."""
CHANCE = 4.0
"""Standard deviations by which the error of a tensor with few entries may exceed that by chance."""
DRAWS = 32  # of a step's noise, whose mean is the gradient as it was clipped


# uploads without a defence ------------------------------------------------------------------------

CLIENTS = 3
SHAPES = {  # a ViT's: the error of a small tensor says little, that of a large one much
    "cls_token": (1, 1, 48),
    "pos_embed": (1, 65, 48),
    "patch_embed.proj.weight": (48, 3, 8, 8),
    "blocks.0.attn.qkv.weight": (144, 48),
    "head.bias": (10,),
}
MASKED_ROWS = slice(10, 28)


@dataclass(frozen=True, eq=False)  # hashable by identity
class PlantedUpload:
    """What three clients would send without a defence: (3, *shape) by parameter name."""

    name: str
    entries: str = "normal"  # or uniform, heavy-tailed, trained
    scale: float = 1.0
    dtype: torch.dtype = torch.float64
    uneven: float = 0.0
    """Each tensor is e^uneven times larger or smaller than the one before, in turn."""
    masked: bool = False
    steps: int = 1  # local steps behind a weight difference

    def __str__(self) -> str:
        return self.name

    @cached_property
    def sent(self) -> dict[str, Tensor]:
        """The tensors, made when a test first asks for them."""
        if self.entries == "trained":
            return gradients_of_a_trained_vit()
        generator, sent = torch_generator("planted upload", self.name), {}
        for place, (parameter, shape) in enumerate(SHAPES.items()):
            factor = self.scale * torch.tensor(self.uneven * (place % 3 - 1)).exp()
            sent[parameter] = (factor * self._drawn(generator, CLIENTS, *shape)).to(self.dtype)
        if self.masked:
            sent["pos_embed"][:, :, MASKED_ROWS] = 0
        return sent

    def _drawn(self, generator: torch.Generator, *shape: int) -> Tensor:
        """Heavy tails are exponential on either side of zero (Laplace): one entry in a thousand is
        above 6.9 times the mean magnitude, 3 times as far out as a normal entry."""
        if self.entries == "normal":
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        first, second = (
            2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1 for _ in range(2)
        )
        if self.entries == "uniform":
            return first
        return first.abs().clamp_min(1e-12).log() * second.sign()

    def draws(self, seed: int = 0) -> Draws:
        """The random numbers that a defence may use."""
        ids = [f"image {place}" for place in range(CLIENTS)]
        return Draws(seed, ids, round=2, purpose="contract", steps=self.steps)


def gradients_of_a_trained_vit() -> dict[str, Tensor]:
    """Of a packaged MJP model on three photographs, of which MJP masked 18 patches."""
    mask = torch.zeros(CLIENTS, 64, dtype=torch.bool)
    mask[:, MASKED_ROWS] = True
    ids = [f"image {place}" for place in range(CLIENTS)]
    images = torch.stack([image for image, *_ in load_images("embedded", size=56, limit=CLIENTS)])
    inputs = ClientInput(images, torch.tensor([1, 4, 7]), ids, mask)
    names = ["blocks.3.mlp.fc1.weight" if "qkv" in name else name for name in SHAPES]
    model = load_model("cifar_vit_mjp")
    return dict(make_upload(model, [inputs], ClientConfig(), names=names).grads)


REAL_UPLOAD = PlantedUpload("gradient of a trained ViT", "trained")
"""Its entries have longer tails."""
PLANTED = (
    PlantedUpload("normal gradient"),
    PlantedUpload("float32 gradient", dtype=torch.float32),
    PlantedUpload("small gradient", scale=1e-3),
    PlantedUpload("large gradient", scale=30.0),
    PlantedUpload("gradient of even sizes", "uniform"),
    PlantedUpload("heavy-tailed gradient", "heavy-tailed"),
    PlantedUpload("gradient whose tensors differ in scale", uneven=1.5),
    PlantedUpload("gradient with masked rows", masked=True),
    PlantedUpload("gradient that is zero", scale=0.0),
    PlantedUpload("weight difference of five steps", scale=0.05, dtype=torch.float32, steps=5),
    PlantedUpload("heavy-tailed weight difference", "heavy-tailed", scale=0.02, steps=3),
    REAL_UPLOAD,
)
"""Every kind of upload that the contract asks about."""


# their errors -------------------------------------------------------------------------------------


def deviation(error: Tensor) -> Tensor:
    """Root mean square (n,) of (n, ...)."""
    return error.double().flatten(1).square().mean(1).sqrt()


def declared(altered: Disturbed, name: str) -> Tensor:
    """What is declared (n,) of noise and rounding together."""
    nothing = torch.zeros(len(altered.sent[name]), dtype=torch.float64)
    parts = (each.get(name, nothing).double() for each in (altered.noise, altered.rounding))
    return torch.stack([part.square() for part in parts]).sum(0).sqrt()


def allowance(entries: int, bound: float = BOUND) -> float:
    """The bound, and what chance adds for so few entries: allowance(10**6) is little more than
    BOUND."""
    return bound * (1 + CHANCE / math.sqrt(2 * entries))


def copied(sent: Grads) -> dict[str, Tensor]:
    return {name: g.clone() for name, g in sent.items()}


def excess(upload: PlantedUpload, altered: Disturbed) -> tuple[float, str]:
    """How many times what is declared the error is, beyond chance: at most of the tensors whose
    error is known, and of which."""
    times = [(0.0, "no tensor")]
    for name, before in upload.sent.items():
        error = deviation(altered.sent[name] - before)
        size = declared(altered, name) * allowance(before[0].numel(), 1.0)
        unknown = altered.unknown.get(name, torch.zeros(len(error), dtype=torch.bool))
        found = torch.where(error > 0, error / size, 0.0)[~unknown]
        times += [(number, name) for number in found.tolist()]
    return max(times)


def upload_with_the_same_result(
    defense: UploadDefense, upload: PlantedUpload, altered: Disturbed
) -> Disturbed | None:
    """What the defence makes, with other random numbers, of another upload from which it sends the
    same tensors; None where none was found.

    It is looked for by steps x <- x + (what was sent - what would be sent from x).
    """
    draws, start = upload.draws(seed=1), copied(altered.sent)
    for _ in range(60):
        again = defense.apply(copied(start), draws)
        apart = {name: sent - again.sent[name] for name, sent in altered.sent.items()}
        start = {name: g + apart[name] for name, g in start.items()}
        if all(
            float(apart[name].abs().amax())
            <= 8 * torch.finfo(sent.dtype).eps * float(sent.abs().amax())
            for name, sent in altered.sent.items()
        ):
            return again
    return None


def step_excess(defense: StepDefense, upload: PlantedUpload, batch: int) -> tuple[float, float]:
    """How many times what is declared a step's noise is, beyond chance; and how many times what
    this noise explains the mean of many draws is off every combination of the step's examples.

    The planted upload is taken for gradients of examples, `batch` in each client's step.
    """
    sent = upload.sent
    examples = {n: torch.stack([g.roll(b, 0) for b in range(batch)], 1) for n, g in sent.items()}
    steps = [defense.step_gradient(copied(examples), upload.draws(seed)) for seed in range(DRAWS)]
    flat = torch.stack([torch.cat([g.double().flatten(1) for g in s.values()], 1) for s in steps])
    chance, rounding = allowance(flat[0].numel(), 1.0), 1e-5 * float(flat.abs().amax())
    noise = float(flat.std(0).square().mean().sqrt())
    basis = torch.cat([g.double().flatten(2) for g in examples.values()], 2).mT  # (n, entries, B)
    mean = flat.mean(0).unsqueeze(2)
    factors = torch.linalg.lstsq(basis, mean, driver="gelsd").solution
    left = float((mean - basis @ factors).square().mean().sqrt())
    declared, explained = defense.deviation(batch), noise / math.sqrt(DRAWS)
    return tuple(
        error / (size * chance + rounding) if error else 0.0
        for error, size in ((noise, declared), (left, explained))
    )
