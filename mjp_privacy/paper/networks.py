"""The other networks of the paper under MJP: Swin Transformers and ResNets (Table 1), and ViTs and
Swins whose heads give every pixel a class (Table 9).

Swin: MJP at the patch stage, as the paper adds it "to the absolute PEs". A Swin needs no absolute
positions: each attention window has a table of relative biases, the same for every window, and
Swin-T has no other. MJP has nothing to mask in those: a bias belongs to a pair of places in a
window, not to a patch. So the paper gives Swin-T a table of absolute position embeddings
(`absolute_pos_embed`, Swin's own name for it), added to the embedded patches, and masks its rows;
the relative biases stay as they are. A shuffled patch thus loses its absolute place and keeps the
place within its window.

ResNet: "only shuffling the image patches with Alg. 1 (No PEs)", as the paper says. A ResNet sees
pixels alone. The jigsaw permutes patches of its input, and there is no position embedding that
could be masked, so a mask changes nothing in the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mjp_privacy.models.loading import OtherNetwork
from mjp_privacy.models.mjp_vit import LocalizationRegressor
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.models.vit import start_, start_linear_layers

WINDOW = 7  # patches along a side of an attention window
RELATIVE = "relative_position_bias_table"


class JigsawSwin(OtherNetwork):
    """timm's SwinTransformer under its own parameter names, with these additions:

    absolute_pos_embed  (1, N, D), a row for each patch and none for a class token, if
                        `sizes.positions`
    unk_embed           (1, 1, D), in place of the masked patches' rows
    dal_regressor       the localization regressor on the table
    """

    def __init__(self, sizes: Sizes, drop_path: float = 0.0) -> None:
        from timm.models.swin_transformer import SwinTransformer

        super().__init__(sizes)
        width = sizes.embed_dim
        plain = SwinTransformer(
            img_size=sizes.img_size,
            patch_size=sizes.patch_size,
            num_classes=sizes.num_classes,
            embed_dim=width,
            depths=sizes.stages,
            num_heads=tuple(sizes.num_heads << stage for stage in range(len(sizes.stages))),
            window_size=WINDOW,
            drop_path_rate=drop_path,
        )
        self.patch_embed, self.layers = plain.patch_embed, plain.layers
        self.norm, self.head = plain.norm, plain.head
        self.absolute_pos_embed = _table(self.tokens, width) if sizes.positions else None
        self.unk_embed = _table(1, width) if sizes.unknown_embedding else None
        if sizes.dal != "none":
            self.dal_regressor = LocalizationRegressor(width, sizes.dal)
        start_linear_layers(self)
        for name, table in self.named_parameters():
            if name.endswith((RELATIVE, "_embed")) and not table.is_meta:
                start_(table)

    @property
    def table(self) -> Tensor:
        """The table of absolute positions (1, N, D); a Swin without one has none."""
        assert self.absolute_pos_embed is not None
        return self.absolute_pos_embed

    def no_weight_decay(self) -> set[str]:
        """The relative biases, as timm has them, and the new tables."""
        relative = {name for name, _ in self.named_parameters() if name.endswith(RELATIVE)}
        return {*relative, "absolute_pos_embed", "unk_embed"}

    def embed(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """z (B, rows, columns, D), the input of the first stage."""
        z: Tensor = self.patch_embed(x)
        if self.absolute_pos_embed is not None:
            z = z + self.positions(mask).unflatten(1, self.grid)
        return z

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over all places after the last norm, (B, 1, D)."""
        z = self.layers(self.embed(x, mask))
        pooled: Tensor = self.head(self.norm(z), pre_logits=True)
        return pooled.unsqueeze(1)

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (B, classes) from the features (B, 1, D)."""
        logits: Tensor = self.head.fc(features[:, 0])
        return logits


def _table(rows: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, rows, width))


class JigsawResNet(OtherNetwork):
    """timm's ResNet of bottleneck blocks, under its own parameter names.

    JigsawResNet(Sizes("resnet", 224, 16, 64, (3, 4, 6, 3), 1000)) is ResNet-50, whose jigsaw has
    patches of 16×16 pixels. `embed_dim` is the width of the first stage; the stem always has 64.
    """

    def __init__(self, sizes: Sizes, drop_path: float = 0.0) -> None:
        from timm.models.resnet import Bottleneck, ResNet

        super().__init__(sizes)
        plain = ResNet(
            Bottleneck,  # type: ignore[arg-type]  # timm says the block, and means its class
            layers=sizes.stages,
            num_classes=sizes.num_classes,
            channels=tuple(sizes.embed_dim << stage for stage in range(len(sizes.stages))),
            drop_path_rate=drop_path,
        )
        self.order = [name for name, _ in plain.named_children()]
        for name in self.order:
            self.add_module(name, plain.get_submodule(name))
        start_linear_layers(self)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over all places after the last stage, (B, 1, D); the mask is not used.

        timm's parts stand in the order of its forward pass, from conv1 to global_pool and fc.
        """
        for name in self.order[:-1]:
            x = self.get_submodule(name)(x)
        return x.unsqueeze(1)

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (B, classes) from the features (B, 1, D)."""
        logits: Tensor = self.get_submodule("fc")(features[:, 0])
        return logits


# maps of features, for heads that give every pixel a class ----------------------------------------

PYRAMID = 4
"""Maps that are read off a ViT, at the ends of the quarters of its blocks."""

Maps = Sequence[tuple[int, float]]
"""What a network offers: the width of each map, and the factor by which a pyramid resizes it."""


def features(network: Any, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """The maps (B, D, h, w) of normalised images (B, 3, S, S), the last one after the last norm.

    mask: as the network itself takes it, True where a patch is shuffled
    """
    is_vit = network.family == "vit"
    maps: list[Tensor] = []
    z = network.embed(images, mask)
    for stage in network.blocks if is_vit else network.layers:
        z = stage(z)
        maps.append(z)
    if not is_vit:
        maps[-1] = network.norm(maps[-1])
        return [z.permute(0, 3, 1, 2).contiguous() for z in maps]
    maps = [maps[end] for end in block_ends(len(maps))]
    maps[-1] = network.norm(maps[-1])
    grid = network.grid
    return [  # without the class token in front, and a distillation token behind
        z[:, 1 : grid.patches + 1].transpose(1, 2).unflatten(2, grid) for z in maps
    ]


def block_ends(depth: int) -> Sequence[int]:
    """Indices of the blocks that a ViT's maps come from: 2, 5, 8 and 11 of twelve."""
    return [max(depth * quarter // PYRAMID, 1) - 1 for quarter in range(1, PYRAMID + 1)]


# heads: from maps (B, D, h, w) to logits (B, K, h', w') -------------------------------------------

POOLED = (1, 2, 3, 6)
"""Sides of the grids over which the pyramid's top is averaged."""


class LinearHead(nn.Module):
    def __init__(self, maps: Maps, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(maps[-1][0], classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return cast(Tensor, self.classifier(maps[-1]))


class PyramidHead(nn.Module):
    """A head in the style of UPerNet (Xiao et al., 2018).

    Each map is brought to `channels` and its size in the pyramid; the last one also reads averages
    over the whole picture. From the top down each level is added to the next larger one; all levels
    together are then read at the largest size. In place of batch norm, which needs large batches
    and keeps statistics, each map of a picture is normed as a whole; there is no second head for an
    auxiliary loss.
    """

    def __init__(self, maps: Maps, classes: int, channels: int) -> None:
        super().__init__()
        self.factors = [factor for _, factor in maps]
        self.sides = nn.ModuleList(_layer(width, channels, 1) for width, _ in maps)
        self.pooled = nn.ModuleList(_layer(channels, channels, 1) for _ in POOLED)
        self.top = _layer(channels * (len(POOLED) + 1), channels, 3)
        self.smooth = nn.ModuleList(_layer(channels, channels, 3) for _ in maps[:-1])
        self.joined = _layer(channels * len(maps), channels, 3)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        levels = []
        for read, side, factor in zip(maps, self.sides, self.factors, strict=True):
            size = [max(round(length * factor), 1) for length in read.shape[-2:]]
            levels.append(resized(side(read), size))
        top = levels[-1]
        around = [
            resized(layer(averages(top, side)), top.shape[-2:])
            for layer, side in zip(self.pooled, POOLED, strict=True)
        ]
        levels[-1] = self.top(torch.cat((top, *around), 1))
        for below in range(len(levels) - 2, -1, -1):
            levels[below] = levels[below] + resized(levels[below + 1], levels[below].shape[-2:])
        smooth = [layer(level) for layer, level in zip(self.smooth, levels, strict=False)]
        largest = levels[0].shape[-2:]
        joined = [resized(level, largest) for level in (*smooth, levels[-1])]
        return cast(Tensor, self.classifier(self.joined(torch.cat(joined, 1))))


def averages(picture: Tensor, side: int) -> Tensor:
    """Means over a grid of side × side fields, (B, C, side, side): what adaptive average pooling
    gives, as two products of matrices, whose gradient is deterministic on every device."""
    rows, columns = (_fields(length, side).to(picture) for length in picture.shape[-2:])
    return rows @ picture @ columns.transpose(0, 1)


def _fields(length: int, side: int) -> Tensor:
    """(side, length): in each row, equal weights on the places of one field."""
    weights = torch.zeros(side, length)
    for field in range(side):
        first, last = field * length // side, math.ceil((field + 1) * length / side)
        weights[field, first:last] = 1 / (last - first)
    return weights


def resized(picture: Tensor, size: Sequence[int]) -> Tensor:
    """The picture (B, C, h, w) at another size, bilinear."""
    if picture.shape[-2:] == torch.Size(size):
        return picture
    return F.interpolate(picture, size=list(size), mode="bilinear", align_corners=False)


def _layer(inputs: int, outputs: int, side: int) -> nn.Sequential:
    """A convolution that keeps the size, a norm over all channels and places, and ReLU.

    Norms of fewer channels would leave nothing of a map of one place.
    """
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False),
        nn.GroupNorm(1, outputs),
        nn.ReLU(),
    )


# whole pictures, by sliding windows ---------------------------------------------------------------

STRIDE = 2 / 3
"""Of a window's side, between two windows: 341 of 512 pixels, as ViTs are commonly evaluated."""
TOGETHER = 8
"""Windows that the network sees at once."""


def starts(length: int, side: int) -> list[int]:
    """Where windows begin along a side: STRIDE apart, but for the last, which ends with it."""
    step, last = max(int(side * STRIDE), 1), max(length - side, 0)
    return [*range(0, last, step), last]


def logits_of(network: Callable[[Tensor], Tensor], picture: Tensor, side: int) -> Tensor:
    """(K, h, w): the mean over all windows that hold a pixel; picture (3, h, w), h, w ≥ side."""
    height, width = picture.shape[-2:]
    corners = [(top, left) for top in starts(height, side) for left in starts(width, side)]
    total: Tensor | None = None
    times = picture.new_zeros(1, height, width)
    for first in range(0, len(corners), TOGETHER):
        chosen = corners[first : first + TOGETHER]
        crops = [picture[:, top : top + side, left : left + side] for top, left in chosen]
        for (top, left), logits in zip(chosen, network(torch.stack(crops)).float(), strict=True):
            if total is None:
                total = logits.new_zeros(len(logits), height, width)
            total[:, top : top + side, left : left + side] += logits
            times[:, top : top + side, left : left + side] += 1
    assert total is not None
    return total / times


def predicted(
    network: Callable[[Tensor], Tensor], picture: Tensor, side: int, size: Sequence[int]
) -> Tensor:
    """(H, W): the class of every pixel of the label map, whose size this is.

    One class at a time is resized: all 150 of a photograph of 24 megapixels would take 14 GB.
    """
    logits = logits_of(network, picture, side)
    best = logits.new_full(list(size), -torch.inf)
    answer = torch.zeros_like(best, dtype=torch.long)
    for number, one in enumerate(logits):
        large = resized(one[None, None], size)[0, 0]
        answer = torch.where(large > best, number, answer)
        best = torch.maximum(best, large)
    return answer


class SegmentationNetwork(nn.Module):
    """A ViT or Swin of this package under `backbone`, and a head on its maps of features."""

    def __init__(self, backbone: Any, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.backbone.head = nn.Identity()  # what classified whole pictures

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised images (B, 3, S, S) -> logits (B, K, S, S) in float32."""
        logits: Tensor = self.head(features(self.backbone, images, mask))
        return resized(logits.float(), images.shape[-2:])

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay: tables of the backbone."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}
