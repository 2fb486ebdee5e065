"""What decides a trained model: one YAML file with a base and named rows, checked once, frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mjp_privacy.core.config_rows import row_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.fields import STRICT, parse
from mjp_privacy.core.yaml_files import read_mapping

_PAPER_EPOCHS, _PAPER_WARMUP = 300, 20

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Channels = tuple[float, float, float]


@dataclass(frozen=True, config=STRICT)
class Architecture:
    """The network; the fields of `load_model`."""

    img_size: Count = 224
    patch_size: Count = 16
    embed_dim: Count = 384
    depth: Count = 12
    num_heads: Count = 6
    num_classes: Count = 1000
    mean: Channels = (0.485, 0.456, 0.406)
    std: Channels = (0.229, 0.224, 0.225)
    position_embedding: Literal["learned", "none"] = "learned"
    unknown_embedding: bool = False
    index_embedding: bool = False
    dal: Literal["none", "pca", "linear", "nonlinear"] = "none"
    first_block: Literal["intact", "closed_form"] = "intact"
    drop_path: Share = 0.1


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """Table 7. What the paper leaves open is DeiT's: drop path, the ends of the schedule."""

    epochs: Count = 300
    batch: Count = 1024
    """Images a step, over all processes."""
    lr: NotNegative | None = None
    """None: 5e-4 · batch / 512."""
    warmup_epochs: NotNegative | None = None
    """None: 20/300 of the epochs."""
    warmup_lr: NotNegative = 1e-6
    min_lr: NotNegative = 1e-5
    weight_decay: NotNegative = 0.05
    clip_grad: NotNegative | None = 5.0
    """Largest norm of the gradient; the paper clips and does not say at what."""
    label_smoothing: Share = 0.1
    ema_decay: Share | None = None
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    compile: bool = False


@dataclass(frozen=True, config=STRICT)
class Augmentation:
    """`files`: timm's, an image at a time. `memory`: crop and flip, a batch at a time."""

    rand_augment: str | None = "rand-m9-mstd0.5-inc1"
    mixup: NotNegative = 0.8
    cutmix: NotNegative = 1.0
    erasing: Share = 0.25
    repeats: Count = 3
    """Repeated augmentation: an image appears this often in an epoch of unchanged length."""
    crop_padding: Annotated[int, Field(ge=0)] = 4
    """`memory` only: random crops after padding by so many pixels of the stored image."""
    flip: bool = True


@dataclass(frozen=True, config=STRICT)
class Jigsaw:
    """The training side of MJP. The paper's choices are the defaults."""

    shuffle: Literal["none", "patches", "patches_and_pixels"] = "none"
    """`patches_and_pixels` (SPP) shuffles every patch and the pixels inside, alike in a batch."""
    gamma: Share = 0.03
    first_epoch: NotNegative | None = None
    """None: after the warm-up."""
    share: Share = 0.5
    """Share of the steps that are shuffled."""
    mask_per: Literal["batch", "image"] = "batch"
    dal_lambda: NotNegative = 0.01
    dal_target: Literal["raw", "normalized"] = "raw"
    position_init: Literal["paper", "controlled"] = "paper"
    """`paper`: with an unknown embedding, PEs start at N(0, 1) and decay as weights do (its code
    does so, its baseline does not). `controlled`: N(0, .02²) without decay, as the baseline.
    Rows without E_unk (E, F) keep the baseline's, so a difference between E and G is not E_unk's
    alone; G_controlled and E_paper_positions tell the two apart."""
    position_confound: bool = False
    """Give PEs the `paper` treatment also without an unknown embedding: a control run."""


@dataclass(frozen=True, config=STRICT)
class Storage:
    """`files`: decoded anew by workers each time. `memory`: decoded once, for small images."""

    store: Literal["files", "memory"] = "files"
    native_size: Count | None = None
    """`memory`: side at which images are kept; None: img_size. Batches are resized (bicubic)."""
    all_classes: bool = True
    """Refuse data with fewer classes than the model; false for fine-tuning on a part."""


