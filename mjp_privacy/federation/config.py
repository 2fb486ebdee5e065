"""The configuration of a federation: its fields; `config_files` reads and checks it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from mjp_privacy.client.config import ClientConfig, LocalSteps, ParameterName
from mjp_privacy.core.schema import (
    Label,
    Many,
    Name,
    NotNegative,
    Positive,
    Seed,
    Share,
    Whole,
    schema,
)
from mjp_privacy.experiment.config import AttackConfig
from mjp_privacy.training.config import (
    Architecture,
    Initial,
    Recipe,
    Storage,
    TrainingConfig,
)

Count = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]
"""Of rounds, clients, images."""


@schema
class Clients:
    """How many clients there are, and how the training images are split over them."""

    number: Count = 100
    per_round: Count = 8
    """Clients that take part in a round, drawn anew in every round."""
    split: Literal["iid", "dirichlet"] = "iid"
    alpha: Positive = 0.5
    """Parameter of the Dirichlet split; a small one gives each client few classes."""


@schema
class Server:
    """What the server does with the mean of the uploads, weighted by images.

    sgd on gradients is FedSGD; sgd with lr 1 on weight differences is FedAvg; adam is FedAdam.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.1
    warmup: Whole = 0
    """Rounds of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, as in AdamW."""


@schema
class Probe:
    """One kind of client whose uploads are written down, to be attacked later."""

    batch: Count = 1
    """Images in each of its steps."""
    steps: LocalSteps | None = None
    """Local steps on the same images, sent as a weight difference; None: as the federation's own
    client does."""
    uploads: Count = 1
    """Successive rounds in which it trains on the same images, each with that round's weights."""
    partners: Literal["fixed", "fresh"] = "fixed"
    """fixed: its batches are the same in every round; fresh: they are cut anew from all recorded
    images, which it shuffles before every round but the first."""


@schema
class Recording:
    """What a curious server writes down: what clients with certain images would send.

    A probe is the federation's own client, with its recipe, its defences and the round's weights;
    only batch and local steps may differ. The server never averages what a probe sends.
    """

    rounds: Annotated[tuple[Whole, ...], Many] = ()
    """Rounds, counted from 0, in which the probes' uploads begin."""
    images: Count = 8
    """Number of private training images; all rounds and probes use the same ones."""
    probes: Annotated[tuple[Probe, ...], Many] = (Probe(),)
    parameters: Annotated[tuple[ParameterName, ...], Field(min_length=1), Many] | None = None
    """Parameters whose tensors are written down; None: those that closed-form attacks read."""


@schema
class FederationConfig:
    """Everything that decides a federation's result, but for the images."""

    name: Name
    rounds: Count = 400
    model: Architecture = Architecture()
    initial: Initial | None = None
    data: Storage = Storage(store="memory")
    clients: Clients = Clients()
    client: ClientConfig = ClientConfig()
    """The same fields as in the attack's configs: batch, MJP's share and mask, defences, ..."""
    gamma: Share = 0.0
    """MJP's shuffle ratio; 0: the client does not shuffle."""
    server: Server = Server()
    record: Recording = Recording()
    attacks: Annotated[tuple[AttackConfig, ...], Many] = ()
    """Attacks that run on the recorded uploads after training; none: only record."""
    label: Label | None = None
    """What tables call this federation's client; None: its name."""
    evaluate_every: Count = 50
    """Rounds between two evaluations."""
    train_images: Count | None = None
    """Train on this many images, drawn by the seed; None: all."""
    test_images: Count | None = None
    """Evaluate on this many images, drawn by the seed; None: all."""
    seed: Seed = 0

    @property
    def title(self) -> str:
        """What tables call this federation's client."""
        return self.label or self.name

    def training(self) -> TrainingConfig:
        """The same network and images as the trainer describes them."""
        batch = Recipe(batch=self.client.batch)
        return TrainingConfig(
            self.name, model=self.model, recipe=batch, data=self.data, initial=self.initial
        )

    @property
    def setting(self) -> Literal["a", "c"]:
        """The paper's setting: c where clients shuffle, a where they do not."""
        return "c" if self.gamma else "a"


def probe_client(client: ClientConfig, probe: Probe) -> ClientConfig:
    """The federation's client with the probe's batch, partners and local steps."""
    client = replace(client, batch=probe.batch, partners=probe.partners)
    if probe.steps is None:
        return client
    return replace(client, steps=probe.steps, upload="weight_difference")


def plain(config: FederationConfig) -> dict[str, Any]:
    """The config as dictionaries and lists, for JSON."""
    return dataclasses.asdict(config)
