"""The other networks of the paper's Table 1 under MJP: Swin Transformers and ResNets.

Swin: MJP at the patch stage, as the paper adds it "to the absolute PEs". A Swin needs no absolute
positions: each attention window has a table of relative biases, the same for every window, and
Swin-T has no other. MJP has nothing to mask in those: a bias belongs to a pair of places in a
window, not to a patch. So the paper gives Swin-T a table of absolute position embeddings
(`absolute_pos_embed`, Swin's own name for it), added to the embedded patches, and masks its rows;
the relative biases stay as they are. A shuffled patch thus loses its absolute place and keeps the
place within its window.

ResNet: "only shuffling the image patches with Alg. 1 (No PEs)", as the paper says. A ResNet sees
pixels alone. The jigsaw permutes patches of its input, and there is no position embedding that
could be masked, so a mask changes nothing in the network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mjp_privacy.models.families import OtherNetwork
from mjp_privacy.models.mjp_vit import LocalizationRegressor
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.models.vit import start_, start_linear_layers

WINDOW = 7  # patches along a side of an attention window
RELATIVE = "relative_position_bias_table"


class JigsawSwin(OtherNetwork):
    """timm's SwinTransformer under its own parameter names, with these additions:

    absolute_pos_embed  (1, N, D), a row for each patch and none for a class token, if
                        `sizes.positions`
    unk_embed           (1, 1, D), in place of the masked patches' rows
    dal_regressor       the localization regressor on the table
    """

    def __init__(self, sizes: Sizes, drop_path: float = 0.0) -> None:
        from timm.models.swin_transformer import SwinTransformer

        super().__init__(sizes)
        width = sizes.embed_dim
        plain = SwinTransformer(
            img_size=sizes.img_size,
            patch_size=sizes.patch_size,
            num_classes=sizes.num_classes,
            embed_dim=width,
            depths=sizes.stages,
            num_heads=tuple(sizes.num_heads << stage for stage in range(len(sizes.stages))),
            window_size=WINDOW,
            drop_path_rate=drop_path,
        )
        self.patch_embed, self.layers = plain.patch_embed, plain.layers
        self.norm, self.head = plain.norm, plain.head
        self.absolute_pos_embed = _table(self.tokens, width) if sizes.positions else None
        self.unk_embed = _table(1, width) if sizes.unknown_embedding else None
        if sizes.dal != "none":
            self.dal_regressor = LocalizationRegressor(width, sizes.dal)
        start_linear_layers(self)
        for name, table in self.named_parameters():
            if name.endswith((RELATIVE, "_embed")) and not table.is_meta:
                start_(table)

    @property
    def table(self) -> Tensor:
        """The table of absolute positions (1, N, D); a Swin without one has none."""
        assert self.absolute_pos_embed is not None
        return self.absolute_pos_embed

    def no_weight_decay(self) -> set[str]:
        """The relative biases, as timm has them, and the new tables."""
        relative = {name for name, _ in self.named_parameters() if name.endswith(RELATIVE)}
        return {*relative, "absolute_pos_embed", "unk_embed"}

    def embed(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """z (B, rows, columns, D), the input of the first stage."""
        z: Tensor = self.patch_embed(x)
        if self.absolute_pos_embed is not None:
            z = z + self.positions(mask).unflatten(1, self.grid)
        return z

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over all places after the last norm, (B, 1, D)."""
        z = self.layers(self.embed(x, mask))
        pooled: Tensor = self.head(self.norm(z), pre_logits=True)
        return pooled.unsqueeze(1)

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (B, classes) from the features (B, 1, D)."""
        logits: Tensor = self.head.fc(features[:, 0])
        return logits


def _table(rows: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, rows, width))


class JigsawResNet(OtherNetwork):
    """timm's ResNet of bottleneck blocks, under its own parameter names.

    JigsawResNet(Sizes("resnet", 224, 16, 64, (3, 4, 6, 3), 1000)) is ResNet-50, whose jigsaw has
    patches of 16×16 pixels. `embed_dim` is the width of the first stage; the stem always has 64.
    """

    def __init__(self, sizes: Sizes, drop_path: float = 0.0) -> None:
        from timm.models.resnet import Bottleneck, ResNet

        super().__init__(sizes)
        plain = ResNet(
            Bottleneck,  # type: ignore[arg-type]  # timm says the block, and means its class
            layers=sizes.stages,
            num_classes=sizes.num_classes,
            channels=tuple(sizes.embed_dim << stage for stage in range(len(sizes.stages))),
            drop_path_rate=drop_path,
        )
        self.order = [name for name, _ in plain.named_children()]
        for name in self.order:
            self.add_module(name, plain.get_submodule(name))
        start_linear_layers(self)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over all places after the last stage, (B, 1, D); the mask is not used.

        timm's parts stand in the order of its forward pass, from conv1 to global_pool and fc.
        """
        for name in self.order[:-1]:
            x = self.get_submodule(name)(x)
        return x.unsqueeze(1)

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (B, classes) from the features (B, 1, D)."""
        logits: Tensor = self.get_submodule("fc")(features[:, 0])
        return logits
