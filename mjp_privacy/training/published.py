"""What the paper prints of its models, and where it, its authors' code and this project differ."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import NotNegative, Share, Switch

# presets ------------------------------------------------------------
# Where this project, the paper and its authors' code train MJP differently, and presets of each.
#
#     load_training("configs/training/imagenet.yaml", "J", preset="authors_code")
#
# A preset changes the fields listed in CHOICES and nothing else: a config's sizes, schedule and
# images stay. What the paper does not print keeps the config's value under `paper`. The authors'
# code
# is github.com/yhlleo/MJP at commit a5d7c8a, which was read; nothing of it is used here.

Preset = Literal["ours", "paper", "authors_code"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A field of the training config, the value that each source gives it, and the evidence.

    `ours` is the default of the config or of configs/training/imagenet.yaml; a `paper` of None
    means that the paper does not say.
    """

    field: str
    ours: Any
    paper: Any
    authors_code: Any
    why: str


DROP_PATH = "model.drop_path"

CHOICES = (
    Choice(
        *("jigsaw.gamma", 0.03, 0.03, 0.1),
        "Tables 3 and 4 print the figures of .03 (80.5, 82.9); the authors' train.sh says "
        "--mask-ratio 0.1",
    ),
    Choice(
        *("jigsaw.dal_schedule", "constant", "constant", "rising_then_halving"),
        "the paper sets .01 for all experiments (Sec. 4.2); main.py lets the weight rise "
        "from 0 over the warm-up epochs and fall to half of it along a cosine",
    ),
    Choice(
        *(DROP_PATH, 0.1, None, 0.0),
        "Table 7 has dropout only; ours is DeiT's; the authors' config.py says .1, but build.py "
        "never hands it to the ViT, whose default is 0 (a Swin gets it)",
    ),
    Choice(
        *("recipe.precision", "bfloat16", None, "float32"),
        "the paper does not say; train.sh leaves mixed precision at its default, O0, which is off",
    ),
    Choice(
        *("jigsaw.position_init", "paper", None, "paper"),
        "the paper does not say; in vit_timm.py the table of a model with E_unk is an "
        "nn.Embedding, which starts at N(0, 1), and its name is not among those that do not decay",
    ),
)

EMPTY_PUZZLE = (
    "γ = 0: Table 3 prints 80.0 and 64.0 for it, the figures of Table 4's row D, which has no "
    "jigsaw and no E_unk; in the authors' masking_generator.py a ratio of 0 means .1. The preset "
    "`authors_code` follows the printed figures: its γ = 0 is row D. Ours keeps E_unk, whose PEs "
    "start at N(0, 1), and draws empty masks."
)


def preset_fields(preset: str, family: str = "vit") -> dict[str, dict[str, Any]]:
    """What a preset sets, in the layout of a config: {"jigsaw": {"gamma": 0.1}, ...}.

    family: of the network; the authors' code hands its drop path to a Swin
    """
    if preset not in get_args(Preset):
        raise unknown_name("preset", preset, list(get_args(Preset)))
    fields: dict[str, dict[str, Any]] = {}
    if preset == "ours":
        return fields
    for choice in CHOICES:
        value = getattr(choice, preset)
        if value is not None and (family == "vit" or choice.field != DROP_PATH):
            part, name = choice.field.split(".")
            fields.setdefault(part, {})[name] = value
    return fields


