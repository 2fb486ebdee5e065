"""The configuration of a federation: one YAML file with a base and named rows, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mjp_privacy.client.config import ClientConfig, LocalSteps, ParameterName, check_client
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import (
    Count,
    Label,
    Many,
    Name,
    NotNegative,
    Positive,
    Seed,
    Share,
    Whole,
    parse,
    schema,
)
from mjp_privacy.experiment.config import AttackConfig
from mjp_privacy.training.config import (
    Architecture,
    Initial,
    Storage,
    merged,
    opened,
    row_of,
)


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
    """Number of private training images; all rounds and probes use the same ones. Each probe takes
    as many of those that there are as fill its batches."""
    probes: Annotated[tuple[Probe, ...], Many] = (Probe(),)
    parameters: Annotated[tuple[ParameterName, ...], Field(min_length=1), Many] | None = None
    """Parameters whose tensors are written down; None: the embeddings', those of block 0's
    linear layers and those that the config's attacks read; all that is sent where that is low-rank
    adapters or the head alone."""


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
    """Evaluate on this many images, drawn by the seed and spread evenly over the classes, whose
    top-1 is then the test accuracy; None: all."""
    seed: Seed = 0

    @property
    def title(self) -> str:
        return self.label or self.name


def probe_client(client: ClientConfig, probe: Probe) -> ClientConfig:
    """The federation's client with the probe's batch, partners and local steps."""
    client = replace(client, batch=probe.batch, partners=probe.partners)
    if probe.steps is None:
        return client
    return replace(client, steps=probe.steps, upload="weight_difference")


def load_federation(
    path: str | Path | Mapping[str, Any], row: str | None = None, **changes: Any
) -> FederationConfig:
    """A checked config: a file or mapping, with one of its `rows` laid over its base, then the
    changes that are not None."""
    content, where = opened(path)
    content = row_of(content, row, where)
    content |= {key: value for key, value in changes.items() if value is not None}
    content = merged({"data": {"store": "memory"}}, content)
    config = parse(FederationConfig, content, where)
    _check(config, where)
    return config


def _check(config: FederationConfig, where: str) -> None:
    client, clients, data, model = config.client, config.clients, config.data, config.model
    longest = max((probe.uploads for probe in config.record.probes), default=1)
    check_client(client, None, f"{where}, client")
    late = [start for start in config.record.rounds if start + longest > config.rounds]
    for wrong, field, expected in (
        (
            clients.per_round > clients.number,
            "clients.per_round",
            f"at most clients.number ({clients.number}), got {clients.per_round}",
        ),
        (
            config.gamma and not config.model.unknown_embedding and not config.initial,
            "gamma",
            "0 for a model without an unknown embedding, which takes the place of the position "
            "embeddings of shuffled patches; or set model.unknown_embedding: true",
        ),
        (client.server_lr, "client.server_lr", "0: in a federation that is server.lr"),
        (data.store != "memory", "data.store", f"memory, where images are kept; got {data.store}"),
        (
            data.native_size is not None,
            "data.native_size",
            f"null, for images are kept at model.img_size; got {data.native_size}",
        ),
        (
            model.drop_path not in (0, Architecture.drop_path),
            "model.drop_path",
            f"none or 0, for clients train without; got {model.drop_path}",
        ),
        (
            client.augment == "mixup",
            "client.augment",
            "none, flip or crop; mixup would mix images of different clients",
        ),
        (
            config.attacks and not config.record.rounds,
            "record.rounds",
            "rounds whose uploads the attacks read, or no attacks; got none",
        ),
        (
            late,
            "record.rounds",
            f"rounds in which a probe can begin, at most {config.rounds - longest}, for its "
            f"uploads take {longest} of {config.rounds} rounds; got {late[:1]}",
        ),
    ):
        if wrong:
            raise UserError(f"{where}, {field}: expected {expected}.")
    for place, probe in enumerate(config.record.probes):
        check_client(probe_client(client, probe), None, f"{where}, record.probes.{place}")
