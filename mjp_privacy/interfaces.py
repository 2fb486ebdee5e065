"""What crosses the borders between client, attacker and scorer. Start reading here.

    images -> Setting.prepare -> ClientInput -> make_upload -> ClientUpdate
                                                                    |
    Truth (stays behind) -> score <- Reconstruction <- Attack.run <- AttackerView

Shapes: m images, grouped into n = m / B client steps of B images each (B = 1 unless the client
says otherwise). Images are (m, C, H, W) in [0, 1]; masks and permutations are per image, (m, N)
over the N patches in row-major order; a gradient's leading axis is the n independent steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mjp_privacy.models import MJPVisionTransformer

Grads = Mapping[str, Tensor]
"""Gradients by parameter name, (n, *parameter.shape); never a positional list."""


@dataclass(frozen=True)
class ClientInput:
    """What the client feeds its model: images already shuffled where the setting says so."""

    images: Tensor  # (m, C, H, W) in [0, 1]
    labels: Tensor  # (m,) int64
    image_ids: Sequence[str]
    mask: Tensor | None = None  # (m, N) bool, True = shuffled; None: nothing was shuffled
    permutation: Tensor | None = None
    """(m, N) int64: shuffled patch j is plain patch permutation[j]."""

    def part(self, images: slice) -> ClientInput:
        """The same for some of the images: `inputs.part(slice(0, 4))` holds the first four."""
        return ClientInput(
            self.images[images],
            self.labels[images],
            self.image_ids[images],
            None if self.mask is None else self.mask[images],
            None if self.permutation is None else self.permutation[images],
        )


@dataclass(frozen=True)
class ClientUpdate:
    """What leaves the client in one round."""

    grads: Grads
    kind: Literal["gradient", "weight_difference"] = "gradient"
    dtype: torch.dtype = torch.float32
    batch: int = 1
    round: int = 0
    client: str = "0"
    optimizer: str = "sgd"
    lr: float | None = None
    steps: int = 1
    weight_decay: float = 0.0  # of the client's optimiser; it enters a weight difference only
    dal_lambda: float = 0.0  # weight of L_DAL in the client's loss, part of its public recipe
    momentum: float = 0.0  # of the client's optimiser
    position_noise: float = 0.0  # noise on dL/dE_pos, in rms of its nonzero entries; public too
    noise: Mapping[str, Tensor] = field(default_factory=dict)
    """By parameter the standard deviation (n,) of the noise that the client's published defences
    put on every entry of what is sent; from the recipe and the upload, never from the data."""
    rounding: Mapping[str, Tensor] = field(default_factory=dict)
    """The same for errors that leave a zero entry zero: quantisation and dropped entries."""
    clipped: bool = False  # the recipe shrinks each example's gradient by a factor nobody is told
    weights_before: Mapping[str, Tensor] | None = None  # None: the weights of AttackerView.model

    def part(self, steps: slice) -> ClientUpdate:
        """The same for some of the n steps: `update.part(slice(2, 3))` holds the third alone."""

        def of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor[steps] for name, tensor in tensors.items()}

        return replace(self, grads=of(self.grads), noise=of(self.noise), rounding=of(self.rounding))


@dataclass(frozen=True)
class Truth:
    """The private data; only the scorer and the controls ever see it."""

    images: Tensor  # (m, C, H, W) in [0, 1], never shuffled
    labels: Tensor | None  # (m,), None where the data carry no labels
    image_ids: Sequence[str]


@dataclass(frozen=True)
class Pixels:
    """Public facts about the pixels: the model's input size and normalisation."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class AttackerView:
    """Everything the attacker may use. There is no truth in it."""

    model: MJPVisionTransformer  # the model the client trained, weights included
    updates: Sequence[ClientUpdate]  # several uploads: a multi-round attack
    pixels: Pixels
    labels: Tensor | None = None  # (m,), where the threat model lets the attacker know them
    against: Literal["input", "plain"] = "input"  # the image wanted: as fed, or before the shuffle

    def part(self, step: int) -> AttackerView:
        """What the attacker sees of one client step."""
        batch = self.updates[0].batch
        images = slice(step * batch, (step + 1) * batch)
        return replace(
            self,
            updates=[update.part(slice(step, step + 1)) for update in self.updates],
            labels=None if self.labels is None else self.labels[images],
        )


RefusalKind = Literal[
    "positions",  # the model has no position embeddings
    "unknown_embedding",  # the model cannot mask
    "missing_gradient",  # the upload holds no gradient of a parameter that is needed
    "weight_difference",  # no gradient can be had from the weights that were sent
    "batch",  # too many images a step
    "underdetermined",  # fewer equations than unknowns
    "labels",  # they are not known
    "block",  # the client trained another block 0 than the attack needs
    "uploads",  # too few uploads of the same images
    "model",  # something else about the model
    "target",  # there is no image to compare with
]


@dataclass(frozen=True)
class Refusal:
    """Why something does not apply: a kind for programs to decide by, a text for people."""

    kind: RefusalKind
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Reconstruction:
    """What the attacker made, (m, C, H, W) in [0, 1], with per-image diagnostics."""

    images: Tensor | None
    mask: Tensor | None = None  # (m, N) the attacker's estimate, where it makes one
    permutation: Tensor | None = None  # (m, N) the attacker's guess of ClientInput.permutation
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)  # {name: (m,)}
    inapplicable: Mapping[int, str] = field(default_factory=dict)
    """Why some of the images have no reconstruction, by their place: rows `unsupported`, and what
    `images` holds there is not read."""


class Setting(Protocol):
    """Who sees what, scored against what."""

    @property
    def name(self) -> str: ...

    @property
    def shuffles(self) -> bool: ...

    @property
    def against(self) -> Literal["input", "plain"]:
        """The image that is scored against: as fed, or before the shuffle."""
        ...

    def prepare(
        self,
        images: Tensor,
        labels: Tensor,
        image_ids: Sequence[str],
        *,
        patch_size: int,
        gamma: float,
        round: int,
        seed: int,
    ) -> ClientInput: ...

    def target(self, truth: Truth, inputs: ClientInput) -> Tensor: ...


class Attack(Protocol):
    """An attack, found by its name.

    `victim` says which model it needs the client to train: the `intact` one or the `april_block`
    one, whose block 0 has neither norm1 nor residuals. `uploads` is the number of rounds it needs.
    """

    @property
    def name(self) -> str: ...

    @property
    def victim(self) -> Literal["intact", "april_block"]: ...

    @property
    def uploads(self) -> int: ...

    @property
    def published(self) -> bool:
        """Whether the MJP paper ran this attack, so that its figures may stand beside ours."""
        ...

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Names of the gradients it reads; the client computes only those."""
        ...

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the attack does not apply to this view, or None."""
        ...

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction: ...


@runtime_checkable
class Control(Protocol):
    """A floor or a ceiling: it may look at the truth, so it is never a result.

    `role`: `floor` shows what a score is worth, `ceiling` what an attack can reach.
    """

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> Literal["floor", "ceiling"]: ...

    def run(
        self, view: AttackerView, truth: Truth, inputs: ClientInput, *, generator: torch.Generator
    ) -> Reconstruction: ...
