"""What every network offers to those who train, simulate, attack and measure; its card.

    card, normalize, denormalize   where it came from, and how it takes images (`WithCard`)
    family                         vit, or one of NETWORKS
    patch_size, grid, tokens       pixels along a patch, patches down and across, tokens of block 0
    like                           a parameter, which tells the device and the precision
    unk_embed, dal_regressor       what MJP adds, or None
    forward_features, forward_head, forward(x, mask)

A ViT of this package (`mjp_vit`) says more, and what reads these parts (closed forms, a client's
sine table) asks for `family == "vit"` first:

    patch_embed.proj, patch_bias   the patch embedding's kernel and its bias, zeros without one
    cls_token, dist_token          tokens beside the patches: the class first, distillation last
    pos_embed, table               (1, N+1, D): the class's row, then the patches' row by row

Another library's ViT becomes such a one by its names (`layouts`, `modules.load_module`). A network
that is none is an `OtherNetwork`, with a line in NETWORKS.
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
from mjp_privacy.core.schema import Size
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import WeightFile
from mjp_privacy.models.checkpoints import CheckpointReport, check_same
from mjp_privacy.models.jigsaw import Grid
from mjp_privacy.models.mjp_vit import FirstBlock, Positioned, PositionEmbedding, check_mask
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.models.spec import STATES, ModelSpec, overridden, stated
from mjp_privacy.models.zoo import PIXELS, check_complete


@dataclass(frozen=True)
class ModelCard:
    """The facts about a loaded model that table rows state."""

    name: str
    architecture: str
    img_size: Size
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
        mean, std = self._pixels(images)
        return (images - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse of `normalize`; values outside [0, 1] are not clipped."""
        mean, std = self._pixels(x)
        return x * std + mean

    def _pixels(self, like: Tensor) -> Tensor:
        """Mean and std (2, C, 1, 1), made in the precision of `like`: float64 numbers must not
        pass through float32."""
        numbers = (self.card.mean, self.card.std)
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)[..., None, None]


def card_of(spec: ModelSpec, architecture: str, report: CheckpointReport) -> ModelCard:
    """The card of a network that was built from this complete spec."""
    assert spec.mean is not None
    assert spec.std is not None
    return ModelCard(
        name=spec.name,
        architecture=architecture,
        img_size=spec.img_size or 0,
        resize=spec.resize,
        interpolation=spec.interpolation or "bicubic",
        mean=spec.mean,
        std=spec.std,
        num_classes=int(spec.num_classes or 0),
        trained_gamma=spec.trained_gamma,
        checkpoint=report,
    )


class OtherNetwork(WithCard, Positioned):
    """What training, evaluation and clients use of a network that is no plain ViT.

    Its features are what its classifier reads, (B, 1, D), in the place of a ViT's tokens: the first
    of them is what Diff. Norm. compares, as the authors' code does with Swin's pooled features.
    """

    before = 0
    position_embedding: PositionEmbedding
    first_block: FirstBlock = "intact"
    pos_embed = index_embed = adapters = None

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.family = sizes, sizes.family
        self.patch_size, self.grid = sizes.patch_size, Grid.of(sizes.img_size, sizes.patch_size)
        self.tokens = self.grid.patches
        self.position_embedding = "learned" if sizes.positions else "strict"
        self.dal_kind = sizes.dal
        self.unk_embed = self.dal_regressor = None

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
        side = self.sizes.img_size
        if x.ndim != 4 or x.shape[-2:] != (side, side):
            raise UserError(f"Expected images (B, 3, {side}, {side}), got {tuple(x.shape)}.")
        if mask is not None:
            check_mask(mask, self.tokens, len(x))
        return self.forward_head(self.forward_features(x, mask))


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


# their files --------------------------------------------------------------------------------------

SIZES = "network"
"""The entry of a file's metadata that states the sizes of another network than a ViT, as
`mjp train` writes it. Such a file's tensors have timm's names; mean, std and the like stand in the
metadata as a ViT's do."""
PICTURES = ("mean", "std", "resize", "interpolation", "trained_gamma")
"""What a user may say of such a file; its sizes are its own."""


def load_other(
    name: str | None, file: WeightFile, overrides: Mapping[str, Any], *, outline: bool = False
) -> OtherNetwork:
    """The network of such a file in eval mode, with its card.

    outline  without weights, on torch's meta device: the file's shapes are enough
    """
    content = json_value(file.metadata[SIZES], file.path, STATES)
    sizes = typed(content, file.path, STATES, Sizes)
    sizes.check(file.shown)
    given = {key: value for key, value in overrides.items() if value is not None}
    named = [f"model {name}"] if name else []
    if refused := [*named, *(f"{key}={given[key]}" for key in given if key not in PICTURES)]:
        raise UserError(
            f"{file.shown} holds a {sizes.family} and states its own sizes: expected no more than "
            f"{', '.join(PICTURES)}, got {shown(', '.join(refused), 100)}. Leave that out."
        )
    facts = {key: value for key, value in stated(file).items() if key in PICTURES}
    spec = overridden(replace(ModelSpec(f"custom {sizes.family}"), **facts), given)
    check_complete(spec, file.shown, PIXELS)
    spec = replace(spec, img_size=sizes.img_size, num_classes=sizes.num_classes)
    with torch.device("meta" if outline else "cpu"):
        network = build_other(sizes)
    check_same(network, file.tensors, weights_of(network), file.shown)
    if not outline:
        stored = {key: tensor.float() for key, tensor in file.tensors.items()}
        network.load_state_dict(stored, strict=False)
    report = CheckpointReport(file.path.name, file.sha256, sizes.family)
    network.card = card_of(spec, str(sizes), report)
    return network.eval()


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a network: parameters, and statistics such as batch norm's."""
    kept = network.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in kept.items() if tensor.is_floating_point()}
