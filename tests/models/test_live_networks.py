"""Live networks of other libraries: timm's names, their own forward, tables that are stretched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients, save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.models.modules import load_module
from mjp_privacy.models.timm_networks import TimmNetwork
from tests.helpers.libraries import library

WIDE = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3}


def dinov2(kind: str, side: int = 56, **more: Any) -> nn.Module:
    """transformers' Dinov2 with random weights, whose table is for pictures of this side."""
    transformers = library("transformers")
    config = "Dinov2WithRegistersConfig" if "Registers" in kind else "Dinov2Config"
    settings = getattr(transformers, config)(image_size=side, patch_size=14, **WIDE, **more)
    return getattr(transformers, kind)(settings).eval()  # type: ignore[no-any-return]


def siglip(kind: str) -> nn.Module:
    transformers = library("transformers")
    vision = {"image_size": 64, "patch_size": 16, "intermediate_size": 384, **WIDE}
    if kind == "SiglipVisionModel":
        settings = transformers.SiglipVisionConfig(**vision)
    else:
        settings = transformers.SiglipConfig(vision_config=vision, num_labels=7)
    return getattr(transformers, kind)(settings).eval()  # type: ignore[no-any-return]


NETWORKS = {
    "Dinov2ForImageClassification": lambda: dinov2("Dinov2ForImageClassification", num_labels=5),
    "Dinov2Model": lambda: dinov2("Dinov2Model"),
    "Dinov2WithRegistersModel": lambda: dinov2("Dinov2WithRegistersModel"),
    "SiglipVisionModel": lambda: siglip("SiglipVisionModel"),
    "SiglipForImageClassification": lambda: siglip("SiglipForImageClassification"),
}


def logits_of(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    if isinstance(out, Tensor):
        return out
    return out["logits"] if "logits" in out else out["pooler_output"]  # type: ignore[no-any-return]


def of_one_step(module: nn.Module, side: int) -> Tensor:
    """An 8-bit picture (1, 3, side, side), after the module's gradients of it were computed."""
    picture = (torch.rand(1, 3, side, side) * 255).round() / 255
    logits = logits_of(module, (picture - 0.5) / 0.5)
    torch.nn.functional.cross_entropy(logits, torch.tensor([3])).backward()  # type: ignore[no-untyped-call]
    return picture


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_transformers_leak_their_picture(name: str) -> None:
    module = NETWORKS[name]()
    side = 64 if name.startswith("Siglip") else 56
    copy = load_module(module, mean=0.5, std=0.5)
    assert isinstance(copy, TimmNetwork)
    x = torch.randn(2, 3, side, side)
    torch.testing.assert_close(copy(x), logits_of(module, x))
    assert sum(p.numel() for p in copy.parameters()) == sum(p.numel() for p in module.parameters())
    picture = of_one_step(module, side)
    leak = attack_gradients(module, mean=0.5, std=0.5, images=picture, attacks=["patch_gradient"])
    assert leak["patch_gradient"].psnr > 60
    before = {key: parameter.clone() for key, parameter in module.named_parameters()}
    assert all(torch.equal(before[key], p) for key, p in module.named_parameters())


STRETCHED = {
    "transformers": lambda: dinov2("Dinov2ForImageClassification", side=112, num_labels=5),
    "dinov2": lambda: timm.create_model(
        "vit_small_patch14_dinov2", img_size=112, dynamic_img_size=True, num_classes=9, depth=2
    ),
    "plain": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=112, dynamic_img_size=True, num_classes=9, depth=2
    ),
    "eva02": lambda: timm.create_model(
        "eva02_tiny_patch14_224", img_size=112, dynamic_img_size=True, num_classes=9, depth=2
    ),
}


@pytest.mark.parametrize("name", STRETCHED)
def test_a_stretched_table_still_tells_the_rows_of_the_patches(name: str) -> None:
    module = STRETCHED[name]().eval()
    side = 64 if name == "plain" else 56
    picture = of_one_step(module, side)
    leak = attack_gradients(
        module, mean=0.5, std=0.5, img_size=side, images=picture, attacks=["patch_gradient"]
    )
    assert leak["patch_gradient"].psnr > 60


def test_a_table_that_is_stretched_to_more_positions_is_refused() -> None:
    with pytest.raises(UserError, match="64 positions is stretched to 121"):
        load_module(dinov2("Dinov2Model", side=112), mean=0.5, std=0.5, img_size=154)


def test_a_network_of_one_size_refuses_another() -> None:
    with pytest.raises(UserError, match="img_size"):
        load_module(siglip("SiglipVisionModel"), mean=0.5, std=0.5, img_size=96)


def test_pixels_that_no_patch_covers_are_left_out() -> None:
    """384 px are 27 patches of 14 px and six pixels that the convolution never sees."""
    net = timm.create_model("vit_so400m_patch14_siglip_384", num_classes=3, depth=1)
    copy = load_module(net, mean=0.5, std=0.5)
    assert (copy.grid, copy.card.img_size) == (27, 378)
    x = torch.randn(1, 3, 384, 384)
    torch.testing.assert_close(copy(x[..., :378, :378]), net.eval()(x))


def test_an_upload_of_another_librarys_network_is_not_recorded(tmp_path: Path) -> None:
    module = dinov2("Dinov2ForImageClassification", num_labels=5)
    of_one_step(module, 56)
    with pytest.raises(UserError, match="Dinov2ForImageClassification"):
        save_upload(tmp_path, module, mean=0.5, std=0.5)


def test_what_has_no_table_or_no_patches_is_refused() -> None:
    for module in (nn.Linear(3, 3), nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten())):
        with pytest.raises(UserError, match="Vision Transformer"):
            load_module(module, mean=0.5, std=0.5)
