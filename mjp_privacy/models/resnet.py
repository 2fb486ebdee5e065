"""ResNets under MJP: "only shuffling the image patches with Alg. 1 (No PEs)", as the paper says.

A ResNet sees pixels alone. The jigsaw permutes patches of its input, and there is no position
embedding that could be masked, so a mask changes nothing in the network.
"""

from __future__ import annotations

from torch import Tensor

from mjp_privacy.models.families import OtherNetwork
from mjp_privacy.models.sizes import Sizes

CHILDREN = ("conv1", "bn1", "act1", "maxpool", "layer{}", "global_pool", "fc")
"""timm's parts of a ResNet in the order of its forward pass; `layer{}` stands for all stages."""


class JigsawResNet(OtherNetwork):
    """timm's ResNet of bottleneck blocks, under its own parameter names.

    JigsawResNet(Sizes("resnet", 224, 16, 64, (3, 4, 6, 3), 1000)) is ResNet-50, whose jigsaw has
    patches of 16×16 pixels. `embed_dim` is the width of the first stage; the stem always has 64.
    """

    def __init__(self, sizes: Sizes, drop_path: float = 0.0) -> None:
        from timm.models.resnet import Bottleneck, ResNet

        super().__init__(sizes)
        stages = range(len(sizes.stages))
        plain = ResNet(
            Bottleneck,  # type: ignore[arg-type]  # timm says the block, and means its class
            layers=sizes.stages,
            num_classes=sizes.num_classes,
            channels=tuple(sizes.embed_dim << stage for stage in stages),
            drop_path_rate=drop_path,
        )
        self.order = [
            name
            for part in CHILDREN
            for name in ([part.format(k + 1) for k in stages] if "{}" in part else [part])
        ]
        for name in self.order:
            self.add_module(name, plain.get_submodule(name))
        self.start_linear_layers()

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over all places after the last stage, (B, 1, D); the mask is not used."""
        for name in self.order[:-1]:
            x = self.get_submodule(name)(x)
        return x.unsqueeze(1)

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (B, classes) from the features (B, 1, D)."""
        logits: Tensor = self.get_submodule("fc")(features[:, 0])
        return logits
