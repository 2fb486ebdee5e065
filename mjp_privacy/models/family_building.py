"""From sizes to a network that is no plain ViT."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mjp_privacy.models.families import OtherNetwork
from mjp_privacy.models.resnet import JigsawResNet
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.models.swin import JigsawSwin

NETWORKS: Mapping[str, Callable[[Sizes, float], OtherNetwork]] = {
    "swin": JigsawSwin,
    "resnet": JigsawResNet,
}


def build_other(sizes: Sizes, drop_path: float = 0.0) -> OtherNetwork:
    """The network of these sizes, with weights as torch draws them.

    build_other(Sizes("resnet", 224, 16, 64, (3, 4, 6, 3), 1000)) is ResNet-50
    """
    return NETWORKS[sizes.family](sizes, drop_path)
