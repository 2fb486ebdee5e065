"""The network that gives every pixel a class: its parts, its loss, its file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.read import json_value
from mjp_privacy.core.schema import parse
from mjp_privacy.core.text import shown
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import CHECKPOINT, check_is_there, located
from mjp_privacy.models.checkpoints import check_same, resampled
from mjp_privacy.models.loading import outline_spec
from mjp_privacy.models.tensor_files import TensorFile, check_digest, check_finite
from mjp_privacy.training.config import TrainingConfig, check_config
from mjp_privacy.training.learner import build_network, initial_arguments
from mjp_privacy.training.learner import check_initial as check_sizes

PYRAMID = 4
"""Maps that are read off a ViT, at the ends of the quarters of its blocks."""

Maps = Sequence[tuple[int, float]]
"""What a network offers: the width of each map, and the factor by which a pyramid resizes it."""


def maps_of(config: TrainingConfig) -> Maps:
    """The maps of the config's network: `features` gives as many tensors. A ViT's all have one
    size, so a pyramid makes them 4, 2, 1 and ½ times as large; a Swin's stages are one already."""
    width = config.model.embed_dim
    if config.family == "vit":
        return [(width, factor) for factor in (4.0, 2.0, 1.0, 0.5)]
    return [(width << stage, 1.0) for stage in range(len(config.stages or ()))]


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
RESIZED = 1 << 26
"""Numbers of the resized logits that are held at once: 256 MiB, beside some numbers a pixel."""


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

    Some classes at a time are resized: all 150 of a photograph of 24 megapixels would take 14 GB.
    """
    logits = logits_of(network, picture, side)
    height, width = size
    together = max(1, RESIZED // (height * width))
    best = logits.new_full((height, width), -torch.inf)
    answer = torch.zeros(height, width, dtype=torch.long, device=logits.device)
    for first in range(0, len(logits), together):
        highest, where = resized(logits[None, first : first + together], size)[0].max(0)
        answer = torch.where(highest > best, where + first, answer)
        best = torch.maximum(best, highest)
    return answer


# weights to start from ----------------------------------------------------------------------------

POSITIONS = "absolute_pos_embed"


def fill_swin(model: Any, checkpoint: str) -> None:
    """Copy every tensor of a `JigsawSwin` but its classifier from a file that `mjp train` wrote.

    The table of absolute positions is resampled for a picture of another size. timm cuts windows to
    the smallest stage's size: there the tables of relative places have other shapes, and are
    refused as any tensor is.
    """
    loaded: Any = load_model(checkpoint=checkpoint)
    check_unknown(
        checkpoint, getattr(loaded, "unk_embed", None) is not None, model.unk_embed is not None
    )
    wanted, stored = (
        {n: p for n, p in one.named_parameters() if not n.startswith(("head.", "dal_regressor"))}
        for one in (model, loaded)
    )
    if POSITIONS in wanted and POSITIONS in stored:
        below_a_class = F.pad(stored[POSITIONS].detach(), (0, 0, 1, 0))  # as a ViT's table stands
        rows = resampled(below_a_class, model.grid, POSITIONS, [], shown(checkpoint))
        stored[POSITIONS] = rows[:, 1:]
    check_same(model, stored, wanted, shown(checkpoint))
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(stored[name])


def check_initial(config: TrainingConfig) -> None:
    """Raise where the weights to start from do not fit, as far as their names and shapes tell."""
    check_sizes(config)
    if config.initial is not None and config.family == "vit":
        arguments = initial_arguments(config.initial, config)
        stated = {k: v for k, v in arguments.items() if not k.startswith("unknown")}
        spec, source = outline_spec(config.initial.model, **stated)
        check_unknown(source, bool(spec.unknown_embedding), config.model.unknown_embedding)


def check_unknown(source: str, stored: bool, wanted: bool) -> None:
    """Raise unless weights with MJP's E_unk start a network with one, and others one without: a
    segmentation's row says by its name what its weights were trained with."""
    if stored == wanted:
        return
    kinds = {True: "MJP's unk_embed", False: "no unk_embed"}
    raise UserError(
        f"{shown(source)}: model.unknown_embedding is {str(wanted).lower()}: expected weights to "
        f"start from with {kinds[wanted]}, got {kinds[stored]}. Give weights trained "
        f"{'with' if wanted else 'without'} MJP, or the row for these."
    )


