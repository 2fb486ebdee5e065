"""The config of a training run: its fields, their defaults and what they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mjp_privacy.core.schema import (
    Classes,
    Count,
    Depth,
    Label,
    NotNegative,
    PathText,
    Seed,
    Share,
    Side,
    Switch,
    Width,
    schema,
)
from mjp_privacy.models.sizes import Family, Sizes, Stages

_PAPER_EPOCHS, _PAPER_WARMUP = 300, 20
Preset = Literal["ours", "paper", "authors_code"]

MeanOfPixels = Annotated[float, Field(strict=True, ge=-2, le=2)]
SpreadOfPixels = Annotated[float, Field(strict=True, ge=1e-4, le=2)]
Dropped = Annotated[float, Field(strict=True, ge=0, lt=1)]
Epochs = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Batch = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Repeats = Annotated[int, Field(strict=True, ge=1, le=100)]
Padding = Annotated[int, Field(strict=True, ge=0, le=1024)]
RandAugment = Annotated[
    str, Field(strict=True, max_length=200, pattern=r"^[a-z0-9]+(-[a-z]+[0-9.]+)*$")
]


Head = Literal["linear", "upernet"]
Channels = Annotated[int, Field(strict=True, ge=8, le=2048)]
"""UPerNet has 512; a head of 2048 has about 480 million parameters."""
Scale = Annotated[float, Field(strict=True, ge=0.1, le=10)]


@schema
class Architecture:
    """The network, by the same fields as `load_model` takes."""

    img_size: Side = 224
    patch_size: Side = 16
    embed_dim: Width = 384
    depth: Depth = 12
    num_heads: Width = 6
    num_classes: Classes = 1000
    mean: tuple[MeanOfPixels, MeanOfPixels, MeanOfPixels] = (0.485, 0.456, 0.406)
    std: tuple[SpreadOfPixels, SpreadOfPixels, SpreadOfPixels] = (0.229, 0.224, 0.225)
    position_embedding: Literal["learned", "none"] = "learned"
    unknown_embedding: Switch = False
    index_embedding: Switch = False
    dal: Literal["none", "pca", "linear", "nonlinear"] = "none"
    first_block: Literal["intact", "closed_form"] = "intact"
    drop_path: Dropped = 0.1


@schema
class Recipe:
    """Table 7 of the paper. What it does not print (drop path, ends of the schedule) is DeiT's."""

    epochs: Epochs = 300
    batch: Batch = 1024
    """Images per step, all processes together."""
    lr: NotNegative | None = None
    """None: 5e-4 · batch / 512."""
    warmup_epochs: NotNegative | None = None
    """None: 20/300 of the epochs."""
    warmup_lr: NotNegative = 1e-6
    min_lr: NotNegative = 1e-5
    weight_decay: NotNegative = 0.05
    clip_grad: NotNegative | None = 5.0
    """Largest norm of the gradient; the paper clips but does not print the value."""
    label_smoothing: Share = 0.1
    ema_decay: Share | None = None
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    compile: Switch = False


@schema
class Augmentation:
    """With `data.store: files` timm's transforms, image by image; with `memory` random crops and
    flips, batch by batch."""

    rand_augment: RandAugment | None = "rand-m9-mstd0.5-inc1"
    mixup: NotNegative = 0.8
    cutmix: NotNegative = 1.0
    erasing: Share = 0.25
    repeats: Repeats = 3
    """Repeated augmentation: an epoch keeps its length, and each image in it appears this often."""
    crop_padding: Padding = 4
    """`memory` only: crops are random after padding the stored image by this many pixels."""
    flip: Switch = True


@schema
class Jigsaw:
    """The training side of MJP. The paper's choices are the defaults."""

    shuffle: Literal["none", "patches", "patches_and_pixels"] = "none"
    """`patches_and_pixels` (SPP) shuffles all patches and the pixels inside each, in the same way
    for all images of a batch."""
    gamma: Share = 0.03
    """Share of the patches that a shuffled step shuffles."""
    first_epoch: NotNegative | None = None
    """The epoch in which shuffling begins; None: after the warm-up."""
    share: Share = 0.5
    """Share of the steps that are shuffled."""
    mask_per: Literal["batch", "image"] = "batch"
    dal_lambda: NotNegative = 0.01
    """Weight of L_DAL, over the unmasked positions, in every step: the paper does not say that it
    waits for shuffled steps, and its row D has none."""
    dal_schedule: Literal["constant", "rising_then_halving"] = "constant"
    """`rising_then_halving`: from 0 to dal_lambda over the epochs of the warm-up, then along a
    cosine to half of it, as in the authors' code."""
    dal_target: Literal["raw", "normalized"] = "raw"
    position_init: Literal["paper", "controlled"] = "paper"
    """How position embeddings (PEs) start, and whether they decay, in a model with E_unk. `paper`:
    they start at N(0, 1) and decay like weights, as in the paper's code for MJP. `controlled`: they
    start at N(0, .02²) and do not decay, as in the paper's baseline. Models without E_unk (rows E
    and F) are treated like the baseline, so E and G differ in more than E_unk; G_controlled and
    E_paper_positions separate the two effects."""
    position_confound: Switch = False
    """A control run: give PEs the `paper` treatment even without an unknown embedding."""


