"""The facts of a cell, typed, and the columns of the list of cells: each fact is a column.

`describe` collects them once the model was loaded. Two hashes identify a cell: `cell_key` its line
in a table, `run_id` its rows on disk; both stay the same from one version to the next. Names of
columns never change; cells that an earlier version wrote are read with the defaults given here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjp_privacy.client.config import client_identity
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.schema import Size, height_width
from mjp_privacy.experiment.config import AttackConfig, Cell, Experiment
from mjp_privacy.interfaces import Control

if TYPE_CHECKING:
    from mjp_privacy.experiment.source import UploadSource
    from mjp_privacy.models import LoadedModel

UNRESOLVED = "unresolved"
OPTION = FileKind("a file that an attack's option names", "Give a smaller file.", 1 << 31)


@dataclass(frozen=True, kw_only=True)
class OutcomeFacts:
    """Which rows belong to the cell, and whether it could be run."""

    run_id: str = ""  # under which the cell's rows are stored
    cell_key: str | None = None
    planned_images: int = 0
    notes: tuple[str, ...] = ()
    status: str = "ok"
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class AttackFacts:
    attack: str = ""  # what tables call it
    attack_name: str = ""
    role: str = "attack"
    uploads: int = 1
    victim: str | None = None
    engine: str | None = None
    attack_options: str | None = None  # JSON
    paper_row: Mapping[str, str] | None = None

    @property
    def known_as(self) -> str:
        """Its name in the registry; cells written before there were labels have only a title."""
        return self.attack_name or self.attack


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The network that was attacked and where its weights come from; most fields are empty until
    its checkpoint was loaded."""

    model: str = ""  # its label
    checkpoint_sha: str | None = None
    architecture: str | None = None
    trained_gamma: float | None = None
    position_embedding: str | None = None
    first_block: str | None = None
    regressor: str | None = None  # of L_DAL; of rows that do not say it, batches hold L_DAL
    checkpoint: str | None = None
    size: int | None = None  # of a square's side, else the height
    width: int | None = None  # of pictures that are no squares
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: int | None = None
    interpolation: str | None = None

    @property
    def pixels(self) -> Size | None:
        """Of the pictures: a side, or height and width."""
        return (self.size, self.width) if self.size and self.width else self.size


@dataclass(frozen=True, kw_only=True)
class ClientFacts:
    """How the client made its upload: every field of `ClientConfig`, lists written out as text."""

    mode: str | None = None
    loss: str | None = None
    batch: int | None = None
    partners: str = "fixed"
    dal: bool | None = None
    dal_lambda: float | None = 0.01
    plain_share: float = 0.0
    mask: str = "image"
    augment: str = "none"
    withhold: str = ""
    positions: str = "own"
    position_noise: float = 0.0
    server_lr: float = 0.0
    upload: str = "gradient"
    lr: float = 0.1
    weight_decay: float = 0.0
    defenses: str = ""
    steps: int = 1
    optimizer: str = "sgd"
    momentum: float = 0.0
    lora: str = ""
    train: str = "all"
    autocast: str = "none"
    pseudo_gradient: str = "exact"


@dataclass(frozen=True, kw_only=True)
class CommandFacts:
    """Images and circumstances of the command that ran the cell; a later one may have others."""

    data: str | None = None
    data_place: str | None = None  # tells folders of uploads of one name apart
    data_is_papers: bool = False
    labels: str | None = None
    true_labels: bool = True
    lpips: str | None = None


@dataclass(frozen=True, kw_only=True)
class CellFacts(CommandFacts, ClientFacts, ModelFacts, AttackFacts, OutcomeFacts):
    """All facts of a cell: `facts.columns["attack"]` is a column of the list of cells."""

    setting: str
    gamma: float
    dtype: str
    seed: int
    other: Mapping[str, Any] = field(default_factory=dict)
    """Columns that only some sources have, such as the round of recorded uploads."""

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        """Every fact by the name of its column."""
        *own, _ = columns_of(CellFacts)  # the last is `other`
        found = {name: getattr(self, name) for name in own}
        lists = {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
        return {**found, **lists, **self.other}

    @classmethod
    def read(cls, columns: Mapping[str, Any]) -> CellFacts:
        """The facts in a row of the list of cells; columns that it lacks get their defaults."""
        *own, _ = columns_of(cls)
        known: dict[str, Any] = {name: columns[name] for name in own if name in columns}
        other = {name: value for name, value in columns.items() if name not in known}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known, other=other)


def columns_of(kind: type[Any]) -> tuple[str, ...]:
    """The columns of one part: columns_of(AttackFacts)[:2] is ("attack", "attack_name")."""
    return tuple(f.name for f in dataclasses.fields(kind))


def defaults_of(kind: type[Any]) -> dict[str, Any]:
    """The values that a part's columns have in cells that lack them: of AttackFacts, 1 upload."""
    return {f.name: f.default for f in dataclasses.fields(kind)}


# describing a cell --------------------------------------------------------------------------------


