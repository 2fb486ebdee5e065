"""What an upload's header says of its model where the weights file does not: `model`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from mjp_privacy.core.schema import (
    STRICT,
    Classes,
    Depth,
    Label,
    Positive,
    Share,
    Side,
    Switch,
    Width,
)
from mjp_privacy.models.localization import DalKind
from mjp_privacy.models.mjp_vit import FirstBlock, PositionEmbedding
from mjp_privacy.models.variant import Activation

Ratio = Annotated[float, Field(strict=True, gt=0, le=64)]


class ModelArguments(TypedDict, total=False):
    """Arguments of `load_model`; its weights, mean and std are fields of the header itself."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    model: Label
    """A model's name, such as vit_small_patch16_224."""
    unknown_init: Literal["mean_position", "zeros", "random"]
    img_size: Side
    patch_size: Side
    embed_dim: Width
    depth: Depth
    num_heads: Width
    num_classes: Classes
    mlp_ratio: Ratio
    resize: Side
    interpolation: Literal["bicubic", "bilinear"]
    position_embedding: PositionEmbedding
    unknown_embedding: Switch
    index_embedding: Switch
    dal: DalKind
    first_block: FirstBlock
    pre_norm: Switch
    patch_bias: Switch
    qkv_bias: Switch
    head_bias: Switch
    distillation_token: Switch
    norm_eps: Positive
    activation: Activation
    trained_gamma: Share
