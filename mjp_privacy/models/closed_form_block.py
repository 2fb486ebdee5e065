"""The altered block 0 that APRIL's closed form needs.

Attention must see z itself, so norm1 and both residual connections are removed:

    z -> attn(z) -> mlp(norm2(.))

This is the model breaching calls `vit_small_april`. Attacks on published checkpoints put the block
onto the weights of an intact network: no client trains such a model, and its accuracy drops (both
accuracies are columns of every table). A model can also be trained with the block from the start:
`first_block="closed_form"`.
"""

from __future__ import annotations

from torch import Tensor, nn

from mjp_privacy.models.vit import Block


class ClosedFormBlock(nn.Module):
    """A block without norm1 and residuals; its parameters keep their names."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn = block.attn
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.drop_path2 = block.drop_path2

    def forward(self, z: Tensor) -> Tensor:
        """z (B, N+1, D) -> (B, N+1, D)."""
        mixed: Tensor = self.drop_path2(self.mlp(self.norm2(self.attn(z))))
        return mixed
