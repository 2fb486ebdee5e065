"""A network's card, and networks that are no plain ViT: what they share, and their files.

    vit             `mjp_vit`: everything else in this package is written for it
    swin, resnet    of the paper's Table 1: `paper/networks.py`

Training, evaluation and the simulated client ask a network for no more than `OtherNetwork` offers.
What reads a ViT's own parts (closed forms, a client's sine table) asks for its `family` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import json_value, typed
from mjp_privacy.core.registry import Entry
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, WeightFile
from mjp_privacy.models.checkpoints import CheckpointReport
from mjp_privacy.models.mjp_vit import FirstBlock, LocalizationRegressor, PositionEmbedding
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.models.spec import STATES, ModelSpec, overridden, stated
from mjp_privacy.models.tensor_files import check_finite
from mjp_privacy.models.vit import start_


@dataclass(frozen=True)
class ModelCard:
    """The facts about a loaded model that table rows state."""

    name: str
    architecture: str
    img_size: int
    resize: int | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    trained_gamma: float | None
    checkpoint: CheckpointReport
    norm_eps: float | None = None  # stated, with the activation, of a network other than timm's
    activation: str | None = None


class WithCard:
    """A network with the card that says where it came from and how images are normalised."""

    card: ModelCard

    def normalize(self, images: Tensor) -> Tensor:
        """Images in [0, 1] -> the normalised input of the network."""
        mean = _per_channel(self.card.mean, images)
        std = _per_channel(self.card.std, images)
        return (images - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse of `normalize`; values outside [0, 1] are not clipped."""
        mean = _per_channel(self.card.mean, x)
        std = _per_channel(self.card.std, x)
        return x * std + mean


def _per_channel(numbers: tuple[float, ...], like: Tensor) -> Tensor:
    """(C, 1, 1), made in the precision of `like`: float64 numbers must not pass through float32."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(-1, 1, 1)


class OtherNetwork(WithCard, nn.Module):
    """What training, evaluation and clients use of a network that is no plain ViT.

    Its features are what its classifier reads, (B, 1, D), in the place of a ViT's tokens: the first
    of them is what Diff. Norm. compares, as the authors' code does with Swin's pooled features.
    """

    unk_embed: nn.Parameter | None
    dal_regressor: LocalizationRegressor | None
    pos_embed: None
    index_embed: None
    adapters: None
    position_embedding: PositionEmbedding
    first_block: FirstBlock

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.family = sizes, sizes.family
        self.patch_size, self.grid = sizes.patch_size, sizes.img_size // sizes.patch_size
        self.tokens = self.grid**2
        self.position_embedding = "learned" if sizes.positions else "strict"
        self.dal_kind, self.first_block = sizes.dal, "intact"
        self.unk_embed = self.dal_regressor = None
        self.pos_embed = self.index_embed = self.adapters = None

    @property
    def like(self) -> Tensor:
        """A parameter, by which callers tell the network's device and precision."""
        return next(self.parameters())

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay."""
        return set()

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the classifier reads (B, 1, D), of normalised images (B, C, H, W)."""
        raise NotImplementedError

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (B, classes) from these features."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised images (B, C, H, W); mask (N,) or (B, N) bool, True = shuffled -> logits."""
        self._check(x, mask)
        return self.forward_head(self.forward_features(x, mask))

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        side = self.sizes.img_size
        if x.ndim != 4 or x.shape[-2:] != (side, side):
            raise UserError(f"Expected images (B, 3, {side}, {side}), got {tuple(x.shape)}.")
        if mask is None:
            return
        fits = mask.ndim in (1, 2) and mask.shape[-1] == self.tokens
        if (
            mask.dtype != torch.bool
            or not fits
            or (mask.ndim == 2 and len(mask) not in (1, len(x)))
        ):
            raise UserError(
                f"Expected a bool mask over the {self.tokens} patches, shape ({self.tokens},) or "
                f"({len(x)}, {self.tokens}); got {mask.dtype} of {tuple(mask.shape)}."
            )

    def start_linear_layers(self) -> None:
        """Draw the linear layers as this package's ViT does, so that a seed means the same numbers
        in every version of torch."""
        for module in self.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                start_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


NETWORKS: Mapping[str, Entry] = {
    "swin": Entry("mjp_privacy.paper.networks:JigsawSwin"),
    "resnet": Entry("mjp_privacy.paper.networks:JigsawResNet"),
}


