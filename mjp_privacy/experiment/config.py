"""The config of an experiment: a grid of cells, written in YAML, checked once and frozen.

A cell is one line of a table: a model, a setting with its gamma, the precision of the client's
gradient, and an attack. A misspelt name gets the nearest real one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from attacks import ATTACKS, CONTROLS, find_attack
from attacks.prior import check_prior
from mjp_privacy.client.config import ClientConfig, check_client
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping, stock_config
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import (
    Classes,
    Depth,
    ImageSize,
    Label,
    Many,
    Mean,
    Name,
    PathText,
    Positive,
    Seed,
    Share,
    Side,
    Spread,
    Switch,
    Text,
    Whole,
    Width,
    parse,
    schema,
)

if TYPE_CHECKING:
    from mjp_privacy.interfaces import Attack, Control

SettingName = Literal["a", "b", "c"]
DtypeName = Literal["float32", "float64"]
BlockSize = Annotated[int, Field(strict=True, ge=1, le=100_000)]

Seconds = Annotated[float, Field(strict=True, ge=0.001, le=1e7)]

MOST_CELLS = 10_000
"""Lines of a table; a grid of more is a slip of the pen."""
Lines = Field(max_length=MOST_CELLS)
Some = Field(min_length=1, max_length=1000)


@schema
class ModelConfig:
    """One model. Fields left out come from the named model or from the checkpoint."""

    model: Label | None = None
    """A named model (vit_small, deit_small_mjp, ...) or a timm ViT (vit_small_patch14_dinov2)."""
    checkpoint: PathText | None = None
    """A file, timm:NAME, or random. --weights overrides it."""
    unknown_init: Literal["mean_position", "zeros", "random"] | None = None
    """How to fill E_unk if the checkpoint has none; the table will say so."""
    paper: Label | None = None
    """The paper's model whose figures in Table 5 stand beside this one's."""
    note: Text | None = None
    """A sentence for the notes below the table."""
    img_size: ImageSize | None = None
    patch_size: Side | None = None
    embed_dim: Width | None = None
    depth: Depth | None = None
    num_heads: Width | None = None
    num_classes: Classes | None = None
    mean: Mean | tuple[Mean, Mean, Mean] | None = None
    std: Spread | tuple[Spread, Spread, Spread] | None = None
    resize: Side | None = None
    interpolation: Literal["bicubic", "bilinear"] | None = None
    position_embedding: Literal["learned", "exposed", "strict"] | None = None
    unknown_embedding: Switch | None = None
    index_embedding: Switch | None = None
    dal: Literal["none", "pca", "linear", "nonlinear"] | None = None
    first_block: Literal["intact", "closed_form"] | None = None
    norm_eps: Positive | None = None
    activation: Literal["gelu", "quick_gelu", "gelu_tanh", "relu"] | None = None
    trained_gamma: Share | None = None
    seed: Seed = 0
    """Seed of the weights if `checkpoint` is random."""

    def loading(self) -> dict[str, Any]:
        """The keyword arguments of `load_model`, that is all but the model's name."""
        not_for_loading = ("model", "paper", "note")
        return {name: value for name, value in vars(self).items() if name not in not_for_loading}


@schema
class GridEntry:
    """A part of the grid: all combinations of these lists, in the order of the table."""

    models: Annotated[tuple[Label, ...], Some]
    settings: Annotated[tuple[SettingName, ...], Some]
    gammas: Annotated[tuple[Share, ...], Some] = (0.27,)
    """Shuffle ratios of settings b and c; nothing is shuffled in setting a."""
    attacks: Annotated[tuple[Label, ...], Some] | None = None
    """Labels of the attacks to run; None: all attacks of the experiment."""
    paper_setting: SettingName | None = None
    """The setting that the paper prints for this row, if it differs from the one computed."""
    note: Text | None = None
    client: Annotated[dict[Label, Any], Many] | None = None
    """Fields of the client that differ here from the experiment's client."""
    dtypes: Annotated[tuple[DtypeName, ...], Some] | None = None
    """Precisions of this entry's gradients, whatever the experiment's are; None: those."""
    only_with: Literal["unknown_embedding"] | None = None
    """Leave out models that have no such part; the run says which (`overrides.decided`)."""
    trained_gamma: Switch = False
    """Use the ratio that a model was trained with, where its checkpoint states one, in place of
    `gammas`; --gamma replaces both."""


