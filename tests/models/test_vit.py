"""The plain Vision Transformer beside timm's: start, outputs and gradients, bit for bit."""

from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer as TimmTransformer
from torch import nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.sizes import Variant
from mjp_privacy.models.vit import VisionTransformer

SIZES: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 7,
}
CLIPS = Variant(pre_norm=True, patch_bias=False, norm_eps=1e-5, activation="quick_gelu")
NETWORKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # our arguments, timm's
    "plain": ({}, {}),
    "narrow": ({"mlp_ratio": 1.5}, {"mlp_ratio": 1.5}),
    "drop path": ({"drop_path_rate": 0.6}, {"drop_path_rate": 0.6}),
    "no positions": ({"has_positions": False}, {"pos_embed": "none"}),
    "no classes": ({"num_classes": 0}, {"num_classes": 0}),
    "no qkv bias": ({"variant": Variant(qkv_bias=False)}, {"qkv_bias": False}),
    "tanh": ({"variant": Variant(activation="gelu_tanh")}, {"act_layer": "gelu_tanh"}),
    "relu": ({"variant": Variant(activation="relu")}, {"act_layer": "relu"}),
    "CLIP's": (
        {"variant": CLIPS},
        {
            "pre_norm": True,
            "norm_layer": partial(nn.LayerNorm, eps=1e-5),
            "act_layer": "quick_gelu",
        },
    ),
}


def both(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any]:
    """Our network and timm's, each made from the same seed."""
    torch.manual_seed(5)
    our_network = VisionTransformer(**{**SIZES, **ours})
    torch.manual_seed(5)
    return our_network, TimmTransformer(**{**SIZES, **theirs})


def logits(network: Any, images: torch.Tensor) -> torch.Tensor:
    """The logits, in training mode with the same draws for every network."""
    torch.manual_seed(6)
    if isinstance(network, TimmTransformer):
        return network(images)
    tokens = network.patch_embed(images)
    tokens = torch.cat((network.cls_token.expand(len(tokens), -1, -1), tokens), dim=1)
    if network.pos_embed is not None:
        tokens = tokens + network.pos_embed
    return network.forward_head(network.norm(network.blocks(network.norm_pre(tokens))))


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_seed_gives_the_parameters_of_timms_network(kind: str) -> None:
    ours, theirs = both(*NETWORKS[kind])
    expected = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(expected)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert ours.no_weight_decay() <= theirs.no_weight_decay()


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("fused", [True, False])
def test_outputs_and_gradients_are_timms_bit_for_bit(kind: str, fused: bool) -> None:
    ours, theirs = (network.train() for network in both(*NETWORKS[kind]))
    for module in [*ours.modules(), *theirs.modules()]:
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(7))
    found, expected = logits(ours, images), logits(theirs, images)
    assert torch.equal(found, expected)
    if kind == "drop path":
        assert not torch.equal(found, logits(ours.eval(), images))
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(8))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name


def test_a_picture_of_another_size_is_refused() -> None:
    network = VisionTransformer(**SIZES)
    with pytest.raises(
        UserError,
        match=r"Expected images \(B, 3, 32, 32\), got \(1, 3, 40, 40\). Resize the images, or load",
    ):
        network.patch_embed(torch.rand(1, 3, 40, 40))