def build_other(sizes: Sizes, drop_path: float = 0.0) -> OtherNetwork:
    """The network of these sizes, with weights as torch draws them.

    build_other(Sizes("resnet", 224, 16, 64, (3, 4, 6, 3), 1000)) is ResNet-50
    """
    network: OtherNetwork = NETWORKS[sizes.family].load()(sizes, drop_path)
    return network


SIZES = "network"
"""The entry of a file's metadata that states the sizes of another network than a ViT."""
PICTURES = ("mean", "std", "resize", "interpolation", "trained_gamma")
"""What a user may say of such a file; its sizes are its own."""


def is_other(file: WeightFile) -> bool:
    """Whether a file says that it holds another network than a ViT."""
    return SIZES in file.metadata


def load_other(
    name: str | None, file: WeightFile, overrides: Mapping[str, Any], *, outline: bool = False
) -> OtherNetwork:
    """The network of such a file in eval mode, with its card.

    outline  without weights, on torch's meta device: the file's shapes are enough
    """
    sizes = _sizes(file)
    spec = _spec(name, file, sizes, overrides)
    if not outline:
        check_finite(file.tensors, file.path, CHECKPOINT)
    with torch.device("meta"):
        _check_same(build_other(sizes), file)
    with torch.device("meta" if outline else "cpu"):
        network = build_other(sizes)
    if not outline:
        stored = {key: tensor.float() for key, tensor in file.tensors.items()}
        network.load_state_dict(stored, strict=False)
    report = CheckpointReport(file.path.name, file.sha256, sizes.family)
    network.card = _card(spec, sizes, report)
    return network.eval()


def weights_of(network: torch.nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a network: parameters, and statistics such as batch norm's."""
    kept = network.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in kept.items() if tensor.is_floating_point()}


def _sizes(file: WeightFile) -> Sizes:
    content = json_value(file.metadata[SIZES], file.path, STATES)
    sizes = typed(content, file.path, STATES, Sizes)
    sizes.check(file.shown)
    return sizes


def _spec(
    name: str | None, file: WeightFile, sizes: Sizes, overrides: Mapping[str, Any]
) -> ModelSpec:
    """How the file's network takes pictures; UserError for anything else that a user says of it."""
    given = {key: value for key, value in overrides.items() if value is not None}
    named = [f"model {name}"] if name else []
    if refused := [*named, *(f"{key}={given[key]}" for key in given if key not in PICTURES)]:
        raise UserError(
            f"{file.shown} holds a {sizes.family} and states its own sizes: expected no more than "
            f"{', '.join(PICTURES)}, got {shown(', '.join(refused), 100)}. Leave that out."
        )
    facts = {key: value for key, value in stated(file).items() if key in PICTURES}
    spec = overridden(replace(ModelSpec(f"custom {sizes.family}"), **facts), given)
    if spec.mean is None or spec.std is None:
        raise UserError(
            f"{file.shown}: mean and std cannot be read off the checkpoint and are never guessed. "
            "Expected mean=… and std=…, got none. Give them."
        )
    return spec


def _check_same(network: OtherNetwork, file: WeightFile) -> None:
    """Raise unless the file's tensors are those of a network of the sizes that it states."""
    expected, family = weights_of(network), network.family
    for key in [*expected, *file.tensors]:
        here, there = expected.get(key), file.tensors.get(key)
        if here is None or there is None or here.shape != there.shape:
            got = "no such tensor" if there is None else f"{tuple(there.shape)}"
            wanted = "no such tensor" if here is None else f"{tuple(here.shape)}"
            raise UserError(
                f"{file.shown} states the sizes of a {family} that its tensors do not have: "
                f"{shown(key, 60)}: expected {wanted}, got {got}. Give the file as `mjp train` "
                "wrote it."
            )


def _card(spec: ModelSpec, sizes: Sizes, report: CheckpointReport) -> ModelCard:
    assert spec.mean is not None
    assert spec.std is not None
    return ModelCard(
        name=spec.name,
        architecture=str(sizes),
        img_size=sizes.img_size,
        resize=spec.resize,
        interpolation=spec.interpolation or "bicubic",
        mean=spec.mean,
        std=spec.std,
        num_classes=sizes.num_classes,
        trained_gamma=spec.trained_gamma,
        checkpoint=report,
    )
