"""The data that pass between client, attacker and scorer. Start reading here.

    images -> Setting.prepare -> ClientInput -> make_upload -> ClientUpdate
                                                                    |
    images (stay behind) -> score <- Reconstruction <- Attack.run <- AttackerView

Shapes: m images form n = m / B client steps of B images each (B = `ClientUpdate.batch`, 1 by
default). Images are (m, C, H, W) in [0, 1]. Masks and permutations are (m, N): one per image, over
its N patches in row-major order. The leading axis of a gradient counts the n independent steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from mjp_privacy.core.schema import Size

if TYPE_CHECKING:
    from mjp_privacy.models import MJPVisionTransformer

Grads = Mapping[str, Tensor]
"""Gradients by parameter name, each (n, *parameter.shape); never a list in some order."""


@dataclass(frozen=True)
class ClientInput:
    """What the client feeds its model; the images are shuffled already if the setting shuffles."""

    images: Tensor  # (m, C, H, W) in [0, 1]
    labels: Tensor  # (m,) int64
    image_ids: Sequence[str]
    mask: Tensor | None = None  # (m, N) bool, True = shuffled; None: nothing was shuffled
    permutation: Tensor | None = None
    """(m, N) int64: shuffled patch j is plain patch permutation[j]."""

    def part(self, images: slice) -> ClientInput:
        """These inputs for some of the images: `inputs.part(slice(0, 4))` has the first four."""
        return ClientInput(
            self.images[images],
            self.labels[images],
            self.image_ids[images],
            None if self.mask is None else self.mask[images],
            None if self.permutation is None else self.permutation[images],
        )


@dataclass(frozen=True)
class ClientUpdate:
    """What the client sends in one round, and the public facts of how it was computed."""

    grads: Grads
    kind: Literal["gradient", "weight_difference"] = "gradient"
    dtype: torch.dtype = torch.float32
    batch: int = 1  # images per client step, B
    partners: Literal["fixed", "fresh"] = "fixed"
    """fixed: step s holds the same images in every round; fresh: the client shuffles its images
    before every round, so that nothing says which images an upload holds."""
    round: int = 0
    optimizer: str = "sgd"
    lr: float | None = None
    steps: int = 1  # local steps that the client takes before it uploads
    weight_decay: float = 0.0  # of the client's optimiser; it affects weight differences only
    dal_lambda: float = 0.0  # weight of L_DAL in the client's loss; public
    momentum: float = 0.0  # of the client's optimiser
    autocast: Literal["none", "fp16", "bf16"] = "none"  # half precision of its matrix products
    position_noise: float = 0.0  # noise on dL/dE_pos, in units of its nonzero entries' rms; public
    noise: Mapping[str, Tensor] = field(default_factory=dict)
    """By parameter name, the standard deviation (n,) of the noise that published defences add to
    every entry of the upload; computed from the recipe and the upload, never from the data."""
    rounding: Mapping[str, Tensor] = field(default_factory=dict)
    """The same for errors that leave a zero entry at zero: quantisation and dropped entries."""
    clipped: bool = False  # each example's gradient is scaled by a factor that is not sent
    undeclared: Tensor | None = None
    """(n,) bool: a defence changed the upload by an error whose size neither `noise` nor `rounding`
    tells. None: the client has no defences."""
    weights_before: Mapping[str, Tensor] | None = None  # None: the weights of AttackerView.model

    @property
    def steps_in_all(self) -> int:
        """n, the number of independent client steps whose uploads these are."""
        return len(next(iter(self.grads.values()), ()))

    def part(self, steps: slice) -> ClientUpdate:
        """This upload for some of the n steps: `update.part(slice(2, 3))` has the third alone."""

        def of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor[steps] for name, tensor in tensors.items()}

        return replace(
            self,
            grads=of(self.grads),
            noise=of(self.noise),
            rounding=of(self.rounding),
            undeclared=None if self.undeclared is None else self.undeclared[steps],
        )


@dataclass(frozen=True)
class Pixels:
    """Public facts about the pixels: the model's input size and normalisation."""

    size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class AttackerView:
    """Everything the attacker may use; the private images are not in it."""

    model: MJPVisionTransformer  # the model the client trained, weights included
    updates: Sequence[ClientUpdate]  # more than one for a multi-round attack
    pixels: Pixels
    labels: Tensor | None = None  # (m,), if the threat model lets the attacker know them
    against: Literal["input", "plain"] = "input"  # reconstruct the image as fed, or unshuffled

    @property
    def pool(self) -> int:
        """How many pictures an attack cannot tell apart by where they stand: those of a step, or
        those of all steps where several rounds of a client that shuffles its images are read."""
        first = self.updates[0]
        several = first.partners == "fresh" and len(self.updates) > 1
        return first.batch * (first.steps_in_all if several else 1)

    def part(self, step: int) -> AttackerView:
        """The view of one client step alone, counted from 0."""
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
    "weight_difference",  # the weights that were sent do not determine a gradient
    "batch",  # too many images per step
    "underdetermined",  # fewer equations than unknowns
    "labels",  # the labels are not known
    "block",  # the client trained a block 0 that the attack cannot use
    "uploads",  # too few uploads of the same images
    "model",  # something else about the model
    "target",  # there is no image to compare with
]


@dataclass(frozen=True)
class Refusal:
    """Why an attack does not apply: `kind` for programs to decide by, `text` for people."""

    kind: RefusalKind
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Reconstruction:
    """What the attack returns, with diagnostics for each image."""

    images: Tensor | None
    """(m, C, H, W) in [0, 1]. In batches of several pictures their order within
    `AttackerView.pool` means nothing: the scorer assigns each to the picture that it fits."""
    mask: Tensor | None = None  # (m, N) estimate of ClientInput.mask, if the attack makes one
    permutation: Tensor | None = None  # (m, N) estimate of ClientInput.permutation
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)  # {name: (m,)}
    inapplicable: Mapping[int, str] = field(default_factory=dict)
    """{index of an image: why the attack does not apply to it}; its part of `images` is ignored,
    and its rows get the status `unsupported`."""


class Attack(Protocol):
    """A gradient-inversion attack, registered by its name."""

    @property
    def name(self) -> str:
        """Its name in the registry and in tables."""

    @property
    def victim(self) -> Literal["intact", "april_block"]:
        """The model the client must train: intact, or block 0 without norm1 and residuals."""

    @property
    def uploads(self) -> int:
        """How many uploads of the same images it reads, one per round."""

    @property
    def published(self) -> bool:
        """Whether the MJP paper ran this attack, so that its figures may stand beside ours."""

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Names of the parameters whose gradients it reads; the client computes only those."""

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the attack does not apply to this view, or None if it does."""

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Reconstruct every image of the view; all random choices come from `generator`."""


class Usual:
    """What holds of an attack unless its class says otherwise: class Yours(Usual)."""

    traits: ClassVar[tuple[str, ...]] = ()
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"

    @property
    def uploads(self) -> int:
        """One. An attack that reads several has an option of this name."""
        return 1


@runtime_checkable
class Control(Protocol):
    """A reference to read scores by. It may look at the truth, so it is never a result."""

    @property
    def name(self) -> str:
        """Its name in the registry and in tables."""

    @property
    def role(self) -> Literal["floor", "ceiling"]:
        """`floor`: a score reached without any gradient; `ceiling`: what an attack can reach."""

    def run(self, view: AttackerView, plain: Tensor, inputs: ClientInput) -> Reconstruction:
        """The images that are scored as if an attack had made them.

        plain: the private images (m, C, H, W) in [0, 1], never shuffled
        """
