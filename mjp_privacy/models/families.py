"""Networks of the paper's Table 1 that are no plain ViT: what they share, and what they are by.

    vit      `mjp_vit`: everything else in this package is written for it
    swin     `swin`: MJP at its patch stage, on a table of absolute positions
    resnet   `resnet`: the jigsaw alone, for a ResNet has no positions

Training, evaluation and the simulated client ask a network for no more than `OtherNetwork` offers.
What reads a ViT's own parts (closed forms, a client's sine table) asks for its `family` first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.cards import WithCard
from mjp_privacy.models.localization import LocalizationRegressor
from mjp_privacy.models.mjp_vit import FirstBlock, PositionEmbedding
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.models.vit import start_


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