# network and loss ---------------------------------------------------------------------------------

UNLABELLED = -1
"""What 0 of a label map becomes: such a pixel has no part in loss and scores."""


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


def build_segmentation(config: TrainingConfig) -> SegmentationNetwork:
    """The network with its initial weights: the backbone's from the config's `initial`, if there is
    one, and the head's from its seed."""
    backbone, maps = build_network(config), maps_of(config)
    if config.initial is not None and config.family == "swin":
        fill_swin(backbone, config.initial.checkpoint)
    classes, settings = config.model.num_classes, config.segmentation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("initial head", config.seed))
        head: nn.Module = (
            LinearHead(maps, classes)
            if settings.head == "linear"
            else PyramidHead(maps, classes, settings.channels)
        )
    return SegmentationNetwork(backbone, head)


class PixelObjective(nn.Module):
    """Network and loss in one forward pass, with what `training.learner.Objective` takes and gives.

    There is no L_DAL; its weight has no part. Of several processes each one's mean counts alike.
    """

    def __init__(self, model: SegmentationNetwork, config: TrainingConfig) -> None:
        super().__init__()
        self.model, self.smoothing = model, config.recipe.label_smoothing

    def forward(
        self, images: Tensor, labels: Tensor, mask: Tensor, dal_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of the labelled pixels, and (loss, cross-entropy, 0, share of labelled
        pixels that are right) detached, as one tensor (4,).

        labels: (B, S, S), 0 where a pixel has no label, else 1 + its class
        """
        logits = self.model(images, mask).movedim(1, -1).flatten(0, 2)
        classes = labels.flatten().long() - 1
        number = (classes != UNLABELLED).sum().clamp(min=1)
        how: dict[str, Any] = {"label_smoothing": self.smoothing, "ignore_index": UNLABELLED}
        loss = F.cross_entropy(logits, classes, reduction="sum", **how) / number
        right = (logits.argmax(-1) == classes).sum() / number
        return loss, torch.stack((loss, loss, torch.zeros_like(loss), right)).detach()


# read back from its file --------------------------------------------------------------------------

KIND = replace(
    CHECKPOINT,
    expected="a model.safetensors that `mjp train` wrote with task segmentation",
    do="Give such a file, or measure a classifier with --data.",
)


def load_segmentation(source: str) -> tuple[SegmentationNetwork, TrainingConfig]:
    """The network in eval mode on the CPU, in float32, and the config that it was trained with."""
    check_is_there(source, "--checkpoint")
    path = located(source)
    if path.suffix.lower() != ".safetensors":
        raise KIND.refusal(path, f"a file that ends with {shown(path.suffix) or 'nothing'}")
    file = TensorFile(path, KIND)
    recipe: Any = json_value(file.metadata.get("recipe", "null"), path, KIND)
    if not isinstance(recipe, dict) or recipe.get("task") != "segmentation":
        raise KIND.refusal(path, "a file that states no such training", "recipe")
    check_digest(path, KIND)
    config = parse(TrainingConfig, recipe, shown(path))
    check_config(config, shown(path))
    from_random = replace(config, initial=None)
    with torch.device("meta"):  # before memory is taken for either
        outline = build_segmentation(from_random)
        came = {name: torch.empty(shape) for name, shape in file.shapes.items()}
    check_same(outline, came, outline.state_dict(), shown(path))
    network, stored = build_segmentation(from_random), file.tensors()
    check_finite(stored, path, KIND)
    network.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return network.eval(), config
