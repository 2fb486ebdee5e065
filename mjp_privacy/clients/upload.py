"""One entry point for every client: inputs to upload, with all of the client's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mjp_privacy.clients.fedsgd import FedSGDClient
from mjp_privacy.clients.hardening import noisy
from mjp_privacy.config import ClientConfig
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import Victim


def make_upload(
    model: Victim,
    inputs: Sequence[ClientInput],
    client: ClientConfig,
    *,
    names: Sequence[str] | None = None,
    round: int = 0,
    seed: int = 0,
) -> ClientUpdate:
    """The uploads of n independent clients, each of client.batch images; one input a local step."""
    update = replace(FedSGDClient(model, client).update(inputs[0], names=names), round=round)
    return noisy(update, client.position_noise, inputs[0].image_ids, seed=seed)
