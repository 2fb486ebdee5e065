"""The altered block 0 that APRIL's closed form needs.

Attention must see z itself, so norm1 and both residual connections are removed:

    z -> attn(z) -> mlp(norm2(.))

This is the model breaching calls `vit_small_april`. Attacks on published checkpoints put the block
onto the weights of an intact network: no client trains such a model, and its accuracy drops (both
accuracies are columns of every table). A model can also be trained with the block from the start:
`first_block="closed_form"`.
"""

from __future__ import annotations

from timm.models.vision_transformer import Block
from torch import Tensor, nn


class ClosedFormBlock(nn.Module):
    """A timm block without norm1 and residuals; its parameters keep their names."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn = block.attn
        self.ls1 = block.ls1
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.ls2 = block.ls2
        self.drop_path2 = block.drop_path2

    def forward(self, z: Tensor) -> Tensor:
        """z (B, N+1, D) -> (B, N+1, D)."""
        hidden = self.ls1(self.attn(z))
        return self.drop_path2(self.ls2(self.mlp(self.norm2(hidden))))
