"""Where the Vision Transformers of other libraries differ from timm's plain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal["gelu", "quick_gelu", "gelu_tanh", "relu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
PLAIN_EPS = 1e-6


@dataclass(frozen=True)
class Variant:
    """What a network has beside its sizes; the defaults are timm's plain ViT.

    pre_norm            a LayerNorm before block 0 (`norm_pre`, CLIP's ln_pre)
    patch_bias          the patch embedding has a bias; CLIP's has none
    qkv_bias            the attention's query, key and value have one
    head_bias           the head has one; CLIP's projection has none
    distillation_token  a token of its own (`dist_token`) and its position (`dist_pos_embed`); it
                        stands last, which changes nothing, for blocks treat all places alike
    norm_eps            eps of every LayerNorm
    activation          of the blocks' two-layer networks
    """

    pre_norm: bool = False
    patch_bias: bool = True
    qkv_bias: bool = True
    head_bias: bool = True
    distillation_token: bool = False
    norm_eps: float = PLAIN_EPS
    activation: Activation = "gelu"

    def __str__(self) -> str:
        """What is not timm's, to follow a model's sizes: `, pre-norm, no patch bias`."""
        plain = Variant()
        words = [
            "pre-norm" if self.pre_norm else "",
            "" if self.patch_bias else "no patch bias",
            "" if self.qkv_bias else "no qkv bias",
            "" if self.head_bias else "no head bias",
            "distillation token" if self.distillation_token else "",
            f"eps {self.norm_eps:g}" if self.norm_eps != plain.norm_eps else "",
            self.activation if self.activation != plain.activation else "",
        ]
        return "".join(f", {word}" for word in words if word)