def without_empty_puzzle(content: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """The config with γ = 0 turned into a model without jigsaw and E_unk, under `authors_code`."""
    jigsaw, model = content.get("jigsaw"), content.get("model")
    if preset != "authors_code" or not isinstance(jigsaw, Mapping) or jigsaw.get("gamma") != 0:
        return dict(content)
    plain_model = {**(model if isinstance(model, Mapping) else {}), "unknown_embedding": False}
    without_gamma = {name: value for name, value in jigsaw.items() if name != "gamma"}
    puzzle = {**without_gamma, **preset_fields(preset)["jigsaw"], "shuffle": "none"}
    return {**content, "model": plain_model, "jigsaw": puzzle}


def deviations(choices: Sequence[Choice] = CHOICES) -> str:
    """The choices as a Markdown table."""
    head = "| field | ours | paper | authors' code | evidence |\n| --- | --- | --- | --- | --- |"
    lines = [
        "| "
        + " | ".join((one.field, *map(_word, (one.ours, one.paper, one.authors_code))))
        + f" | {one.why} |"
        for one in choices
    ]
    return "\n".join((head, *lines))


def _word(value: Any) -> str:
    return "not printed" if value is None else str(value)


# published ------------------------------------------------------------
# The figures printed in the paper's Tables 1, 3 and 4: accuracy and consistency of models.

PAPERS_MODEL = re.compile(r"vit d384 l12 h6 p16@224\b|(vit|deit)_small_patch16_224\b")
PAPERS_SIZE = 224


def is_papers_model(architecture: str | None, size: int | None) -> bool:
    """Whether a model has the family and input size of the paper's DeiT-S: a ViT-S/16 at 224."""
    return size == PAPERS_SIZE and PAPERS_MODEL.match(architecture or "") is not None


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """One printed row, for ImageNet-1K at 224; top1 and consistency in percent.

    diff_norm is the L2 norm of the difference that shuffling makes to [CLS].
    """

    table: int
    row: str
    top1: float
    consistency: float
    diff_norm: float | None = None

    @property
    def label(self) -> str:
        """Where the row is printed, such as "Table 4, A: DeiT-S"."""
        return f"Table {self.table}, {self.row}"


TABLE1 = (
    PublishedModel(1, "ResNet-50", 79.3, 51.5, 11.77),
    PublishedModel(1, "ResNet-50 + MJP", 79.4, 69.3, 7.11),
    PublishedModel(1, "DeiT-S", 79.8, 64.3, 16.21),
    PublishedModel(1, "DeiT-S + MJP", 80.5, 82.9, 8.96),
    PublishedModel(1, "Swin-T", 81.3, 41.5, 15.49),
    PublishedModel(1, "Swin-T + MJP", 81.3, 66.9, 12.36),
)

TABLE3: Mapping[float, PublishedModel] = {
    gamma: PublishedModel(3, f"γ = {gamma:g}", top1, consistency, diff_norm)
    for gamma, top1, diff_norm, consistency in (
        (0.0, 80.0, 16.56, 64.0),
        (0.03, 80.5, 8.96, 82.9),
        (0.09, 80.3, 6.36, 88.1),
        (0.15, 80.4, 5.23, 90.5),
        (0.21, 80.2, 4.39, 92.3),
        (0.27, 80.3, 3.97, 93.1),
    )
}
"""DeiT-S + MJP by the shuffle ratio it was trained with."""

TABLE4: Mapping[str, PublishedModel] = {
    row: PublishedModel(4, f"{row}: {name}", top1, consistency)
    for row, name, top1, consistency in (
        ("A", "DeiT-S", 79.8, 64.3),
        ("B", "A − PEs", 77.5, 100.0),
        ("C", "A + SPP", 74.9, 74.8),
        ("D", "A + DAL (NLN)", 80.0, 64.0),
        ("E", "A + JP", 79.2, 73.8),
        ("F", "A + JP + IDX", 79.9, 79.6),
        ("G", "A + JP + UNK", 80.1, 83.8),
        ("H", "A + JP + UNK + DAL (PCA)", 79.9, 83.4),
        ("I", "A + JP + UNK + DAL (LN)", 80.0, 83.8),
        ("J", "A + JP + UNK + DAL (NLN)", 80.5, 82.9),
    )
}


Word = Annotated[str, Field(strict=True, max_length=100)]
_KNOWN = ConfigDict(extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True, config=_KNOWN)
class _Network:
    position_embedding: Word
    unknown_embedding: Switch
    index_embedding: Switch
    dal: Word
    first_block: Word


@dataclass(frozen=True, config=_KNOWN)
class _Shuffle:
    shuffle: Word
    gamma: Share
    share: Share
    mask_per: Word
    dal_lambda: NotNegative
    dal_target: Word
    position_init: Word
    position_confound: Switch
    dal_schedule: Word = "constant"


@dataclass(frozen=True, config=_KNOWN)
class Switches:
    """What a recipe says that decides which printed row its model belongs beside."""

    model: _Network
    jigsaw: _Shuffle
    initial: dict[str, Any] | None
    family: Word = "vit"


def counterpart_in(metadata: Mapping[str, str]) -> PublishedModel | None:
    """The printed row of the model whose file has this metadata; None where there is none, or the
    file holds no recipe of this trainer."""
    return counterpart(recipe_in(metadata))


def recipe_in(metadata: Mapping[str, str]) -> object:
    """The recipe that a model's file states, untyped; None where it states none."""
    try:
        return json.loads(metadata.get("recipe", "null"))
    except (ValueError, RecursionError):
        return None


def counterpart(content: object) -> PublishedModel | None:
    """The printed row of the model that was trained with the same switches, or None.

    content: the recipe that our trainer writes into a checkpoint. The model of Table 4's row J has
    a row for each shuffle ratio in Table 3. None means that the paper printed no such model, for
    example one that was fine-tuned.
    """
    try:
        recipe = TypeAdapter(Switches).validate_python(content)
    except ValidationError:
        return None
    if recipe.initial is not None:
        return None
    model, jigsaw = recipe.model, recipe.jigsaw
    if model.first_block != "intact" or jigsaw.position_confound:
        return None
    shuffles, unknown = jigsaw.shuffle != "none", model.unknown_embedding
    if shuffles and (jigsaw.mask_per, jigsaw.share) != ("batch", 0.5):
        return None
    if unknown and jigsaw.position_init != "paper":
        return None
    weight = (jigsaw.dal_lambda, jigsaw.dal_target, jigsaw.dal_schedule)
    if model.dal != "none" and weight != (0.01, "raw", "constant"):
        return None
    without = model.position_embedding == "none"
    switches = (without, jigsaw.shuffle, unknown, model.index_embedding, model.dal)
    if recipe.family != "vit":
        as_printed = not shuffles or jigsaw.gamma == MAIN_GAMMA
        return _OTHERS.get((recipe.family, *switches)) if as_printed else None
    row = _ROWS.get(switches)
    if row == "J":
        return TABLE3.get(jigsaw.gamma)
    other_ratio = jigsaw.shuffle == "patches" and jigsaw.gamma != MAIN_GAMMA
    return None if row is None or other_ratio else TABLE4[row]


MAIN_GAMMA = 0.03
"""The shuffle ratio that the rows of Table 4 were trained with."""

_ROWS = {
    (False, "none", False, False, "none"): "A",
    (True, "none", False, False, "none"): "B",
    (False, "patches_and_pixels", False, False, "none"): "C",
    (False, "none", False, False, "nonlinear"): "D",
    (False, "patches", False, False, "none"): "E",
    (False, "patches", False, True, "none"): "F",
    (False, "patches", True, False, "none"): "G",
    (False, "patches", True, False, "pca"): "H",
    (False, "patches", True, False, "linear"): "I",
    (False, "patches", True, False, "nonlinear"): "J",
}
"""{(without PEs, shuffle, UNK, IDX, DAL): row of Table 4}."""

_OTHERS = {
    ("resnet", True, "none", False, False, "none"): TABLE1[0],
    ("resnet", True, "patches", False, False, "none"): TABLE1[1],
    ("swin", True, "none", False, False, "none"): TABLE1[4],
    ("swin", False, "patches", True, False, "nonlinear"): TABLE1[5],
}
"""The same for the other families of Table 1. Swin-T has no table of absolute positions of its own
(the authors' `--ape` is off by default); with MJP it has one."""
