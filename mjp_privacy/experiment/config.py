"""The config of an experiment: a grid of cells, written in YAML, checked once and frozen.

A cell is one line of a table: a model, a setting with its gamma, the precision of the client's
gradient, and an attack. `config_files` reads the file.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mjp_privacy.client.config import ClientConfig, Share
from mjp_privacy.core.fields import STRICT

__all__ = [
    "AttackConfig",
    "Cell",
    "DtypeName",
    "Experiment",
    "GridEntry",
    "ModelConfig",
    "SettingName",
    "attacks_of",
    "client_fields",
    "expand",
]


SettingName = Literal["a", "b", "c"]
DtypeName = Literal["float32", "float64"]


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """One model. Fields left out come from the named model or from the checkpoint."""

    model: str | None = None
    """A named model (vit_small, deit_small_mjp, ...) or a plain timm ViT (vit_tiny_patch16_224)."""
    checkpoint: str | None = None
    """A file, timm:NAME, or random. --weights overrides it."""
    unknown_init: Literal["mean_position", "zeros", "random"] | None = None
    """How to fill E_unk if the checkpoint has none; the table will say so."""
    paper: str | None = None
    """The paper's model whose figures in Table 5 stand beside this one's."""
    note: str | None = None
    """A sentence for the notes below the table."""
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
    norm_eps: float | None = None
    activation: Literal["gelu", "quick_gelu", "gelu_tanh", "relu"] | None = None
    trained_gamma: Share | None = None
    seed: int = 0
    """Seed of the weights if `checkpoint` is random."""

    def loading(self) -> dict[str, Any]:
        """The keyword arguments of `load_model`, that is all but the model's name."""
        not_for_loading = ("model", "paper", "note")
        return {name: value for name, value in vars(self).items() if name not in not_for_loading}


@dataclass(frozen=True, config=STRICT)
class GridEntry:
    """A part of the grid: all combinations of these lists, in the order of the table."""

    models: tuple[str, ...]
    settings: tuple[SettingName, ...]
    gammas: tuple[Share, ...] = (0.27,)
    """Shuffle ratios of settings b and c; nothing is shuffled in setting a."""
    attacks: tuple[str, ...] | None = None
    """Labels of the attacks to run; None: all attacks of the experiment."""
    paper_setting: SettingName | None = None
    """The setting that the paper prints for this row, if it differs from the one computed."""
    note: str | None = None
    client: dict[str, Any] | None = None
    """Fields of the client that differ here from the experiment's client."""
    only_with: Literal["unknown_embedding"] | None = None
    """Leave out models that have no such part; the run says which (`conditions`)."""
    trained_gamma: bool = False
    """Use the ratio that a model was trained with, where its checkpoint states one, in place of
    `gammas`; --gamma replaces both."""


@dataclass(frozen=True, config=STRICT)
class AttackConfig:
    """An attack's name in the registry and its options."""

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    label: str | None = None
    """What tables and grid entries call it, needed where one attack has several sets of options;
    None: its name."""

    @property
    def title(self) -> str:
        """The label, or the name if there is none."""
        return self.label or self.name


@dataclass(frozen=True, config=STRICT)
class ClassChoice:
    """Images whose class index leaves one of `remainders` when divided by `modulo`.

    It keeps the images that are attacked apart from those that something was fitted on.
    """

    modulo: Annotated[int, Field(ge=2)]
    remainders: tuple[int, ...]

    def holds(self, label: int) -> bool:
        """Whether images of this class are chosen."""
        return label % self.modulo in self.remainders


@dataclass(frozen=True, config=STRICT)
class Experiment:
    """Everything that decides the numbers, and so neither paths nor the device nor a limit."""

    name: str
    models: dict[str, ModelConfig] = dataclasses.field(default_factory=dict)
    grid: tuple[GridEntry, ...] = ()
    """Models and grid may both be left out; such a config names the attacks on recorded uploads."""
    attacks: tuple[AttackConfig, ...] = (AttackConfig("april"),)
    dtypes: tuple[DtypeName, ...] = ("float32",)
    client: ClientConfig = ClientConfig()
    seed: int = 0
    block: int = 20
    """Images that are attacked together, a number of whole client steps. It belongs here because
    float32 results of APRIL depend slightly on it."""
    images: str | None = None
    """Default for --images; `embedded` means photographs that every installation has."""
    classes: ClassChoice | None = None
    """Which of the labelled images to attack; None: all of them."""
    data_is_papers: bool = False
    """Whether the images are ImageNet-1K validation images, as in the paper."""


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
    client: ClientConfig


def expand(experiment: Experiment) -> list[Cell]:
    """The cells of the grid in table order; in setting a there is one gamma, 0."""
    return [
        Cell(model, setting, gamma, dtype, attack, entry.paper_setting, entry.note, client)
        for entry in experiment.grid
        for client in (ClientConfig(**client_fields(entry, experiment)),)
        for model in entry.models
        for setting in entry.settings
        for gamma in ((0.0,) if setting == "a" else entry.gammas)
        for attack in attacks_of(entry, experiment)
        for dtype in experiment.dtypes
    ]


def attacks_of(entry: GridEntry, experiment: Experiment) -> list[AttackConfig]:
    """The attacks that this entry of the grid runs."""
    if entry.attacks is None:
        return list(experiment.attacks)
    return [attack for attack in experiment.attacks if attack.title in entry.attacks]


def client_fields(entry: GridEntry, experiment: Experiment) -> dict[str, Any]:
    """The client's fields for this entry: the experiment's, some replaced by the entry."""
    return dataclasses.asdict(experiment.client) | (entry.client or {})