@schema
class AttackConfig:
    """An attack's name in the registry and its options."""

    name: Label
    options: Annotated[dict[Label, Any], Many] = dataclasses.field(default_factory=dict)
    label: Label | None = None
    """What tables and grid entries call it, needed where one attack has several sets of options;
    None: its name."""
    seconds: Seconds | None = None
    """The processor's time that the attack may take over one image; past it the image's row is the
    best that the attack has so far, or `unsupported` with the reason. None: any. Which images that
    concerns depends on the machine, so rows say it (`attack_seconds`, `over_budget`)."""

    @property
    def title(self) -> str:
        return self.label or self.name


def _by_name(item: object) -> object:
    """An attack as it was given; a name alone stands for one without options."""
    return {"name": item} if isinstance(item, str) else item


AttackEntry = Annotated[AttackConfig, BeforeValidator(_by_name)]


@schema
class ClassChoice:
    """Images whose class index leaves one of `remainders` when divided by `modulo`.

    It keeps the images that are attacked apart from those that something was fitted on.
    """

    modulo: Annotated[int, Field(strict=True, ge=2, le=1_000_000)]
    remainders: Annotated[tuple[Whole, ...], Many]

    def holds(self, label: int) -> bool:
        return label % self.modulo in self.remainders


@schema
class Experiment:
    """Everything that decides the numbers, and so neither paths nor the device nor a limit."""

    name: Name
    models: Annotated[dict[Label, ModelConfig], Lines] = dataclasses.field(default_factory=dict)
    grid: Annotated[tuple[GridEntry, ...], Lines] = ()
    """Models and grid may both be left out; such a config names the attacks on recorded uploads."""
    attacks: Annotated[tuple[AttackEntry, ...], Some] = (AttackConfig("april"),)
    dtypes: Annotated[tuple[DtypeName, ...], Some] = ("float32",)
    client: ClientConfig = ClientConfig()
    seed: Seed = 0
    block: BlockSize = 20
    """Images that are attacked together, a number of whole client steps. It belongs here because
    float32 results of APRIL depend slightly on it."""
    images: PathText | None = None
    """Default for --images; `embedded` means photographs that every installation has."""
    classes: ClassChoice | None = None
    """Which of the labelled images to attack; None: all of them."""
    data_is_papers: Switch = False
    """Whether the images are ImageNet-1K validation images, as in the paper."""
    diagnostics: Annotated[tuple[Literal["residual"], ...], Many] = ()
    """residual: compare the gradient of every reconstruction with its upload, also where no two
    attacks compete for the attacker's choice; it costs as much as the uploads."""


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

    @cached_property
    def attacker(self) -> Attack | Control:
        return find_attack(self.attack.name, self.attack.options)

    @property
    def uploads(self) -> int:
        """How many uploads of the same images the attack reads; 0: it is a control."""
        return int(getattr(self.attacker, "uploads", 0))

    @property
    def victim(self) -> Literal["intact", "april_block"]:
        """Block 0 of the model that the client trains."""
        victim: Literal["intact", "april_block"] = getattr(self.attacker, "victim", "intact")
        return victim

    @property
    def federation(self) -> tuple[Any, ...]:
        """What cells that attack the same uploads have in common."""
        victim = self.victim if self.uploads else None
        return self.model, self.setting, self.gamma, self.dtype, self.client, victim


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
        for dtype in entry.dtypes or experiment.dtypes
    ]


def attacks_of(entry: GridEntry, experiment: Experiment) -> list[AttackConfig]:
    if entry.attacks is None:
        return list(experiment.attacks)
    return [attack for attack in experiment.attacks if attack.title in entry.attacks]


def client_fields(entry: GridEntry, experiment: Experiment) -> dict[str, Any]:
    """The client's fields for this entry: the experiment's, some replaced by the entry."""
    return dataclasses.asdict(experiment.client) | (entry.client or {})


# files --------------------------------------------------------------------------------------------

