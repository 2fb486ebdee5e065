"""Weights, uploads and orders as Flower's records: arrays by name and plain values, no pickle.

order   weights: ArrayRecord, order: ConfigRecord (client, round, config as JSON)
reply   grads: ArrayRecord, upload: ConfigRecord, metrics: MetricRecord (examples)
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.config import FederationConfig, load_federation, plain
from mjp_privacy.interfaces import ClientUpdate

try:
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
except ImportError as error:
    raise UserError(
        "Flower: expected the package flwr, which is not installed here. "
        "pip install '.[federated]' (Python 3.11 or newer)."
    ) from error

CPU = torch.device("cpu")
LONGEST = 300  # of what is said of a client that failed
KNOWN = "weights_before"  # the server has the weights that it gave


def order_of(config: FederationConfig, weights: ArrayRecord, client: int, round: int) -> RecordDict:
    """What the server asks of a client. The config goes along, so that a node needs only images."""
    fields: dict[str, Any] = {"client": client, "round": round}
    fields["config"] = json.dumps(plain(config))
    return RecordDict({"weights": weights, "order": ConfigRecord(fields)})


def read_order(content: RecordDict) -> tuple[FederationConfig, dict[str, Tensor], int, int]:
    """The federation's config, the weights, the client and the round."""
    order = content.config_records["order"]
    config = load_federation(json.loads(str(order["config"])))
    weights = tensors(content.array_records["weights"])
    return config, weights, whole(order["client"]), whole(order["round"])


def reply_of(update: ClientUpdate, examples: int) -> RecordDict:
    """An upload with every field that is off its default; tensors by name are records."""
    content = RecordDict({"metrics": MetricRecord({"examples": examples})})
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(update):
        value = getattr(update, field.name)
        if field.name == KNOWN or value == field.default:
            continue
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        if isinstance(value, Mapping):
            content[field.name] = arrays(value)
        elif isinstance(value, (bool, int, float, str)):
            fields[field.name] = value
        else:
            raise UserError(
                f"ClientUpdate.{field.name}: expected a number, a string or tensors by name, which "
                f"a Flower message can carry, got {type(value).__name__}. Use the in-process "
                "engine."
            )
    content["upload"] = ConfigRecord(fields)
    return content


def read_reply(content: RecordDict, device: torch.device) -> tuple[ClientUpdate, int]:
    """An upload, on this device, and its number of images. Unknown fields are an error."""
    fields: dict[str, Any] = dict(content.config_records["upload"])
    fields |= {name: tensors(record, device) for name, record in content.array_records.items()}
    known = {field.name for field in dataclasses.fields(ClientUpdate)} - {KNOWN}
    if strange := sorted(set(fields) - known):
        raise UserError(
            f"An upload has the fields {', '.join(strange)}, which this server does not know. "
            "Expected the same version of mjp-privacy on server and clients."
        )
    if "dtype" in fields:
        fields["dtype"] = getattr(torch, str(fields["dtype"]))
    return ClientUpdate(**fields), whole(content.metric_records["metrics"]["examples"])


def cause(reason: str) -> str:
    """What went wrong with a client, out of what Flower and Ray wrap around it."""
    plain = re.sub(r"\x1b\[\d+m", "", reason)
    inner = plain.rpartition("Message: ")[2] if "Message: " in plain else plain
    wrapped = re.fullmatch(r"<class '[^']*'>:<'(.*)", inner, re.DOTALL)
    text = (wrapped[1] if wrapped else inner).removesuffix("'>")
    short = " ".join(text.split())
    return short if len(short) <= LONGEST else f"{short[:LONGEST]}..."


def arrays(given: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: tensor.detach().cpu() for name, tensor in given.items()})


def tensors(record: ArrayRecord, device: torch.device = CPU) -> dict[str, Tensor]:
    """By name, in memory of their own."""
    return {
        name: torch.from_numpy(array.numpy().copy()).to(device) for name, array in record.items()
    }


def whole(value: Any) -> int:
    """A number of a message, which may hold others' values."""
    if not isinstance(value, int):
        raise UserError(f"A message holds {value!r} where a whole number was expected.")
    return value
