"""Exact pictures from plain PyTorch loops over other libraries' models, batch 1, random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients, save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import load_images

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
SMALL = {"hidden_size": 192, "intermediate_size": 384, "image_size": 64, "patch_size": 8}
TOWER = {"image_size": 64, "patch_size": 8, "width": 192, "layers": 2}
TEXT = {"context_length": 8, "vocab_size": 100, "width": 192, "heads": 3, "layers": 2}


def torchvision_vit() -> nn.Module:
    vision = pytest.importorskip("torchvision.models")
    model = vision.VisionTransformer(
        64, 8, num_layers=2, num_heads=3, hidden_dim=192, mlp_dim=384, num_classes=10
    )
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def timm_vit(classes: int = 10) -> nn.Module:
    import timm

    shape: dict[str, Any] = {"img_size": 64, "patch_size": 8, "depth": 2, "num_classes": classes}
    return timm.create_model("vit_tiny_patch16_224", **shape)


def hugging_face(kind: str) -> nn.Module:
    library = pytest.importorskip("transformers", reason="the dev extra brings transformers")
    config = getattr(library, f"{kind}Config")
    made = getattr(library, f"{kind}ForImageClassification")
    return made(config(**SMALL, num_hidden_layers=2, num_attention_heads=3))


def open_clip(whole: bool) -> nn.Module:
    """A tower, or all of CLIP, whose text tower has blocks of the same names."""
    why = "the dev extra brings open_clip_torch"
    if whole:
        library = pytest.importorskip("open_clip.model", reason=why)
        return library.CLIP(16, {**TOWER, "head_width": 64}, TEXT)
    library = pytest.importorskip("open_clip.transformer", reason=why)
    return library.VisionTransformer(**TOWER, heads=3, mlp_ratio=2.0, output_dim=16)


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
    if logits.shape[-1] == 192:  # features
        return logits.square().sum()
    return nn.functional.cross_entropy(logits, torch.tensor([1]))


LIBRARIES: dict[str, Callable[[], nn.Module]] = {
    "torchvision": torchvision_vit,
    "timm": timm_vit,
    "timm's features": lambda: timm_vit(0),
    "transformers' ViT": lambda: hugging_face("ViT"),
    "transformers' DeiT": lambda: hugging_face("DeiT"),
    "open_clip's tower": lambda: open_clip(False),
    "open_clip": lambda: open_clip(True),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_step_gives_its_picture(library: str, tmp_path: Path) -> None:
    """A model without a classifier is attacked, and not saved."""
    torch.manual_seed(0)
    model = LIBRARIES[library]().train()
    image = next(iter(load_images("embedded", size=64, limit=1)))[0].unsqueeze(0)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    loss_of(model, (image - mean) / std).backward()
    before = {name: p.clone() for name, p in model.named_parameters()}
    leak = attack_gradients(model, mean=MEAN, std=STD, images=image, attacks="patch_gradient")
    assert leak.best.exact == 1
    assert leak.best.is_certain
    assert leak.best.misfit < 1e-3
    if library in ("torchvision", "timm") or library.startswith("transformers"):
        assert leak.best.residual < 1e-3
        assert leak.labels is not None
        assert leak.labels.tolist() == [1]
    if library == "timm's features":
        with pytest.raises(UserError, match="classifier"):
            save_upload(tmp_path, model, mean=0.5, std=0.5)
    assert model.training
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_names_that_are_not_the_models_and_a_missing_mean_are_said() -> None:
    model = timm_vit()
    gradients = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with pytest.raises(UserError, match=r"1 other\(s\) of .*: head\.wieght"):
        attack_gradients(model, {**gradients, "head.wieght": torch.ones(1)}, mean=MEAN, std=STD)
    with pytest.raises(UserError, match="mean"):  # which is never guessed
        attack_gradients(model, {"head.bias": torch.ones(10)})
