"""Uploads on which the contract measures what a defence does, so that its error is known.

All but one are made up, of tensors with a ViT's shapes. The error of a small tensor says little,
that of a large one much. The last one is of a trained ViT, whose entries have longer tails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mjp_privacy import load_images, load_model
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.disturbance import Draws
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import ClientInput

CLIENTS = 3
SHAPES: Mapping[str, tuple[int, ...]] = {
    "cls_token": (1, 1, 48),
    "pos_embed": (1, 65, 48),
    "patch_embed.proj.weight": (48, 3, 8, 8),
    "blocks.0.attn.qkv.weight": (144, 48),
    "head.bias": (10,),
}
MASKED_ROWS = slice(10, 28)
REAL = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.3.mlp.fc1.weight", "head.bias")
Drawing = Callable[[torch.Generator, tuple[int, ...]], Tensor]


def normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def uniform(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1


def heavy_tailed(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Exponential on either side of zero (Laplace): one entry in a thousand is above 6.9 times the
    mean magnitude, 3 times as far out as a normal entry."""
    first, second = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return -first.clamp_min(1e-12).log() * torch.where(second < 0.5, -1.0, 1.0)


@dataclass(frozen=True, eq=False)  # hashable by identity
class PlantedUpload:
    """What three clients would send without a defence: (3, *shape) by parameter name."""

    name: str
    draw: Drawing | None = normal  # None: gradients of a trained network
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
        if self.draw is None:
            return gradients_of_a_trained_vit()
        generator, sent = torch_generator("planted upload", self.name), {}
        for place, (parameter, shape) in enumerate(SHAPES.items()):
            factor = self.scale * torch.tensor(self.uneven * (place % 3 - 1)).exp()
            sent[parameter] = (factor * self.draw(generator, (CLIENTS, *shape))).to(self.dtype)
        if self.masked:
            sent["pos_embed"][:, :, MASKED_ROWS] = 0
        return sent

    def draws(self, seed: int = 0) -> Draws:
        """The random numbers that a defence may use."""
        ids = [f"image {place}" for place in range(CLIENTS)]
        return Draws(seed, ids, round=2, purpose="contract", steps=self.steps)


def gradients_of_a_trained_vit() -> dict[str, Tensor]:
    """Of a packaged MJP model on three photographs, of which MJP masked 18 patches."""
    mask = torch.zeros(CLIENTS, 64, dtype=torch.bool)
    mask[:, MASKED_ROWS] = True
    names = [f"image {place}" for place in range(CLIENTS)]
    images = torch.stack([image for image, *_ in load_images("embedded", size=56, limit=CLIENTS)])
    inputs = ClientInput(images, torch.tensor([1, 4, 7]), names, mask)
    model = load_model("cifar_vit_mjp")
    return dict(make_upload(model, [inputs], ClientConfig(), names=REAL).grads)


REAL_UPLOAD = PlantedUpload("gradient of a trained ViT", draw=None)
PLANTED = (
    PlantedUpload("normal gradient"),
    PlantedUpload("float32 gradient", dtype=torch.float32),
    PlantedUpload("small gradient", scale=1e-3),
    PlantedUpload("large gradient", scale=30.0),
    PlantedUpload("gradient of even sizes", uniform),
    PlantedUpload("heavy-tailed gradient", heavy_tailed),
    PlantedUpload("gradient whose tensors differ in scale", uneven=1.5),
    PlantedUpload("gradient with masked rows", masked=True),
    PlantedUpload("gradient that is zero", scale=0.0),
    PlantedUpload("weight difference of five steps", scale=0.05, dtype=torch.float32, steps=5),
    PlantedUpload("heavy-tailed weight difference", heavy_tailed, scale=0.02, steps=3),
    REAL_UPLOAD,
)
"""Every kind of upload that the contract asks about."""
