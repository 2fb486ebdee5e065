"""The config of a training run: its fields, their defaults and what they mean; and how it is read:
a YAML file with a base and named rows, checked, then frozen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import (
    Classes,
    Count,
    Depth,
    Label,
    NotNegative,
    PathText,
    Positive,
    Seed,
    Share,
    Side,
    Switch,
    Width,
    parse,
    schema,
)
from mjp_privacy.core.text import shown
from mjp_privacy.models.sizes import DalKind, Family, Sizes, Stages, check_parameters

Preset = Literal["ours", "paper", "authors_code"]

MeanOfPixels = Annotated[float, Field(strict=True, ge=-2, le=2)]
SpreadOfPixels = Annotated[float, Field(strict=True, ge=1e-4, le=2)]
BelowOne = Annotated[float, Field(strict=True, ge=0, lt=1)]
Epochs = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Batch = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Repeats = Annotated[int, Field(strict=True, ge=1, le=100)]
Padding = Annotated[int, Field(strict=True, ge=0, le=1024)]
RandAugment = Annotated[
    str, Field(strict=True, max_length=200, pattern=r"^[a-z0-9]+(-[a-z]+[0-9.]+)*$")
]

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
    dal: DalKind = "none"
    first_block: Literal["intact", "closed_form"] = "intact"
    drop_path: BelowOne = 0.1


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
    clip_grad: Positive | None = 5.0
    """Largest norm of the gradient; the paper clips but does not print the value."""
    label_smoothing: Share = 0.1
    ema_decay: BelowOne | None = None
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    compile: Switch = False


@schema
class Augmentation:
    """With `data.store: files` timm's transforms, image by image; with `memory` random crops and
    flips, batch by batch."""

    rand_augment: RandAugment | None = "rand-m9-mstd0.5-inc1"
    """None: with `data.store: files` timm jitters brightness, contrast and saturation by .4 in its
    place; with `memory` colours stay."""
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
    mask_per: Literal["batch"] = "batch"
    """All images of a step, on all processes, have one mask."""
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

    head: Literal["linear", "upernet"] = "linear"
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
        return self.recipe.epochs * 20 / 300 if epochs is None else epochs

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
    """The config as JSON values; a checkpoint to start from by its file name only."""
    content = dataclasses.asdict(config)
    if config.initial:
        content["initial"]["checkpoint"] = Path(config.initial.checkpoint).name
    return content


# read from a file ---------------------------------------------------------------------------------

PUBLISHED: Mapping[str, Any] = read_mapping(Path(__file__).with_name("published.yaml"))
"""What the paper prints, and the choices of the presets."""


def load_training(
    path: str | Path | Mapping[str, Any], row: str | None = None, **changes: Any
) -> TrainingConfig:
    """Read a config: load_training("configs/training/cifar10.yaml", "J", epochs=2).

    row      one of the file's `rows`, whose fields replace the base's and a preset's
    changes  fields of the recipe, seed, preset, or initial (a checkpoint); None keeps the file's
    """
    given = {name: value for name, value in changes.items() if value is not None}
    names = {"preset", "seed", "initial"} & given.keys()
    top = {name: given.pop(name) for name in names}
    if "initial" in top:
        top["initial"] = {"checkpoint": str(top["initial"])}
    content, where = opened(path)
    preset = top.get("preset", content.get("preset", "ours"))
    family = row_of(content, row, where).get("family", "vit")
    fields = preset_fields(preset, family) if isinstance(preset, str) else {}
    content = row_of(merged(content, fields), row, where)
    config = parse(TrainingConfig, merged(content, {**top, "recipe": given}), where)
    check_config(config, where)
    return config


def opened(path: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The fields of a config, and what messages call it."""
    if isinstance(path, Mapping):
        return path, "the config"
    return read_mapping(Path(path)), shown(path)


