"""What a network that is no plain ViT is built from; no torch is imported, for configs read it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import Classes, Depth, Side, Switch, Width, schema
from mjp_privacy.models.parameters import check_parameters

Family = Literal["vit", "swin", "resnet"]
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
    dal: Literal["none", "pca", "linear", "nonlinear"] = "none"

    def check(self, where: str) -> None:
        """Raise a UserError unless there is a network of these sizes."""
        if self.img_size % self.patch_size or self.embed_dim % self.num_heads:
            raise UserError(
                f"{where}: expected img_size divisible by patch_size and embed_dim by num_heads, "
                f"got {self.img_size}/{self.patch_size} and {self.embed_dim}/{self.num_heads}."
            )
        if not self.positions and (self.unknown_embedding or self.dal != "none"):
            raise UserError(
                f"{where}: a {self.family} without a table of absolute positions has none to mask "
                "or to localize; expected unknown_embedding: false and dal: none."
            )
        if self.family == "resnet" and self.positions:
            raise UserError(
                f"{where}: a resnet has no position embeddings; expected position_embedding: none."
            )
        wider = 2 if self.family == "resnet" else 1  # its last layer is twice as wide as Swin's
        check_parameters(
            where,
            img_size=self.img_size,
            patch_size=self.patch_size,
            embed_dim=wider * self.embed_dim << len(self.stages) - 1,
            depth=sum(self.stages),
            num_classes=self.num_classes,
        )

    def stated(self) -> dict[str, Any]:
        """The sizes as a checkpoint's metadata state them."""
        return asdict(self)

    def __str__(self) -> str:
        """Its line in a table: `swin d48 s2-2 h3 p4@56`."""
        heads = f" h{self.num_heads}" if self.family == "swin" else ""
        stages = "-".join(map(str, self.stages))
        size = f"p{self.patch_size}@{self.img_size}"
        return f"{self.family} d{self.embed_dim} s{stages}{heads} {size}"
