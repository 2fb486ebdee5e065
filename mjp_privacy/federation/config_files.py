"""Reads the config of a federation: one YAML file with a base and named rows, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mjp_privacy.client.config import ClientConfig, check_client
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping
from mjp_privacy.core.schema import parse
from mjp_privacy.experiment.config import AttackConfig
from mjp_privacy.federation.config import (
    Clients,
    FederationConfig,
    Probe,
    Recording,
    Server,
    probe_client,
)
from mjp_privacy.federation.other_rounds import longest_probe, with_rounds
from mjp_privacy.training.config import Architecture, Initial, Storage
from mjp_privacy.training.config_files import row_of

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
    path: str | Path | Mapping[str, Any],
    row: str | None = None,
    *,
    rounds: int | None = None,
    **changes: Any,
) -> FederationConfig:
    """A checked config: a file or mapping, with one of its `rows` laid over its base.

    rounds: another number of them; what is recorded is taken along (`other_rounds`), as in
    `load_federation("configs/federated/cifar10.yaml", "mjp", rounds=10)`
    changes: new values of other single fields; None changes nothing
    """
    content = dict(path) if isinstance(path, Mapping) else dict(read_mapping(Path(path)))
    where = "the config" if isinstance(path, Mapping) else str(path)
    content = row_of(content, row, where)
    content.update({key: value for key, value in changes.items() if value is not None})
    config = parse(FederationConfig, content, where, _OWNERS)
    _check(config, where)
    return config if rounds is None else with_rounds(config, rounds)


def _check(config: FederationConfig, where: str) -> None:
    """Refuse values that do not fit together."""
    check_client(config.client, None, f"{where}, client")
    clients = config.clients
    if clients.per_round > clients.number:
        raise UserError(
            f"{where}, clients.per_round: expected at most clients.number ({clients.number}), got "
            f"{clients.per_round}."
        )
    if config.gamma and not config.model.unknown_embedding and not config.initial:
        raise UserError(
            f"{where}: gamma {config.gamma} shuffles patches, but the model has no unknown "
            "embedding to take the place of their position embeddings. Set "
            "model.unknown_embedding: true, or gamma: 0."
        )
    if config.client.server_lr:
        raise UserError(
            f"{where}, client.server_lr: expected 0, got {config.client.server_lr}: in a "
            "federation, the server's learning rate is server.lr. Set that."
        )
    if config.client.augment == "mixup":
        raise UserError(
            f"{where}, client.augment: expected none, flip or crop, got mixup, which would mix "
            "images of different clients."
        )
    longest = longest_probe(config)
    if late := [r for r in config.record.rounds if r + longest > config.rounds]:
        raise UserError(
            f"{where}, record.rounds: a probe's uploads take {longest} of {config.rounds} "
            f"rounds; expected rounds from 0 on in which they can begin, got {late[0]}."
        )
    for place, probe in enumerate(config.record.probes):
        _check_batches(probe, config.record.images, f"{where}, record.probes.{place}.batch")
        check_client(
            probe_client(config.client, probe),
            config.record.images,
            f"{where}, record.probes.{place}, client",
        )


def _check_batches(probe: Probe, images: int, where: str) -> None:
    """Refuse batches that the recorded images do not fill or, with fresh partners, not mix."""
    if images % probe.batch:
        raise UserError(
            f"{where}: expected a divisor of record.images ({images}), got {probe.batch}."
        )
    if probe.partners == "fixed":
        return
    if probe.batch == 1:
        raise UserError(
            f"{where}: expected 2 or more with partners: fresh, got 1: an image that is alone in "
            "its batch has no partners. Set the probe's batch to 2 or more, or its partners to "
            "fixed."
        )
    if images < 2 * probe.batch:
        raise UserError(
            f"{where}: expected at most half of record.images ({images}) with partners: fresh, got "
            f"{probe.batch}: a single batch holds the same images in every round. Set "
            f"record.images to {2 * probe.batch} or more, or the probe's partners to fixed."
        )
