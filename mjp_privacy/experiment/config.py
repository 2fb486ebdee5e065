"""An experiment: a grid of cells, written in YAML, checked once, frozen.

A cell is one line of a table: a model, a setting with its gamma, a client gradient's precision and
an attack. Reading a file is `config_files`' business.
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

    def loading(self) -> dict[str, Any]:
        """The arguments of `load_model` besides the model's name."""
        others = ("model", "paper", "note")
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclass(frozen=True, config=STRICT)
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
    client: dict[str, Any] | None = None
    """Fields of the client that are others here than in the experiment's."""


@dataclass(frozen=True, config=STRICT)
class AttackConfig:
    """An attack's name in the registry and its options."""

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    label: str | None = None
    """What tables and grid entries call it, such as one attack with other options; None: its
    name."""

    @property
    def title(self) -> str:
        return self.label or self.name


@dataclass(frozen=True, config=STRICT)
class ClassChoice:
    """Images whose class index leaves one of `remainders` when divided by `modulo`.

    Keeps the images that are attacked apart from those that something was fitted on.
    """

    modulo: Annotated[int, Field(ge=2)]
    remainders: tuple[int, ...]

    def holds(self, label: int) -> bool:
        return label % self.modulo in self.remainders


@dataclass(frozen=True, config=STRICT)
class Experiment:
    """Everything that decides the numbers; paths, device and limits do not belong here."""

    name: str
    models: dict[str, ModelConfig] = dataclasses.field(default_factory=dict)
    grid: tuple[GridEntry, ...] = ()
    """Models and grid may both be left out: such a config names attacks for recorded uploads."""
    attacks: tuple[AttackConfig, ...] = (AttackConfig("april"),)
    dtypes: tuple[DtypeName, ...] = ("float32",)
    client: ClientConfig = ClientConfig()
    seed: int = 0
    block: int = 20
    """Images per block of work, whole client steps; part of the numbers, for float32 APRIL moves
    with the batch."""
    images: str | None = None
    """Default for --images; `embedded` means photographs that every installation has."""
    classes: ClassChoice | None = None
    """Which of the labelled images to attack; None: all."""
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
    client: ClientConfig


def expand(experiment: Experiment) -> list[Cell]:
    """The cells in table order."""
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
    """The attacks of this entry's cells."""
    if entry.attacks is None:
        return list(experiment.attacks)
    return [attack for attack in experiment.attacks if attack.title in entry.attacks]


def client_fields(entry: GridEntry, experiment: Experiment) -> dict[str, Any]:
    """Fields of the client of this entry's cells: the experiment's, with the entry's own."""
    return dataclasses.asdict(experiment.client) | (entry.client or {})


# checks -------------------------------------------------------------------------------------------