def row_of(content: Mapping[str, Any], row: str | None, where: str) -> dict[str, Any]:
    """The config of one row: the base, with the row's fields in place of the base's.

    The row's name is added to the config's: row J of `cifar10` is named `cifar10-J`.
    """
    base = dict(content)
    rows = base.pop("rows", None) or {}
    if row is None:
        if rows:
            names = ", ".join(map(str, rows))
            raise UserError(f"{where} holds rows: expected --row, one of {names}; got none.")
        return base
    if row not in rows:
        raise UserError(f"{where}: {unknown_name('row', row, [str(name) for name in rows])}")
    changes = rows[row] or {}
    if not isinstance(changes, Mapping):
        raise UserError(
            f"{where}, rows.{row}: expected fields that replace the base's, got {changes!r}."
        )
    return {**merged(base, changes), "name": f"{base.get('name', '')}-{row}".strip("-")}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with these fields changed, also inside nested mappings. What should be a mapping and
    is none stays, for the schema to refuse."""
    fields = dict(base)
    for key, value in changes.items():
        before = fields.get(key)
        if isinstance(value, Mapping) and before is not None:
            value = merged(before, value) if isinstance(before, Mapping) else before
        fields[key] = value
    return fields


def preset_fields(preset: str, family: str = "vit") -> dict[str, dict[str, Any]]:
    """What a preset sets, in the layout of a config: {"jigsaw": {"gamma": 0.1}, ...}.

    A config's sizes, schedule and images stay; what the paper does not print keeps the config's
    value under `paper`. The authors' code hands its drop path to a Swin.
    """
    if preset not in PUBLISHED["presets"]:
        raise unknown_name("preset", preset, list(PUBLISHED["presets"]))
    fields = dict(PUBLISHED["presets"][preset])
    if family != "vit":
        fields.pop("model", None)  # the drop path
    return fields


# what the fields must have in common --------------------------------------------------------------


def check_config(config: TrainingConfig, where: str) -> None:
    """Raise a UserError if fields contradict each other; `where` they stand."""
    model = config.model
    if (sizes := other_sizes(config)) is not None:
        sizes.check(where)
    if mistake := next(_mistakes(config), None):
        raise UserError(f"{where}: {mistake}.")
    sides = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")
    check_parameters(where, **{name: getattr(model, name) for name in sides})


def _mistakes(config: TrainingConfig) -> Iterator[str]:
    """What is wrong with fields that are right one by one."""
    model, family, jigsaw = config.model, config.family, config.jigsaw
    if (family == "vit") != (config.stages is None):
        yield (
            "stages are the blocks in each stage of a swin or resnet: expected them there and "
            f"nowhere else, got family {family} and stages {config.stages}"
        )
    initial = config.initial and config.task == "classification"
    if family != "vit" and (initial or model.index_embedding or model.first_block != "intact"):
        yield (
            f"a {family} that classifies starts from nothing and has the blocks that it is "
            "published with; expected no initial, index_embedding: false and first_block: intact"
        )
    masked = model.unknown_embedding or model.dal != "none" or jigsaw.position_confound
    if model.position_embedding == "none" and masked:
        yield (
            "a model without position embeddings has none to mask, to localize or to start "
            "differently; expected unknown_embedding: false, dal: none, position_confound: false"
        )
    for field in ("warmup_epochs", "first_epoch"):
        if not 0 <= (epoch := getattr(config, field)) <= config.recipe.epochs:
            yield f"{field}: expected 0 to epochs ({config.recipe.epochs}), got {epoch}"
    augmentation, in_memory = config.augmentation, config.data.store == "memory"
    if in_memory and (augmentation.rand_augment or augmentation.erasing):
        yield (
            "data.store memory augments whole batches by crop and flip; expected "
            "augmentation.rand_augment: null and erasing: 0, or data.store: files"
        )
    if config.task == "segmentation":
        yield from _of_segmentation(config)
    elif config.segmentation != Segmentation():
        yield "segmentation: these fields are read with task: segmentation alone"


def _of_segmentation(config: TrainingConfig) -> Iterator[str]:
    """The same of a segmentation: MJP enters through the weights alone, and what belongs to
    classification is off."""
    settings, augmentation = config.segmentation, config.augmentation
    if config.family == "resnet":
        yield "task segmentation has heads for family vit or swin, got resnet"
    if settings.head == "upernet" and config.family == "vit" and config.model.depth < 4:
        yield f"head upernet reads four blocks of a ViT, got depth {config.model.depth}"
    if settings.scales[0] > settings.scales[1]:
        scales = list(settings.scales)
        yield f"segmentation.scales: expected the smaller one first, got {scales}"
    if config.model.num_classes > 255:
        yield "model.num_classes: a label map has 8 bits a pixel, for 255 classes beside no label"
    if config.jigsaw.shuffle != "none" or config.model.dal != "none":
        yield (
            "in task segmentation MJP enters through the weights to start from (initial), as in "
            "the paper, which fine-tunes; expected jigsaw.shuffle: none and model.dal: none"
        )
    off = (augmentation.mixup, augmentation.cutmix, augmentation.erasing)
    if augmentation.rand_augment is not None or any(off):
        yield (
            "task segmentation scales, crops and flips pictures and label maps alike; expected "
            "rand_augment: null, mixup: 0, cutmix: 0 and erasing: 0"
        )
    if config.data.store != "files":
        yield "task segmentation reads files; expected data.store: files"


def recipe_in(metadata: Mapping[str, str]) -> TrainingConfig | None:
    """The config that a model was trained with, of its file's metadata; None where the file states
    none that this trainer reads."""
    try:
        content = json.loads(metadata.get("recipe", "null"))
        config = parse(TrainingConfig, content, "the recipe")
        check_config(config, "the recipe")
    except (ValueError, TypeError, RecursionError, UserError):
        return None
    return config