def describe(
    cell: Cell,
    experiment: Experiment,
    source: UploadSource,
    model: LoadedModel | None,
    reason: str = "",
) -> CellFacts:
    """The facts of a cell, as the list of cells and its rows state them.

    model   None if it is not loaded
    reason  why not
    """
    from mjp_privacy.data import Preprocessing
    from mjp_privacy.metrics.pictures import lpips_backbone

    records, client, attack = source.records(cell.model), cell.client, cell.attacker
    config, options = experiment.models[cell.model], cell.attack.options
    true_labels = all(record.label is not None for record in records)
    published = not isinstance(attack, Control) and attack.published and config.paper is not None
    paper_row = {"model": config.paper, "setting": cell.paper_setting or cell.setting}
    localizes = client.dal and model is not None and model.dal_regressor is not None
    notes = [config.note, cell.note]
    columns: dict[str, Any] = {
        **source.columns(cell.model),
        "setting": cell.setting,
        "gamma": cell.gamma,
        "dtype": cell.dtype,
        "seed": experiment.seed,
        "model": cell.model,
        "trained_gamma": config.trained_gamma,
        "attack": cell.attack.title,
        "attack_name": cell.attack.name,
        "role": attack.role if isinstance(attack, Control) else "attack",
        "uploads": cell.uploads,
        "victim": cell.victim,
        "engine": str(options.get("engine", "batched")),
        "attack_options": json.dumps(options, sort_keys=True, default=str),
        "paper_row": paper_row if published else None,
        **{f.name: getattr(client, f.name) for f in dataclasses.fields(client)},
        "dal": localizes,
        "dal_lambda": client.dal_lambda if localizes else None,
        "withhold": ", ".join(client.withheld),
        "defenses": " + ".join(client.defenses),
        "pseudo_gradient": client.pseudo_gradient,
        "run_id": run_id(cell, experiment, model, true_labels),
        "cell_key": cell_key(cell, experiment),
        "planned_images": len(records),
        "status": "failed" if reason else "ok",
        "reason": reason,
        "data": source.data,
        "data_place": source.place,
        "data_is_papers": experiment.data_is_papers,
        "labels": source.labels,
        "true_labels": true_labels,
        "lpips": lpips_backbone(),
    }
    if model is not None:
        card = model.card
        height, width = height_width(card.img_size)
        crop = Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
        notes = [*card.checkpoint.notes, *notes]
        columns |= {
            "checkpoint_sha": card.checkpoint.sha256,
            "architecture": card.architecture,
            "trained_gamma": card.trained_gamma,
            "position_embedding": model.position_embedding,
            "first_block": model.first_block,
            "regressor": model.dal_kind if localizes else None,
            "checkpoint": card.checkpoint.source,
            "size": height,
            "width": None if width == height else width,
            "mean": card.mean,
            "std": card.std,
            "resize": crop.short_side,
            "interpolation": card.interpolation,
        }
    return CellFacts.read({**columns, "notes": [note for note in notes if note]})


# identity -----------------------------------------------------------------------------------------


def cell_key(cell: Cell, experiment: Experiment) -> str:
    """The hash of the cell's line in the table, the same for every checkpoint of its model."""
    identity = {
        "model": cell.model,
        "setting": cell.setting,
        "gamma": cell.gamma,
        "dtype": cell.dtype,
        "attack": _attack_identity(cell.attack),
        "note": None,
        "paper_setting": None,
    }
    client = client_identity(cell.client)
    return _digest({"cell": identity, "client": client, "seed": experiment.seed})


def run_id(cell: Cell, experiment: Experiment, model: LoadedModel | None, true_labels: bool) -> str:
    """The hash of all that decides the cell's rows; paths, the device and a limit do not.

    The model's label is part of it, because rows state it: one checkpoint under two labels makes
    two cells. The labels of images are not: a finished image with another label is an error.
    The size of blocks is, because APRIL's float32 scores move with the images beside. A field that
    is added to a config enters here only where it differs from its default, so that the rows of
    earlier runs stay finished.
    """
    weights: Any = UNRESOLVED
    if model is not None:
        card = model.card
        weights = {
            "name": card.name,
            "architecture": card.architecture,
            "classes": card.num_classes,
            "sha256": card.checkpoint.sha256,
            "filled": card.checkpoint.notes,
            "pixels": (card.img_size, card.resize, card.interpolation, card.mean, card.std),
            "position_embedding": model.position_embedding,
            "unknown_embedding": model.unk_embed is not None,
            "index_embedding": model.index_embed is not None,
            "dal": model.dal_kind,
        }
    content: dict[str, Any] = {
        "label": cell.model,
        "model": weights,
        "setting": cell.setting,
        "gamma": cell.gamma,
        "attack": _attack_identity(cell.attack),
        "dtype": cell.dtype,
        "seed": experiment.seed,
        "client": client_identity(cell.client),
        "block": experiment.block,
        "true_labels": true_labels,
    }
    return _digest(content)


def _attack_identity(attack: AttackConfig) -> dict[str, Any]:
    """The attack's name and options, and its label if it has one, because rows state the label.

    A file that is given as an option enters by its content, not by its path.
    """
    content = dataclasses.asdict(attack)
    del content["seconds"]  # rows within it are those that the attack makes without it
    content["options"] = dict(attack.options)
    for name, value in attack.options.items():
        if isinstance(value, str) and is_there(Path(value)) and Path(value).is_file():
            content["options"][name] = OPTION.sha256(Path(value))
    return content if attack.label else {name: content[name] for name in ("name", "options")}


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
