"""An experiment: a grid of cells, written in YAML, checked once, frozen.

A cell is one line of a table: a model, a setting with its gamma, a client gradient's precision and
an attack. Reading a file is `config_files`' business.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from mjp_privacy.errors import UserError
from mjp_privacy.registry import unknown_name

_STRICT = ConfigDict(extra="forbid")

SettingName = Literal["a", "b", "c"]
DtypeName = Literal["float32", "float64"]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """One model. Fields left out come from the named model or from the checkpoint."""

    model: str | None = None
    """A named model (vit_small, deit_small_mjp, ...) or a plain timm ViT (vit_tiny_patch16_224)."""
    checkpoint: str | None = None
    """A file, timm:NAME, or random. --weights overrides it."""
    unknown_init: Literal["mean_position", "zeros"] | None = None
    """How to fill E_unk where the checkpoint has none; the row says so."""
    paper: str | None = None
    """Name of the paper's model whose Table-5 figures stand beside this one's."""
    note: str | None = None
    """A sentence for the foot of the table."""
    img_size: int | None = None
    patch_size: int | None = None
    embed_dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    num_classes: int | None = None
    mean: float | tuple[float, float, float] | None = None
    std: float | tuple[float, float, float] | None = None
    resize: int | None = None
    interpolation: Literal["bicubic", "bilinear"] | None = None
    position_embedding: Literal["learned", "exposed", "strict"] | None = None
    unknown_embedding: bool | None = None
    index_embedding: bool | None = None
    dal: Literal["none", "pca", "linear", "nonlinear"] | None = None
    first_block: Literal["intact", "closed_form"] | None = None
    trained_gamma: Share | None = None
    seed: int = 0
    """Seed of the weights where checkpoint is random."""


@dataclass(frozen=True, config=_STRICT)
class GridEntry:
    """Cells: the product of these lists, in table order."""

    models: tuple[str, ...]
    settings: tuple[SettingName, ...]
    gammas: tuple[Share, ...] = (0.27,)
    """Shuffle ratios of settings b and c; a has none."""
    attacks: tuple[str, ...] | None = None
    """Labels of the attacks to run; None: all of the experiment."""
    paper_setting: SettingName | None = None
    """The setting the paper prints for this row, where it is another one."""
    note: str | None = None


@dataclass(frozen=True, config=_STRICT)
class AttackConfig:
    """An attack's name in the registry and its options."""

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=_STRICT)
class ClientConfig:
    """How the client makes its gradient. Each field is a column of every row."""

    mode: Literal["eval", "train"] = "eval"
    loss: Literal["cross_entropy"] = "cross_entropy"
    batch: int = 1
    dal: bool = False
    """Add dal_lambda * L_DAL over the unmasked positions to the loss."""
    dal_lambda: float = 0.01


@dataclass(frozen=True, config=_STRICT)
class Experiment:
    """Everything that decides the numbers; paths, device and limits do not belong here."""

    name: str
    models: dict[str, ModelConfig]
    grid: tuple[GridEntry, ...]
    attacks: tuple[AttackConfig, ...] = (AttackConfig("april"),)
    dtypes: tuple[DtypeName, ...] = ("float32",)
    client: ClientConfig = ClientConfig()
    seed: int = 0
    block: int = 20
    """Images per block of work, whole client steps; part of the numbers, for float32 APRIL moves
    with the batch."""
    images: str | None = None
    """Default for --images; `embedded` means photographs that every installation has."""
    data_is_papers: bool = False
    """The images are ImageNet-1K validation images, as the paper's; set it only if they are."""


@dataclasses.dataclass(frozen=True, eq=False)  # hashable by identity
class Cell:
    """One line of a table."""

    model: str
    setting: SettingName
    gamma: float
    dtype: DtypeName
    attack: AttackConfig
    paper_setting: SettingName | None
    note: str | None


def expand(experiment: Experiment) -> list[Cell]:
    """The cells in table order."""
    return [
        Cell(model, setting, gamma, dtype, attack, entry.paper_setting, entry.note)
        for entry in experiment.grid
        for model in entry.models
        for setting in entry.settings
        for gamma in ((0.0,) if setting == "a" else entry.gammas)
        for attack in _attacks_of(entry, experiment)
        for dtype in experiment.dtypes
    ]


