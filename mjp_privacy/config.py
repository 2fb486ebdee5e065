"""An experiment: a grid of cells, written in YAML, checked once, frozen.

A cell is one line of a table: a model, a setting with its gamma, a client gradient's precision and
an attack. A typo in a file is an error that names the nearest field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mjp_privacy.errors import UserError
from mjp_privacy.registry import unknown_name

_STRICT = ConfigDict(extra="forbid")

SettingName = Literal["a", "b", "c"]
DtypeName = Literal["float32", "float64"]


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
    trained_gamma: float | None = None
    seed: int = 0
    """Seed of the weights where checkpoint is random."""


@dataclass(frozen=True, config=_STRICT)
class GridEntry:
    """Cells: the product of these lists, in table order."""

    models: tuple[str, ...]
    settings: tuple[SettingName, ...]
    gammas: tuple[float, ...] = (0.27,)
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
    """Images per block of work; part of the numbers, for float32 APRIL moves with the batch."""
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
    cells = []
    for entry in experiment.grid:
        for model in entry.models:
            for setting in entry.settings:
                for gamma in (0.0,) if setting == "a" else entry.gammas:
                    for dtype in experiment.dtypes:
                        for attack in _attacks_of(entry, experiment):
                            cells.append(
                                Cell(
                                    model,
                                    setting,
                                    gamma,
                                    dtype,
                                    attack,
                                    entry.paper_setting,
                                    entry.note,
                                )
                            )
    return cells


def _attacks_of(entry: GridEntry, experiment: Experiment) -> list[AttackConfig]:
    if entry.attacks is None:
        return list(experiment.attacks)
    return [attack for attack in experiment.attacks if attack.name in entry.attacks]


# reading ------------------------------------------------------------------------------------------


def load_experiment(config: str | Path | Mapping[str, Any] | Experiment) -> Experiment:
    """From a YAML file, a mapping or an Experiment; checked."""
    if isinstance(config, Experiment):
        return config
    if isinstance(config, Mapping):
        return parse_experiment(config, "the config")
    path = Path(config)
    if not path.is_file():
        raise UserError(_no_config(path))
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise UserError(
            f"{path}: expected fields such as `name:`, `models:`, `grid:`; got "
            f"{type(content).__name__}. Start from a file in configs/."
        )
    return parse_experiment(content, str(path))


def _no_config(path: Path) -> str:
    from difflib import get_close_matches

    folder = path.parent
    known = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
    near = get_close_matches(path.name, known, n=1)
    hint = f" Did you mean {folder / near[0]}?" if near else ""
    return f"No config at {path}: expected a YAML file.{hint} Those shipped are in configs/."


def parse_experiment(content: Mapping[str, Any], where: str) -> Experiment:
    try:
        experiment = TypeAdapter(Experiment).validate_python(dict(content))
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise UserError(f"{where} has {len(lines)} mistake(s):\n  " + "\n  ".join(lines)) from error
    check_experiment(experiment, where)
    return experiment


def _explain(problem: Any) -> str:
    from difflib import get_close_matches

    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "unexpected_keyword_argument":
        fields = sorted(_field_names(problem["loc"]))
        near = get_close_matches(str(problem["loc"][-1]), fields, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(fields)}."
        return f"{place}: unknown field.{hint}"
    if problem["type"] == "missing":
        return f"{place}: this field is needed and was not given."
    return f"{place}: {problem['msg']}; got {problem['input']!r}."


def _field_names(location: tuple[Any, ...]) -> set[str]:
    owners: dict[str, Any] = {
        "models": ModelConfig,
        "grid": GridEntry,
        "attacks": AttackConfig,
        "client": ClientConfig,
    }
    owner = owners.get(str(location[0]), Experiment) if len(location) > 1 else Experiment
    return {field.name for field in dataclasses.fields(owner)}


def check_experiment(experiment: Experiment, where: str) -> None:
    """Names and ranges that cross fields."""
    names = list(experiment.models)
    for entry in experiment.grid:
        for model in entry.models:
            if model not in experiment.models:
                raise UserError(f"{where}, grid: {unknown_name('model', model, names)}")
        for gamma in entry.gammas:
            if not 0.0 <= gamma <= 1.0:
                raise UserError(f"{where}, grid: gamma is a share of patches, 0 to 1; got {gamma}.")
        labels = [attack.name for attack in experiment.attacks]
        for attack in entry.attacks or ():
            if attack not in labels:
                raise UserError(f"{where}, grid: {unknown_name('attack', attack, labels)}")
    for field, value in (("block", experiment.block), ("client.batch", experiment.client.batch)):
        if value < 1:
            raise UserError(f"{where}, {field}: expected at least 1, got {value}.")
    if not experiment.grid or not expand(experiment):
        raise UserError(f"{where}: the grid is empty. Expected at least one model and setting.")


def with_gamma(experiment: Experiment, gamma: float) -> Experiment:
    """The same experiment with one shuffle ratio for every b and c."""
    if not 0.0 <= gamma <= 1.0:
        raise UserError(f"--gamma is a share of the patches, 0 to 1; got {gamma}.")
    grid: list[GridEntry] = []
    for entry in experiment.grid:
        changed = dataclasses.replace(entry, gammas=(gamma,))
        if changed not in grid:
            grid.append(changed)
    return dataclasses.replace(experiment, grid=tuple(grid))


def with_weights(experiment: Experiment, weights: tuple[str, ...]) -> Experiment:
    """`PATH` for all models, or `NAME=PATH` for one."""
    models = dict(experiment.models)
    for item in weights:
        name, separator, path = item.partition("=")
        if not separator or (name not in models and Path(item).exists()):
            models = {k: dataclasses.replace(m, checkpoint=item) for k, m in models.items()}
            continue
        if name not in models:
            raise UserError(f"--weights {item}: {unknown_name('model', name, list(models))}")
        models[name] = dataclasses.replace(models[name], checkpoint=path)
    return dataclasses.replace(experiment, models=models)
