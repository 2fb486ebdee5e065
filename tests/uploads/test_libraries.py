"""Exact pictures from plain PyTorch loops over other libraries' models, batch 1, random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import load_images
from mjp_privacy.metrics.pictures import quantise

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
SMALL = {"hidden_size": 192, "intermediate_size": 384, "image_size": 64, "patch_size": 8}
DEPTH = {"num_hidden_layers": 2, "num_attention_heads": 3}


def photograph(size: int) -> Tensor:
    """One photograph (1, 3, size, size) in [0, 1]."""
    return next(iter(load_images("embedded", size=size, limit=1)))[0].unsqueeze(0)


def normalised(image: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    return (image - mean) / std


def torchvision_vit() -> tuple[nn.Module, int]:
    vision = pytest.importorskip("torchvision.models")
    model = vision.VisionTransformer(
        64, 8, num_layers=2, num_heads=3, hidden_dim=192, mlp_dim=384, num_classes=10
    )
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model, 64


def timm_vit() -> tuple[nn.Module, int]:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=192, num_classes=10), 192


def hugging_face(kind: str) -> tuple[nn.Module, int]:
    library = pytest.importorskip("transformers", reason="the dev extra brings transformers")
    made = getattr(library, f"{kind}ForImageClassification")
    return made(getattr(library, f"{kind}Config")(**SMALL, **DEPTH)), 64


def open_clip_tower() -> tuple[nn.Module, int]:
    library = pytest.importorskip(
        "open_clip.transformer", reason="the dev extra brings open_clip_torch"
    )
    tower = library.VisionTransformer(
        image_size=64, patch_size=8, width=192, layers=2, heads=3, mlp_ratio=2.0, output_dim=16
    )
    return tower, 64


def whole_clip() -> tuple[nn.Module, int]:
    """Its text tower has blocks of the same names."""
    library = pytest.importorskip("open_clip.model", reason="the dev extra brings open_clip_torch")
    picture = {"image_size": 64, "patch_size": 8, "width": 192, "layers": 2, "head_width": 64}
    text = {"context_length": 8, "vocab_size": 100, "width": 192, "heads": 3, "layers": 2}
    return library.CLIP(16, picture, text), 64


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Cross entropy on class 1, or a similarity with a text where the model is CLIP's."""
    if hasattr(model, "encode_text"):
        pair = model.encode_image(x), model.encode_text(torch.arange(8)[None])
        return nn.functional.cosine_similarity(*pair).sum()
    made: Any = model(x)
    logits = made if isinstance(made, Tensor) else made.logits
    if logits.shape[-1] == 16:  # a tower of its own: no class is in its gradient
        text = torch.randn(16, generator=torch.Generator().manual_seed(1))
        return 1 - nn.functional.cosine_similarity(logits[0], text, dim=0)
    return nn.functional.cross_entropy(logits, torch.tensor([1]))


LIBRARIES: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "torchvision": torchvision_vit,
    "timm": timm_vit,
    "transformers' ViT": lambda: hugging_face("ViT"),
    "transformers' DeiT": lambda: hugging_face("DeiT"),
    "open_clip's tower": open_clip_tower,
    "open_clip": whole_clip,
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_step_gives_its_picture(library: str) -> None:
    torch.manual_seed(0)
    model, size = LIBRARIES[library]()
    image = photograph(size)
    model.train()
    loss_of(model, normalised(image)).backward()
    before = {name: p.clone() for name, p in model.named_parameters()}
    leak = attack_gradients(model, mean=MEAN, std=STD, images=image, attacks="patch_gradient")
    assert torch.equal(quantise(leak.best.image), quantise(image[0]))
    assert leak.best.misfit < 1e-3
    if not library.startswith("open_clip"):
        assert leak.best.residual < 1e-3
        assert leak.labels is not None
        assert leak.labels.tolist() == [1]
    assert model.training
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_gradients_of_another_layout_than_the_models() -> None:
    """Names that fit another library than the model's say whose they are."""
    import timm

    theirs, _ = torchvision_vit()
    shape: dict[str, Any] = {"img_size": 64, "patch_size": 8, "depth": 2, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **shape)
    gradients = {name: torch.ones_like(p) for name, p in theirs.named_parameters()}
    with pytest.raises(UserError, match=r"1 of .* names are not parameters of the model: extra"):
        attack_gradients(model, {**gradients, "extra": torch.ones(1)}, mean=MEAN, std=STD)
    with pytest.raises(UserError, match="mean"):  # which is never guessed
        attack_gradients(model, {"head.bias": torch.ones(10)})