def _attacks_of(entry: GridEntry, experiment: Experiment) -> list[AttackConfig]:
    if entry.attacks is None:
        return list(experiment.attacks)
    return [attack for attack in experiment.attacks if attack.name in entry.attacks]


# checks -------------------------------------------------------------------------------------------


def check_experiment(experiment: Experiment, where: str) -> None:
    """Names and ranges that cross fields."""
    for field in ("grid", "dtypes", "attacks"):
        if not getattr(experiment, field):
            raise UserError(f"{where}, {field}: expected at least one entry, got none.")
    for place, entry in enumerate(experiment.grid):
        _check_entry(entry, experiment, f"{where}, grid.{place}")
    for field, value in (("block", experiment.block), ("client.batch", experiment.client.batch)):
        if value < 1:
            raise UserError(f"{where}, {field}: expected at least 1, got {value}.")
    if experiment.block % experiment.client.batch:
        raise UserError(
            f"{where}, block: a block holds whole client steps; expected a multiple of "
            f"client.batch ({experiment.client.batch}), got {experiment.block}."
        )
    weight = experiment.client.dal_lambda
    if not 0 <= weight < math.inf:
        raise UserError(f"{where}, client.dal_lambda: expected 0 or a number above, got {weight}.")


def _check_entry(entry: GridEntry, experiment: Experiment, where: str) -> None:
    labels = [attack.name for attack in experiment.attacks]
    for field in ("models", "settings", "gammas", "attacks"):
        given = getattr(entry, field)
        if given is not None and not given:
            raise UserError(f"{where}.{field}: expected at least one entry, got none.")
    for model in entry.models:
        if model not in experiment.models:
            raise UserError(f"{where}: {unknown_name('model', model, list(experiment.models))}")
    for attack in entry.attacks or ():
        if attack not in labels:
            raise UserError(f"{where}: {unknown_name('attack', attack, labels)}")


# what the command line changes --------------------------------------------------------------------


def with_gamma(experiment: Experiment, gamma: float) -> Experiment:
    """The same experiment with one shuffle ratio for every b and c; cells that become equal, once.

    An entry a model and setting, so that the order of the table stays.
    """
    if not 0.0 <= gamma <= 1.0:
        raise UserError(f"--gamma is a share of the patches, 0 to 1; got {gamma}.")
    grid: list[GridEntry] = []
    seen: set[tuple[str, str, str]] = set()
    for entry in experiment.grid:
        names = [attack.name for attack in _attacks_of(entry, experiment)]
        for model in entry.models:
            for setting in entry.settings:
                new = tuple(name for name in names if (model, setting, name) not in seen)
                seen.update((model, setting, name) for name in new)
                if new:
                    note, paper = entry.note, entry.paper_setting
                    grid.append(GridEntry((model,), (setting,), (gamma,), new, paper, note))
    return dataclasses.replace(experiment, grid=tuple(grid))


def with_weights(experiment: Experiment, weights: tuple[str, ...]) -> Experiment:
    """`PATH` for all models, or `NAME=PATH` for one, whose own goes first in any order."""
    models = experiment.models
    given: dict[str | None, str] = {}
    for item in weights:
        name = _model_of(item, list(models))
        path = item if name is None else item.removeprefix(f"{name}=")
        if not path or name in given:
            came = "two" if name in given else "none"
            raise UserError(
                f"--weights: expected one checkpoint for {name or 'all models'}, got {came}. "
                "Write PATH, or NAME=PATH, once for each model."
            )
        given[name] = path
    replaced = {}
    for label, config in models.items():
        checkpoint = given.get(label) or given.get(None) or config.checkpoint
        replaced[label] = dataclasses.replace(config, checkpoint=checkpoint)
    return dataclasses.replace(experiment, models=replaced)


def _model_of(item: str, labels: list[str]) -> str | None:
    """The model that `NAME=PATH` names; None for a `PATH`. Both may hold further '='."""
    named = [label for label in labels if item.startswith(f"{label}=")]
    if named:
        return max(named, key=len)
    if "=" not in item or Path(item).exists():
        return None
    unknown = unknown_name("model", item.partition("=")[0], labels)
    raise UserError(f"--weights {item}: no such file, and as NAME=PATH: {unknown}")
