"""Uploads of networks whose blocks are one's own, in ways that most are not."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

from tests.uploads.test_own_networks import ByHand, Gated, leak_of, photographs

GIVEN: dict[str, Any] = {"attacks": "token_peeling", "img_size": 32}


class Keeps(Gated):
    """Keeps what it computes, by itself and in a list."""

    def forward(self, u: Tensor) -> Tensor:
        self.last = super().forward(u)
        self.__dict__.setdefault("all", []).append(self.last)
        return self.last


def test_parts_may_keep_what_they_computed() -> None:
    torch.manual_seed(4)
    network = ByHand("three", "list", gate="module")
    for block in network.blocks:
        block.mlp = Keeps(True)
    found = leak_of(network, photographs(2), batch=2, **GIVEN)
    assert (found.best.exact, found.best.verified) == (2, 2)


def test_blocks_may_be_computed_again_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    sizes: Any = {"img_size": 56, "embed_dim": 96, "depth": 2, "num_heads": 4, "num_classes": 10}
    network = timm.create_model("vit_small_patch14_dinov2", **sizes)
    for name, scale in network.named_parameters():
        if "gamma" in name:
            nn.init.constant_(scale, 0.1)
    network.set_grad_checkpointing(True)
    found = leak_of(network, photographs(1, 56), attacks=["patch_gradient", "token_peeling"])
    assert found["patch_gradient"].exact == 1
    assert found["patch_gradient"].residual < 1e-6
    assert network.grad_checkpointing