@dataclass(frozen=True, config=STRICT)
class Initial:
    """Start from these weights instead of random ones. New tensors (E_unk, DAL) are filled."""

    checkpoint: str
    model: str | None = None
    """Its name where the file does not say what it is (vit_tiny_patch16_224)."""


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    name: str
    model: Architecture = Architecture()
    recipe: Recipe = Recipe()
    augmentation: Augmentation = Augmentation()
    jigsaw: Jigsaw = Jigsaw()
    data: Storage = Storage()
    initial: Initial | None = None
    seed: int = 0
    log_every: Count = 50
    """Steps between two lines of metrics.jsonl; the host waits for the device only then."""
    checkpoint_minutes: NotNegative = 5.0

    @property
    def lr(self) -> float:
        return 5e-4 * self.recipe.batch / 512 if self.recipe.lr is None else self.recipe.lr

    @property
    def warmup_epochs(self) -> float:
        """In epochs, also broken ones."""
        given = self.recipe.warmup_epochs
        return self.recipe.epochs * _PAPER_WARMUP / _PAPER_EPOCHS if given is None else given

    @property
    def first_epoch(self) -> float:
        """Where shuffling begins."""
        given = self.jigsaw.first_epoch
        return self.warmup_epochs if given is None else given

    @property
    def positions_as_paper(self) -> bool:
        """Whether PEs start at N(0, 1) and decay."""
        own = self.jigsaw.position_confound or self.model.unknown_embedding
        return own and self.jigsaw.position_init == "paper"


_OWNERS: dict[str, Any] = {
    "model": Architecture,
    "recipe": Recipe,
    "augmentation": Augmentation,
    "jigsaw": Jigsaw,
    "data": Storage,
    "initial": Initial,
}


def load_training(
    path: str | Path | Mapping[str, Any], row: str | None = None, **changes: Any
) -> TrainingConfig:
    """A config file, one of its `rows` laid over its base, and the command line's changes.

    changes  fields of the recipe, seed, or initial (a checkpoint); None leaves the file's.
    """
    content = dict(path) if isinstance(path, Mapping) else dict(read_mapping(Path(path)))
    where = "the config" if isinstance(path, Mapping) else str(path)
    content = row_of(content, row, where)
    given = {key: value for key, value in changes.items() if value is not None}
    if "seed" in given:
        content["seed"] = given.pop("seed")
    if "initial" in given:
        before = content.get("initial") or {}
        content["initial"] = {**before, "checkpoint": str(given.pop("initial"))}
    if given:
        content["recipe"] = {**(content.get("recipe") or {}), **given}
    config = parse(TrainingConfig, content, where, _OWNERS)
    _check(config, where)
    return config


def _check(config: TrainingConfig, where: str) -> None:
    """What crosses fields."""
    model, jigsaw = config.model, config.jigsaw
    without = model.position_embedding == "none"
    if without and (model.unknown_embedding or model.dal != "none" or jigsaw.position_confound):
        raise UserError(
            f"{where}: a model without position embeddings has none to mask, localize or start "
            "otherwise; expected unknown_embedding: false, dal: none, position_confound: false."
        )
    if model.img_size % model.patch_size or model.embed_dim % model.num_heads:
        raise UserError(
            f"{where}: expected img_size divisible by patch_size and embed_dim by num_heads, got "
            f"{model.img_size}/{model.patch_size} and {model.embed_dim}/{model.num_heads}."
        )
    for field, epoch in (
        ("warmup_epochs", config.warmup_epochs),
        ("first_epoch", config.first_epoch),
    ):
        if not 0 <= epoch <= config.recipe.epochs:
            raise UserError(
                f"{where}, {field}: expected 0 to epochs ({config.recipe.epochs}), got {epoch}."
            )
    if config.data.store == "memory" and config.augmentation.rand_augment:
        raise UserError(
            f"{where}: data.store memory augments whole batches by crop and flip; expected "
            "augmentation.rand_augment: null, or data.store: files."
        )
    if config.data.store == "memory" and config.augmentation.erasing:
        raise UserError(f"{where}: data.store memory has no erasing; expected erasing: 0.")
    if not all(math.isfinite(n) and n > 0 for n in model.std):
        raise UserError(f"{where}, model.std: expected three positive numbers, got {model.std}.")


def plain(config: TrainingConfig) -> dict[str, Any]:
    """For JSON."""
    content = dataclasses.asdict(config)
    if config.initial:
        content["initial"]["checkpoint"] = Path(config.initial.checkpoint).name
    return content