@schema
class Storage:
    """`files`: workers decode an image each time it is needed. `memory`: all images are decoded
    once and kept on the device, for small ones."""

    store: Literal["files", "memory"] = "files"
    native_size: Side | None = None
    """`memory` only: side at which images are kept; None: img_size. Batches are then resized to
    img_size (bicubic)."""
    all_classes: Switch = True
    """Refuse data with fewer classes than the model; false to fine-tune on some of the classes."""


@schema
class Initial:
    """Start from these weights instead of random ones.

    Tensors that the checkpoint lacks are new: E_unk starts at the mean position embedding, a DAL
    regressor and an index table at random.
    """

    checkpoint: PathText
    model: Label | None = None
    """The model's name, if the file does not say what it is (vit_tiny_patch16_224)."""


@schema
class Segmentation:
    """The head, and how pictures and label maps are drawn for it."""

    head: Head = "linear"
    """`linear`: one linear layer on the last tokens. `upernet`: four maps of features become a
    pyramid with UPerNet's pooling on top, as `PyramidHead` says."""
    channels: Channels = 512
    """Of every map in the pyramid."""
    scales: tuple[Scale, Scale] = (0.5, 2.0)
    """A picture's short side becomes img_size times a number between these, then a crop of img_size
    is cut out."""
    most_of_one_class: Share = 0.75
    """A crop whose labelled pixels have a larger share of one class is drawn again, ten times at
    most."""


@schema
class TrainingConfig:
    """Everything that decides a trained model but its images: load_training(FILE, row="J")."""

    name: Label
    preset: Preset = "ours"
    """Whose choices the fields in published.yaml follow, where the row does not set them."""
    task: Literal["classification", "segmentation"] = "classification"
    """`segmentation` (the paper's Table 9) trains a head that gives every pixel a class, and the
    network below it, on pictures with label maps in ADE20K's layout. Tables of positions then never
    decay, as the field has it."""
    family: Family = "vit"
    """`swin` and `resnet` stand beside the ViT in the paper's Table 1. Of `model` they read
    img_size, patch_size (of the jigsaw, and of Swin's embedding), embed_dim (of the first stage),
    num_heads (of Swin's first stage), num_classes, mean, std, drop_path and, in a Swin,
    position_embedding, unknown_embedding and dal, of a table of absolute positions."""
    stages: Stages | None = None
    """Blocks in each stage of a Swin or ResNet: [2, 2, 6, 2] in Swin-T, [3, 4, 6, 3] in
    ResNet-50."""
    model: Architecture = Architecture()
    recipe: Recipe = Recipe()
    augmentation: Augmentation = Augmentation()
    jigsaw: Jigsaw = Jigsaw()
    data: Storage = Storage()
    segmentation: Segmentation = Segmentation()
    initial: Initial | None = None
    seed: Seed = 0
    log_every: Count = 50
    """Steps between two lines of metrics.jsonl; the host waits for the device only then."""
    checkpoint_minutes: NotNegative = 5.0

    @property
    def lr(self) -> float:
        """The highest learning rate of the schedule."""
        return 5e-4 * self.recipe.batch / 512 if self.recipe.lr is None else self.recipe.lr

    @property
    def warmup_epochs(self) -> float:
        """Length of the warm-up in epochs; it need not be a whole number."""
        epochs = self.recipe.warmup_epochs
        return self.recipe.epochs * _PAPER_WARMUP / _PAPER_EPOCHS if epochs is None else epochs

    @property
    def first_epoch(self) -> float:
        """The epoch in which shuffling begins; it need not be a whole number."""
        epoch = self.jigsaw.first_epoch
        return self.warmup_epochs if epoch is None else epoch

    @property
    def positions_as_paper(self) -> bool:
        """Whether position embeddings start at N(0, 1) and decay."""
        differs_from_baseline = self.jigsaw.position_confound or self.model.unknown_embedding
        return differs_from_baseline and self.jigsaw.position_init == "paper"


def other_sizes(config: TrainingConfig) -> Sizes | None:
    """What a Swin or ResNet is built from; None for a ViT."""
    if config.family == "vit" or config.stages is None:
        return None
    model = config.model
    return Sizes(
        config.family,
        model.img_size,
        model.patch_size,
        model.embed_dim,
        config.stages,
        model.num_classes,
        num_heads=model.num_heads,
        positions=model.position_embedding == "learned",
        unknown_embedding=model.unknown_embedding,
        dal=model.dal,
    )


def plain(config: TrainingConfig) -> dict[str, Any]:
    """The config as JSON values; a checkpoint to start from by its file name only.

    Fields that the schema gained appear only off their defaults, so that the record of an earlier
    run equals that of the same config today.
    """
    content = dataclasses.asdict(config)
    if config.preset == "ours":
        del content["preset"]
    if config.family == "vit":
        del content["family"], content["stages"]
    if config.task == "classification":
        del content["task"], content["segmentation"]
    if config.jigsaw.dal_schedule == "constant":
        del content["jigsaw"]["dal_schedule"]
    if config.initial:
        content["initial"]["checkpoint"] = Path(config.initial.checkpoint).name
    return content
