"""What a training for segmentation, Table 9, takes: pictures with label maps, weights, the loss.

The layout is that of ADE20K (ADEChallengeData2016):

    DIR/images/training/NAME.jpg       DIR/annotations/training/NAME.png
    DIR/images/validation/NAME.jpg     DIR/annotations/validation/NAME.png

DIR is a folder or a zip; the layout may lie deeper in it. In a label map 0 means no label, and a
class is its index plus 1.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import json_value
from mjp_privacy.core.schema import parse
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import ImageError, decoded
from mjp_privacy.data.files import IMAGE_SUFFIXES, Files, open_files
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import CHECKPOINT, located
from mjp_privacy.models.checkpoints import check_same, fill, resampled
from mjp_privacy.models.tensor_files import TensorFile, check_digest, check_finite
from mjp_privacy.paper.networks import LinearHead, Maps, PyramidHead, SegmentationNetwork
from mjp_privacy.training.batches import LoadedBatches, World
from mjp_privacy.training.config import TrainingConfig, check_config
from mjp_privacy.training.learner import build_network, check_unknown

Read = TypeVar("Read")
TRAINING, VALIDATION = "training", "validation"
LAYOUT = "images/{training,validation}/NAME.jpg beside annotations/{training,validation}/NAME.png"


@dataclass(frozen=True)
class Pairs:
    """The pictures of one split: their files' names, the label maps' by the same places."""

    files: Files
    pictures: tuple[str, ...]
    maps: tuple[str, ...]
    classes: int
    split: str

    def __len__(self) -> int:
        return len(self.pictures)

    def digest(self) -> str:
        """SHA-256 of all names and label maps in order; the pictures' pixels do not enter it."""
        whole = hashlib.sha256()
        for picture, labels in zip(self.pictures, self.maps, strict=True):
            content = self._read(labels, lambda content: hashlib.sha256(content).hexdigest())
            whole.update(f"{picture}\0{content}\n".encode())
        return whole.hexdigest()

    def changed(self, transform: Whole, place: int, seed: int) -> tuple[Tensor, Tensor]:
        """A picture and its label map, changed alike. Raises ImageError with the reason."""
        return transform(*self.read(place), seed)

    def read(self, place: int) -> tuple[Image.Image, NDArray[np.uint8]]:
        """A picture and its label map (H, W). Raises ImageError with the reason, and a UserError
        where a label is none of the model's: without such pictures a score would be of a choice of
        easier ones."""
        picture, turn = self._read(self.pictures[place], decoded)
        labels_name = self.maps[place]
        labels_picture, labels_turn = self._read(labels_name, partial(decoded, labels=True))
        labels: NDArray[np.uint8] = np.array(labels_picture)
        if turn != labels_turn:
            raise ImageError(
                f"its EXIF orientation is {turn} and that of its label map {labels_turn}, so that "
                "one would be turned and the other not: save both upright, without the tag",
                self.pictures[place],
            )
        if labels_picture.size != picture.size:
            sizes = "{}×{} px, its picture {}×{}".format(*labels_picture.size, *picture.size)
            raise ImageError(f"a label map of {sizes}: both must have one size", labels_name)
        if (largest := int(labels.max())) > self.classes:
            raise UserError(
                f"{shown(labels_name)} has a label {largest}: expected 0 (no label) to "
                f"{self.classes}, for the model has {self.classes} classes. Give the data that it "
                "is trained on, or a model of this data."
            )
        return picture, labels

    def check(self) -> None:
        """Raise a UserError with the number of pictures that cannot be used and the first of them:
        before a training, which would stop at one."""
        faults: list[str] = []
        with Progress("checking label maps", lambda: len(self), "pictures") as bar:
            for place in range(len(self)):
                bar.advance()
                try:
                    self.read(place)
                except ImageError as error:
                    faults.append(str(error))
        if faults:
            raise UserError(
                f"--data: of {len(self)} pictures under images/{self.split}, {len(faults)} cannot "
                f"be used; the first: {shown(faults[0], 400)}. Repair it, or take it out."
            )

    def _read(self, name: str, decode: Callable[[bytes], Read]) -> Read:
        """What a file holds; its name goes into the error of one that is unreadable."""
        try:
            return decode(self.files.read(name))
        except ImageError as error:
            raise ImageError(error.reason, name) from error


def find_pairs(config: TrainingConfig, data: Path, val: Path | None) -> tuple[Pairs, Pairs | None]:
    if val is not None:
        raise UserError(
            f"--val: with task segmentation --data holds the validation pictures too ({LAYOUT}). "
            "Leave --val out."
        )
    splits = splits_of(data, config.model.num_classes, "--data")
    training = splits.get(TRAINING)
    if training is None:
        raise UserError(
            f"--data {shown(data)}: no pictures under images/{TRAINING}; give the folder that has "
            "them."
        )
    if len(training) < config.recipe.batch:
        raise UserError(
            f"--data: expected at least one batch of {config.recipe.batch} pictures under "
            f"images/{TRAINING}, got {len(training)}. Give --batch {len(training)} or less."
        )
    return training, splits.get(VALIDATION)


