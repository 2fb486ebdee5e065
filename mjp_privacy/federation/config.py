"""What decides a federation: one YAML file with a base and named rows, checked once, frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mjp_privacy.client.config import ClientConfig, Share, check_client
from mjp_privacy.core.config_rows import row_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.fields import STRICT, parse
from mjp_privacy.core.yaml_files import read_mapping
from mjp_privacy.experiment.config import AttackConfig
from mjp_privacy.training.config import (
    Architecture,
    Count,
    Initial,
    NotNegative,
    Recipe,
    Storage,
    TrainingConfig,
)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class Clients:
    """How many, and who holds what."""

    number: Count = 100
    per_round: Count = 8
    """Drawn anew in every round."""
    split: Literal["iid", "dirichlet"] = "iid"
    alpha: Positive = 0.5
    """Of the Dirichlet split; small: few classes a client."""


@dataclass(frozen=True, config=STRICT)
class Server:
    """What the server does with the mean of the uploads, weighted by images.

    sgd on gradients is FedSGD; sgd with lr 1 on weight differences is FedAvg; adam is FedAdam.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.1
    warmup: Annotated[int, Field(ge=0)] = 0
    """Rounds of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: NotNegative = 0.0
    """Decoupled, as AdamW's."""


@dataclass(frozen=True, config=STRICT)
class Probe:
    """Uploads that are written down for attack, of one kind of client."""

    batch: Count = 1
    steps: Count | None = None
    """Local steps on the same images, sent as a weight difference; None: the client's own."""
    uploads: Count = 1
    """Successive rounds in which the same images are trained on, each with its own weights."""


@dataclass(frozen=True, config=STRICT)
class Recording:
    """What a curious server keeps: at these rounds, what clients with these images would send.

    A probe is the federation's own client at the round's own weights, with its recipe and
    defences, but for batch and local steps. It is set aside: what the server averages stays.
    """

    rounds: tuple[Annotated[int, Field(ge=0)], ...] = ()
    images: Count = 8
    """Private training images, one set for all rounds and probes."""
    probes: tuple[Probe, ...] = (Probe(),)
    parameters: tuple[str, ...] | None = None
    """Names that are written down; None: what the closed-form attacks read."""


@dataclass(frozen=True, config=STRICT)
class FederationConfig:
    name: str
    rounds: Count = 400
    model: Architecture = Architecture()
    initial: Initial | None = None
    data: Storage = Storage(store="memory")
    clients: Clients = Clients()
    client: ClientConfig = ClientConfig()
    """As in the attack's configs: batch, MJP's share and mask, DAL, defences, upload."""
    gamma: Share = 0.0
    """MJP's shuffle ratio; 0: the client does not shuffle."""
    server: Server = Server()
    record: Recording = Recording()
    attacks: tuple[AttackConfig, ...] = ()
    """Run on what was recorded once the training is over; none: only record."""
    label: str | None = None
    """What tables call this federation's client; None: its name."""
    evaluate_every: Count = 50
    train_images: Count | None = None
    """A seeded part of the training images; None: all."""
    test_images: Count | None = None
    seed: int = 0

    @property
    def title(self) -> str:
        return self.label or self.name

    def training(self) -> TrainingConfig:
        """As the trainer describes the same network and images."""
        batch = Recipe(batch=self.client.batch)
        return TrainingConfig(
            self.name, self.model, recipe=batch, data=self.data, initial=self.initial
        )

    @property
    def setting(self) -> Literal["a", "c"]:
        return "c" if self.gamma else "a"


_OWNERS: dict[str, Any] = {
    "model": Architecture,
    "initial": Initial,
    "data": Storage,
    "clients": Clients,
    "client": ClientConfig,
    "server": Server,
    "record": Recording,
    "attacks": AttackConfig,
}


def load_federation(
    path: str | Path | Mapping[str, Any], row: str | None = None, **changes: Any
) -> FederationConfig:
    """A config file, one of its `rows` laid over its base, and other values for single fields."""
    content = dict(path) if isinstance(path, Mapping) else dict(read_mapping(Path(path)))
    where = "the config" if isinstance(path, Mapping) else str(path)
    content = row_of(content, row, where)
    content.update({key: value for key, value in changes.items() if value is not None})
    config = parse(FederationConfig, content, where, _OWNERS)
    _check(config, where)
    return config


def _check(config: FederationConfig, where: str) -> None:
    """What crosses fields."""
    check_client(config.client, config.client.batch, f"{where}, client")
    clients = config.clients
    if clients.per_round > clients.number:
        raise UserError(
            f"{where}, clients.per_round: expected at most clients.number ({clients.number}), got "
            f"{clients.per_round}."
        )
    if config.gamma and not config.model.unknown_embedding and not config.initial:
        raise UserError(
            f"{where}: gamma {config.gamma} shuffles, and the model has no unknown embedding to "
            "take the shuffled positions' place. Set model.unknown_embedding: true, or gamma: 0."
        )
    if config.client.server_lr:
        raise UserError(f"{where}, client.server_lr: expected 0; the server's is server.lr.")
    if config.client.augment == "mixup":
        raise UserError(
            f"{where}, client.augment: expected none, flip or crop, got mixup: it would mix images "
            "of different clients."
        )
    if late := [r for r in config.record.rounds if r + _longest(config) > config.rounds]:
        raise UserError(
            f"{where}, record.rounds: expected rounds from 0 on that leave {_longest(config)} of "
            f"{config.rounds} rounds, got {late[0]}."
        )
    for place, probe in enumerate(config.record.probes):
        if config.record.images % probe.batch:
            raise UserError(
                f"{where}, record.probes.{place}.batch: expected a divisor of record.images "
                f"({config.record.images}), got {probe.batch}."
            )


def _longest(config: FederationConfig) -> int:
    return max((probe.uploads for probe in config.record.probes), default=1)


def plain(config: FederationConfig) -> dict[str, Any]:
    """For JSON."""
    return dataclasses.asdict(config)
