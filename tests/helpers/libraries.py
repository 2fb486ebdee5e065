"""Small Vision Transformers of other libraries, with seeded random weights everywhere."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

SIDE, PATCH, DIM, DEPTH, HEADS, CLASSES = 32, 4, 96, 2, 4, 10
OUTPUTS = 40  # of CLIP's projection

HUGGING_FACE: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": DIM,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * DIM,
}


def library(name: str) -> Any:
    """The module of a library, or a skip that says what is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed ({error}): pip install 'mjp-privacy[dev]'")


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with noise on every parameter, so that all of them matter; in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def timm_vit(**changes: Any) -> nn.Module:
    """timm's plain ViT."""
    timm = library("timm.models.vision_transformer")
    sizes = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": DIM, "depth": DEPTH}
    return timm.VisionTransformer(**{**sizes, "num_heads": HEADS, "num_classes": CLASSES} | changes)


def torchvision_vit() -> nn.Module:
    """torchvision's ViT; its head is zero until `randomised`."""
    vision = library("torchvision.models.vision_transformer")
    return vision.VisionTransformer(SIDE, PATCH, DEPTH, HEADS, DIM, 4 * DIM, num_classes=CLASSES)


def hugging_face(kind: str, config: str, **changes: Any) -> nn.Module:
    """hugging_face("ViTModel", "ViTConfig")"""
    transformers = library("transformers")
    settings = getattr(transformers, config)(**HUGGING_FACE, **changes)
    return getattr(transformers, kind)(settings)


def hugging_face_tower() -> nn.Module:
    """The visual tower of transformers' CLIP, with its projection."""
    changes = {"projection_dim": OUTPUTS}
    return hugging_face("CLIPVisionModelWithProjection", "CLIPVisionConfig", **changes)


def hugging_face_clip() -> nn.Module:
    """transformers' CLIP of pictures and text, whole."""
    transformers = library("transformers")
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 16, "vocab_size": 20, "max_position_embeddings": 8}
    text |= {"bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        vision_config=HUGGING_FACE, text_config=text, projection_dim=OUTPUTS
    )
    return transformers.CLIPModel(config)


def open_clip_tower(**changes: Any) -> nn.Module:
    """open_clip's visual tower alone."""
    transformer = library("open_clip.transformer")
    sizes = {"image_size": SIDE, "patch_size": PATCH, "width": DIM, "layers": DEPTH}
    sizes |= {"heads": HEADS, "mlp_ratio": 4.0, "output_dim": OUTPUTS}
    return transformer.VisionTransformer(**sizes | changes)


def open_clip_model(quick_gelu: bool = True) -> nn.Module:
    """open_clip's CLIP of pictures and text, whole."""
    model = library("open_clip.model")
    vision = {"layers": DEPTH, "width": DIM, "head_width": DIM // HEADS, "patch_size": PATCH}
    text = {"context_length": 8, "vocab_size": 20, "width": 32, "heads": 2, "layers": 1}
    return model.CLIP(OUTPUTS, {**vision, "image_size": SIDE}, text, quick_gelu=quick_gelu)


@dataclass(frozen=True)
class Source:
    """A network of a library, and its output (B, outputs) for pictures, as its users call it."""

    layout: str
    build: Callable[[], nn.Module]
    run: Callable[[Any, Tensor], Tensor]


def _logits(module: Any, x: Tensor) -> Tensor:
    return module(x).logits


SOURCES = {
    "timm": Source("timm", timm_vit, lambda m, x: m(x)),
    "torchvision": Source("torchvision", torchvision_vit, lambda m, x: m(x)),
    "ViT": Source(
        "hf_vit",
        lambda: hugging_face("ViTForImageClassification", "ViTConfig", num_labels=CLASSES),
        _logits,
    ),
    "DeiT": Source(
        "hf_deit",
        lambda: hugging_face("DeiTForImageClassification", "DeiTConfig", num_labels=CLASSES),
        _logits,
    ),
    "CLIP of transformers": Source("hf_clip", hugging_face_tower, lambda m, x: m(x).image_embeds),
    "CLIP of transformers, no projection": Source(
        "hf_clip",
        lambda: hugging_face("CLIPVisionModel", "CLIPVisionConfig", hidden_act="gelu"),
        lambda m, x: m(x).pooler_output,
    ),
    "CLIP of transformers, whole": Source(
        "hf_clip", hugging_face_clip, lambda m, x: m.get_image_features(x).pooler_output
    ),
    "open_clip's tower": Source("open_clip", open_clip_tower, lambda m, x: m(x)),
    "open_clip's tower without ln_pre": Source(
        "open_clip", lambda: open_clip_tower(no_ln_pre=True), lambda m, x: m(x)
    ),
    "open_clip, whole, quick_gelu": Source(
        "open_clip", open_clip_model, lambda m, x: m.encode_image(x)
    ),
}