def splits_of(path: Path, classes: int, option: str) -> dict[str, Pairs]:
    """The splits under a folder or zip, each with the label maps of its pictures."""
    files = open_files(path)
    maps: dict[str, dict[str, str]] = {}
    roots: dict[PurePosixPath, None] = {}
    for name in map(PurePosixPath, files.names):
        images, split = name.parent.parent, name.parent.name
        in_layout = images.name == "images" and split in (TRAINING, VALIDATION)
        if in_layout and name.suffix.lower() in IMAGE_SUFFIXES:
            labels = images.parent / "annotations" / split / f"{name.stem}.png"
            maps.setdefault(split, {})[name.as_posix()] = labels.as_posix()
            roots[images] = None
    if len(roots) != 1:
        found = " and ".join(shown(path / root) for root in list(roots)[:2]) or "no picture in it"
        raise UserError(
            f"{option} {shown(path)}: expected one data set in ADE20K's layout, {LAYOUT}; found "
            f"{found}. Give the folder or zip that holds both folders."
        )
    names = set(files.names)
    pairs = [pair for of_split in maps.values() for pair in of_split.items()]
    lacking = [(picture, labels) for picture, labels in pairs if labels not in names]
    if lacking:
        one, its_map = map(shown, lacking[0])
        raise UserError(
            f"{option} {shown(path)}: {len(lacking)} of {len(pairs)} pictures have no label map; "
            f"the first is {one}, expected {its_map}. Add the maps, or take the pictures out."
        )
    return {
        split: Pairs(files, tuple(of_split), tuple(of_split.values()), classes, split)
        for split, of_split in maps.items()
    }


# changed alike ------------------------------------------------------------------------------------

TRIES = 10
"""Crops that are drawn until none of the classes has too large a share."""


class Whole:
    """A picture whose short side is the network's, and the label map as it is."""

    def __init__(self, config: TrainingConfig) -> None:
        self.side = config.model.img_size
        self.settings, self.flip = config.segmentation, config.augmentation.flip
        self.mean = torch.tensor(config.model.mean).view(3, 1, 1)
        self.std = torch.tensor(config.model.std).view(3, 1, 1)

    def pixels(self, picture: Image.Image) -> Tensor:
        """An 8-bit picture as the network's input (3, h, w), normalised."""
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std

    def __call__(
        self, picture: Image.Image, labels: NDArray[np.uint8], seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The picture (3, h, w) and its labels (H, W), which keep their own size."""
        short_side = scaled(picture, self.side, Image.Resampling.BILINEAR)
        return self.pixels(short_side), torch.from_numpy(labels)


class Augmented(Whole):
    """A random crop of a randomly enlarged picture, mirrored half of the time."""

    def __call__(
        self, picture: Image.Image, labels: NDArray[np.uint8], seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The crop (3, S, S) and its labels (S, S); where the picture ended, both are 0."""
        chance = random.Random(seed)
        short = max(round(self.side * chance.uniform(*self.settings.scales)), 1)
        picture = scaled(picture, short, Image.Resampling.BILINEAR)
        numbers = np.array(scaled(Image.fromarray(labels), short, Image.Resampling.NEAREST))
        for _ in range(TRIES):
            left, top = (chance.randint(0, max(length - self.side, 0)) for length in picture.size)
            crop = numbers[top : top + self.side, left : left + self.side]
            counts = np.bincount(crop.ravel())[1:]
            labelled, most = counts.sum(), self.settings.most_of_one_class
            if labelled and counts.max() <= most * labelled:
                break
        height, width = crop.shape
        cut = picture.crop((left, top, left + width, top + height))
        missing = (0, self.side - width, 0, self.side - height)
        pixels = torch.nn.functional.pad(self.pixels(cut), missing)
        cropped = torch.nn.functional.pad(torch.from_numpy(crop.copy()), missing)
        if self.flip and chance.random() < 0.5:
            return pixels.flip(-1), cropped.flip(-1)
        return pixels, cropped


def scaled(picture: Image.Image, short: int, way: Image.Resampling) -> Image.Image:
    factor = short / min(picture.size)
    width, height = (max(round(length * factor), 1) for length in picture.size)
    return picture.resize((width, height), way)


# batches ------------------------------------------------------------------------------------------


def pair_batches(
    config: TrainingConfig, pairs: Pairs, world: World, workers: int, used_for: str = "training"
) -> LoadedBatches:
    """Crops (b, 3, S, S) with labels (b, S, S), all of which are checked before; in order whole
    pictures of a size of their own, which only fit into batches of one."""
    pairs.check()
    return LoadedBatches(config, pairs, Augmented(config), Whole(config), world, workers)


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
    fill(model, stored, wanted, shown(checkpoint))


# network and loss ---------------------------------------------------------------------------------

UNLABELLED = -1
"""What 0 of a label map becomes: such a pixel has no part in loss and scores."""


def maps_of(config: TrainingConfig) -> Maps:
    """The maps of the config's network: `features` gives as many tensors. A ViT's all have one
    size, so a pyramid makes them 4, 2, 1 and ½ times as large; a Swin's stages are one already."""
    width = config.model.embed_dim
    if config.family == "vit":
        return [(width, factor) for factor in (4.0, 2.0, 1.0, 0.5)]
    return [(width << stage, 1.0) for stage in range(len(config.stages or ()))]


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