SUFFIXES = (".yaml", ".yml")
OF_A_RUN = {"experiment", "made_with"}
"""Fields of the experiment.yaml in a run's folder."""


def load_experiment(config: str | Path | Mapping[str, Any] | Experiment) -> Experiment:
    """An experiment from a YAML file, a mapping or an Experiment, checked in each case.

    load_experiment("configs/demo.yaml"); load_experiment("demo"), a stock config by its name;
    load_experiment("results/demo/experiment.yaml"), what a run wrote of itself
    """
    if isinstance(config, Experiment):
        check_experiment(config, "the experiment")
        return config
    where = "the config" if isinstance(config, Mapping) else str(stock_config(config))
    content = config if isinstance(config, Mapping) else read_mapping(Path(where))
    if content.keys() == OF_A_RUN and isinstance(content["experiment"], dict):
        content = content["experiment"]
    experiment = parse(Experiment, content, where)
    check_experiment(experiment, where)
    return experiment


def check_experiment(experiment: Experiment, where: str) -> None:
    """Raise if a name does not exist, the grid is empty or fields contradict each other."""
    if experiment.models and not experiment.grid:
        raise UserError(f"{where}, grid: expected at least one entry, got none.")
    _check_titles(experiment.attacks, where)
    check_client(experiment.client, experiment.block, f"{where}, client")
    titles, cells = [attack.title for attack in experiment.attacks], 0
    for number, entry in enumerate(experiment.grid):
        place, client = f"{where}, grid.{number}", experiment.client
        for model in entry.models:
            if model not in experiment.models:
                raise UserError(f"{place}: {unknown_name('model', model, list(experiment.models))}")
        for attack in entry.attacks or ():
            if attack not in titles:
                raise UserError(f"{place}: {unknown_name('attack', attack, titles)}")
        if entry.client is not None:
            client = parse(ClientConfig, client_fields(entry, experiment), f"{place}.client")
            check_client(client, experiment.block, f"{place}.client")
        dtypes = entry.dtypes or experiment.dtypes
        if client.autocast != "none" and "float64" in dtypes:
            raise UserError(
                f"{place}: expected dtypes: [float32] with client.autocast: {client.autocast}, got "
                f"[{', '.join(dtypes)}]: torch.autocast leaves float64 as it is, so nothing would "
                "be rounded. Set dtypes: [float32] for this entry, or autocast: none."
            )
        lists = (entry.models, entry.settings, entry.gammas, attacks_of(entry, experiment), dtypes)
        cells += math.prod(map(len, lists))
    if cells > MOST_CELLS:
        raise UserError(
            f"{where}, grid: expected at most {MOST_CELLS} cells, got {cells}: models × settings × "
            "gammas × attacks × dtypes. Shorten the lists, or make several configs."
        )


def check_attacks(attacks: Sequence[AttackConfig], where: str) -> None:
    """Raise for attacks that cannot be made: a name or an option that does not exist, a value out
    of range, code of one's own that cannot be imported, a prior that cannot be read.

    It imports them, so it comes when a command is about to do its work, and before any of it.
    """
    _check_titles(attacks, where)
    for place, attack in enumerate(attacks):
        try:
            prior = getattr(find_attack(attack.name, attack.options), "prior", None)
            if isinstance(prior, str):
                check_prior(prior)
        except UserError as error:
            raise UserError(f"{where}, attacks.{place}: {error}") from error


def _check_titles(attacks: Sequence[AttackConfig], where: str) -> None:
    """Raise if two attacks have one label, and for an attack that does not exist.

    Attacks without labels may share a name: they are then told apart by their option `engine`. This
    comes before the grid: a misspelt name would make a correct one in the grid look wrong.
    """
    registered = [*ATTACKS, *CONTROLS]
    for place, attack in enumerate(attacks):
        same = [candidate for candidate in attacks if candidate.title == attack.title]
        if len(same) > 1 and any(candidate.label for candidate in same):
            raise UserError(
                f"{where}, attacks: expected labels that differ, got {attack.title!r} "
                f"{len(same)} times. Give each attack its own label."
            )
        if attack.name not in registered:
            raise UserError(
                f"{where}, attacks.{place}: {unknown_name('attack', attack.name, registered)}"
            )
