"""Where this project, the paper and its authors' code train MJP differently, and presets of each.

    load_training("configs/training/imagenet.yaml", "J", preset="authors_code")

A preset changes the fields listed in CHOICES and nothing else: a config's sizes, schedule and
images stay. What the paper does not print keeps the config's value under `paper`. The authors' code
is github.com/yhlleo/MJP at commit a5d7c8a, which was read; nothing of it is used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mjp_privacy.core.registry import unknown_name

Preset = Literal["ours", "paper", "authors_code"]


@dataclass(frozen=True)
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
