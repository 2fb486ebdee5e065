"""What networks are built from; no torch is imported, for configs read it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import yaml_value
from mjp_privacy.core.schema import (
    Classes,
    Depth,
    NotNegative,
    Positive,
    Side,
    Size,
    Switch,
    Width,
    height_width,
    parse,
    schema,
    size_text,
)
from mjp_privacy.core.text import shown

MOST_PARAMETERS = 25_000_000_000
"""The largest Vision Transformer that was trained has 22 thousand millions."""
BYTES = 4  # of a parameter in float32
PAPERS_SIZE = 224
"""Pixels of a side of what the paper's models take."""
PAPERS_MODEL = re.compile(r"vit d384 l12 h6 p16@224\b|(vit|deit)_small_patch16_224\b")


def is_papers_model(architecture: str | None, size: Size | None) -> bool:
    """Whether a model has the family and input size of the paper's DeiT-S: a ViT-S/16 at 224."""
    return size == PAPERS_SIZE and PAPERS_MODEL.match(architecture or "") is not None


def check_parameters(
    name: str,
    *,
    img_size: Size,
    patch_size: int,
    embed_dim: int,
    depth: int,
    num_heads: int,
    num_classes: int,
    mlp_ratio: float = 4.0,
    wider: int = 1,
    free: int | None = None,
) -> None:
    """Raise for a network that there is not: each size may be real, and all together not.

    wider  how many times as wide the last stage is
    free   bytes of memory that can still be taken; None: not known
    """
    if any(side % patch_size for side in height_width(img_size)):
        raise UserError(
            f"{name}: expected img_size divisible by patch_size, got {size_text(img_size)}/"
            f"{patch_size}. Give a size that fits."
        )
    if embed_dim % num_heads:
        raise UserError(
            f"{name}: expected embed_dim divisible by num_heads, got {embed_dim}/{num_heads}. Give "
            "a number that fits."
        )
    width = wider * embed_dim
    block = (4 + 2 * mlp_ratio) * width**2
    patches = math.prod(side // patch_size for side in height_width(img_size))
    rows = patches + 3 * patch_size**2 + num_classes
    parameters = depth * block + rows * width
    needed = BYTES * parameters
    if parameters <= MOST_PARAMETERS and (free is None or needed <= free):
        return
    limit = f"{MOST_PARAMETERS:,} parameters"
    if parameters <= MOST_PARAMETERS and free is not None:
        limit = f"the {free / 1e9:.1f} GB of memory that are free"
    raise UserError(
        f"{name}: a network of these sizes has about {parameters:,.0f} parameters, that is "
        f"{needed / 1e9:,.1f} GB: expected one that fits into {limit}. Give smaller sizes."
    )


Activation = Literal["gelu", "quick_gelu", "gelu_tanh", "relu"]


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
    norm_eps: float = 1e-6
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


Target = Literal["qkv", "proj", "fc1", "fc2"]
ADAPTERS = ("lora_A", "lora_B")
"""What PEFT calls the two matrices of an adapter."""


@schema
class LowRank:
    """Which layers get adapters, and how these start: LowRank(4, ("qkv", "proj"))."""

    rank: Width
    targets: Annotated[tuple[Target, ...], Field(min_length=1, max_length=4)] = ("qkv",)
    """Linear layers of every block; `proj` is the attention's. (PEFT would also take the patch
    embedding's, which has the same last name.)"""
    alpha: Positive | None = None
    """The adapter's product counts alpha / rank times; None: once."""
    head: Switch = True
    """Whether the classifier is trained and sent whole, PEFT's `modules_to_save`: usual where a
    model learns new classes."""
    spread: NotNegative = 0.0
    """Standard deviation of B's entries at the start. 0 is PEFT's start, at which the gradient of
    every A is zero; above it stands for a round after others, where B has moved."""

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def trains(self, name: str) -> bool:
        """Whether the client trains, and so sends, the parameter of this name."""
        parts = name.split(".")
        return not set(parts).isdisjoint(ADAPTERS) or (self.head and parts[0] == "head")

    @property
    def text(self) -> str:
        """The line that `low_rank` reads back: LowRank(4).text is "{rank: 4, targets: [qkv]}"."""
        parts = [f"rank: {self.rank}", f"targets: [{', '.join(self.targets)}]"]
        parts += [] if self.alpha is None else [f"alpha: {self.alpha!r}"]
        parts += [] if self.head else ["head: false"]
        parts += [f"spread: {self.spread!r}"] if self.spread else []
        return f"{{{', '.join(parts)}}}"


def low_rank(item: Any) -> LowRank:
    """low_rank({"rank": 4}) and low_rank("{rank: 4}") are LowRank(4)."""
    content = yaml_value(item, "client.lora") if isinstance(item, str) else item
    if not isinstance(content, Mapping):
        raise UserError(
            "low-rank adapters are written as {rank: 4, targets: [qkv, proj]}; got "
            f"{shown(repr(item), 100)}"
        )
    adapters = parse(LowRank, content, "it")
    if len(set(adapters.targets)) < len(adapters.targets):
        raise UserError(f"targets: expected each layer once, got {', '.join(adapters.targets)}")
    return adapters


def _one_line(item: Any) -> str:
    """The adapters of a file or of the command line as their line of text."""
    try:
        return low_rank(item).text
    except UserError as error:  # pydantic adds the name of the field
        said = " ".join(str(error).split()).rstrip(".")
        raise PydanticCustomError("adapters", "{said}", {"said": said}) from error


AdaptersText = Annotated[str, BeforeValidator(_one_line), Field(max_length=200)]
"""A field that holds such a line; it may be given as a mapping."""
PerhapsAdapters = Annotated[
    str,
    BeforeValidator(lambda item: "" if item == "" else _one_line(item)),
    Field(max_length=200),
]
"""The same, or an empty text for no adapters."""


Family = Literal["vit", "swin", "resnet"]
DalKind = Literal["none", "pca", "linear", "nonlinear"]
Stages = Annotated[tuple[Depth, ...], Field(min_length=1, max_length=8)]
"""Blocks in each stage; every stage but the first halves the picture and doubles the width."""


@schema
class Sizes:
    """All that such a network is built from; its checkpoint states them as JSON.

    patch_size  side of the patches that the jigsaw shuffles; a Swin embeds the same patches
    embed_dim   width of the first stage: 96 in Swin-T, 64 in ResNet-50
    num_heads   of a Swin's first stage; doubled with the width
    positions   whether a Swin has a table of absolute positions beside its relative bias
    """

    family: Literal["swin", "resnet"]
    img_size: Side
    patch_size: Side
    embed_dim: Width
    stages: Stages
    num_classes: Classes
    num_heads: Width = 1
    positions: Switch = False
    unknown_embedding: Switch = False
    dal: DalKind = "none"

    def check(self, where: str) -> None:
        """Raise a UserError unless there is a network of these sizes."""
        if not self.positions and (self.unknown_embedding or self.dal != "none"):
            raise UserError(
                f"{where}: a {self.family} without a table of absolute positions has none to mask "
                "or to localize; expected unknown_embedding: false and dal: none."
            )
        if self.family == "resnet" and self.positions:
            raise UserError(
                f"{where}: a resnet has no position embeddings; expected position_embedding: none."
            )
        twice = 2 if self.family == "resnet" else 1  # its last layer is twice as wide as Swin's
        check_parameters(
            where,
            img_size=self.img_size,
            patch_size=self.patch_size,
            embed_dim=self.embed_dim,
            depth=sum(self.stages),
            num_heads=self.num_heads,
            num_classes=self.num_classes,
            wider=twice << len(self.stages) - 1,
        )

    def __str__(self) -> str:
        """Its line in a table: `swin d48 s2-2 h3 p4@56`."""
        heads = f" h{self.num_heads}" if self.family == "swin" else ""
        stages = "-".join(map(str, self.stages))
        size = f"p{self.patch_size}@{self.img_size}"
        return f"{self.family} d{self.embed_dim} s{stages}{heads} {size}"
